"""Communicators that are wrong in one way, in each op and test: they get no figure, and exit code 1."""

import json

import numpy as np
import pytest

from bench.collectives.__main__ import Collectives
from bench.collectives.ops import OPS
from bench.harness.benchmark import main
from bench.overlap import PLACES, Overlap
from bench.p2p.__main__ import PointToPoint
from bench.p2p.cases import TESTS
from shardrt.comm.interceptors import Interceptor

ONCE = ["-b", "1K", "-e", "1K", "-n", "1", "--rounds", "1", "-c", "2", "--json"]
ROOT, OTHER = 1, 2


class Wrong(Interceptor):
    """Makes a call, then spoils its result. victim: the rank that does so; None: all."""

    def __init__(self, communicator, victim=None):
        super().__init__(communicator)
        self.victim = victim
        self.last = {}

    def intercept(self, call, run):
        if call.name in ("barrier", "send") or self.victim not in (None, self.communicator.rank):
            return run

        def wrong(target, *args):  # each call has its result in its first argument
            before = target.copy()
            run(target, *args)
            self.spoil(call.name, target, before)

        return wrong


class Nothing(Wrong):
    """Leaves what was there."""

    def spoil(self, name, target, before):
        target[:] = before


class Last(Wrong):
    """Gives what the same call gave last time."""

    def spoil(self, name, target, before):
        right = target.copy()
        target[:] = self.last.get((name, target.nbytes), before)
        self.last[name, target.nbytes] = right


class Swapped(Wrong):
    """Swaps two slices."""

    def spoil(self, name, target, before):
        target[:] = np.roll(target, target.size // 2)


class OneElement(Wrong):
    """The last element is another number."""

    def spoil(self, name, target, before):
        target[-1:] += 1


KINDS = (Nothing, Last, Swapped, OneElement)


def lines_of(benchmark, wrong, words, capsys, victim=None):
    """The lines of a run that must end with exit code 1."""

    def wrap(communicator):
        wrong(communicator, victim)
        return communicator

    benchmark.wrap = wrap
    assert main(benchmark, [*words, *ONCE]) == 1
    return json.loads(capsys.readouterr().out)["lines"]


@pytest.mark.parametrize("wrong", KINDS)
@pytest.mark.parametrize("alone", [False, True], ids=["all", "alone"])
def test_collectives(wrong, alone, capsys):
    for op in sorted(OPS.keys() - {"reduce"}):  # which shardrt has not
        victim = (ROOT if op == "gather" else OTHER) if alone else None
        lines = lines_of(Collectives(), wrong, [op, "-t", "4", "-r", str(ROOT)], capsys, victim)
        assert {line["place"] for line in lines} == set(OPS[op].places)
        for line in lines:
            assert line["wrong"] > 0 and line["time_us"] is line["bus_gb_s"] is None, line


@pytest.mark.parametrize("wrong", KINDS)
@pytest.mark.parametrize("victim", [None, 0, 1])
def test_messages(wrong, victim, capsys):
    lines = lines_of(PointToPoint(), wrong, ["-t", "2", "-W", "3"], capsys, victim)
    assert {line["test"].partition("_")[0] for line in lines} == {test.partition("_")[0] for test in TESTS}
    for line in lines:
        assert line["wrong"] > 0 and line["p50_us"] is line["gb_s"] is None, line


@pytest.mark.parametrize("wrong", KINDS)
@pytest.mark.parametrize("victim", [None, 1])
def test_overlapped_collectives(wrong, victim, capsys):
    words = ["-t", "2", "--side", "8", "--matmuls", "1"]
    lines = lines_of(Overlap(), wrong, words, capsys, victim)
    assert {line["op"] for line in lines} == set(PLACES)
    for line in lines:
        assert line["wrong"] > 0 and line["together_us"] is line["overlap_pct"] is None, line
