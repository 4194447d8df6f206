"""Calls of recorded ranks that don't match: each way in which two ranks may differ."""

import numpy as np
import pytest

from shardrt.comm import init_device_mesh
from shardrt.device.cpu import CPUDevice
from shardrt.device.cuda import CUDADevice
from shardrt.device.program import Collective
from shardrt.simulate.calls import mismatches, unordered
from shardrt.simulate.deadlocks import deadlock
from shardrt.simulate.script import record_of
from tests.races.recorded import Case, recorded
from tests.simulate.written import Written

EACH = {0: [0], 1: [1]}
DEVICES = pytest.mark.parametrize("like", [CPUDevice, CUDADevice])


def two(first, second, like=CPUDevice):
    """Programs of two ranks, which call functions of (communicator, stream, make arrays)."""

    def calls():
        mesh = init_device_mesh("auto")
        links = mesh.communicator("gather")
        (first, second)[links.rank](links, mesh.device.current_stream, mesh.device.zeros)

    return record_of(calls, 2, like=like, stands_for=EACH)


@DEVICES
def test_a_block_of_equal_size_that_one_rank_skips_is_found(like):
    def gathers(*names):
        def calls(links, stream, zeros):
            for name in names:
                links.all_gather(zeros(8, np.float32), stream=stream, tag=name)

        return calls

    programs = two(gathers("blocks.0", "blocks.1"), gathers("blocks.0", "blocks.2"), like)
    (found,) = mismatches(programs)
    assert found.startswith("rank 1, all_gather of 32 bytes for blocks.2, stream compute, ")
    assert ": meets rank 0, all_gather of 32 bytes for blocks.1, stream compute, " in found
    assert not deadlock(programs) and not mismatches(two(*[gathers("blocks.0")] * 2, like))


F4, F8 = np.float32, np.float64
DIFFERENCES = {
    "call": (
        lambda c, s, z: c.all_gather(z(8, F4), stream=s, tag="x"),
        lambda c, s, z: c.all_reduce(z(8, F4), stream=s, tag="x"),
    ),
    "bytes": [lambda c, s, z, n=n: c.all_gather(z(n, F4), stream=s) for n in (8, 10)],
    "dtype": [lambda c, s, z, n=n, t=t: c.all_gather(z(n, t), stream=s) for n, t in ((8, F4), (4, F8))],
    "op": [lambda c, s, z, op=op: c.all_reduce(z(8, F4), op=op, stream=s) for op in ("sum", "prod")],
    "root": [lambda c, s, z, root=root: c.broadcast(z(8, F4), root=root, stream=s) for root in (0, 1)],
    "tag": [lambda c, s, z, tag=tag: c.reduce_scatter(z(4, F4), z(8, F4), stream=s, tag=tag) for tag in "ab"],
}
MESSAGES = {
    "bytes of a message": (
        lambda c, s, z: c.send(z(8, F4), peer=1, stream=s),
        lambda c, s, z: c.recv(z(4, F4), peer=0, stream=s),
    ),
    "tag of a message": (
        lambda c, s, z: c.send(z(8, F4), peer=1, stream=s, tag="a"),
        lambda c, s, z: c.recv(z(8, F4), peer=0, stream=s, tag="b"),
    ),
    "no receive": (lambda c, s, z: c.send(z(8, F4), peer=1, stream=s), lambda c, s, z: None),
    "no send": (lambda c, s, z: None, lambda c, s, z: c.recv(z(8, F4), peer=0, stream=s)),
}
DIFFERENCES |= MESSAGES


@DEVICES
@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ_are_found(what, like):
    assert len(mismatches(two(*DIFFERENCES[what], like))) == 1


@DEVICES
def test_ranks_that_do_not_differ_are_not(like):
    def calls(links, stream, zeros):
        for what, (first, second) in DIFFERENCES.items():
            if what not in MESSAGES:
                first(links, stream, zeros)
                second(links, stream, zeros)
        if links.rank == 0:
            links.send(zeros(8, F4), peer=1, stream=stream, tag="a")
        else:
            links.recv(zeros(8, F4), peer=0, stream=stream, tag="a")

    assert not mismatches(two(calls, calls, like))


@DEVICES
def test_each_rank_receives_what_the_other_one_sends(like):
    def swaps(sent, received):
        def calls(links, stream, zeros):
            output, buffer = (zeros(sum(counts), np.float32) for counts in (received, sent))
            links.all_to_all(output, buffer, sent=sent, received=received, stream=stream)

        return calls

    right = two(swaps([1, 2], [1, 3]), swaps([3, 4], [2, 4]), like)
    wrong = two(swaps([1, 2], [1, 3]), swaps([3, 4], [1, 4]), like)
    for program in (*right, *wrong):
        program.exact = True
    assert not mismatches(right)
    (found,) = mismatches(wrong)
    assert ": sends 8 bytes, and 4 are received, by rank 1, all_to_all" in found
    for program in wrong:  # planned: of one rank that stands for others
        program.exact = False
    assert not mismatches(wrong)


def test_a_communicator_in_two_streams_needs_an_event_between():
    def written(ordered):
        program = Written()
        program.call("gather", "all_gather", "one.py:1")
        if ordered:
            program.wait("reduce", program.record("gather"), "wait.py")
        program.call("reduce", "all_gather", "two.py:2")
        return [program]

    assert not unordered(written(ordered=True))
    assert unordered(written(ordered=False)) == [
        "rank 0, all_gather, stream gather, one.py:1: nothing puts it before all_gather, stream reduce, "
        "two.py:2, of the same communicator"
    ]


class Each(Case):
    """Every rank is recorded."""

    roles = property(lambda self: {rank: [rank] for rank in range(self.ranks)})


CASES = [
    Case(("pipeline", "accumulate", "bf16")),
    Case(("pipeline", "FULL_SHARD"), like=CPUDevice),
    Each(("expert parallel", "context parallel")),
    Case(("expert parallel", "SHARD_GRAD_OP"), shared=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_features_match_on_every_rank_and_do_not_block(case, tmp_path):
    programs = recorded(case, tmp_path, exact=isinstance(case, Each))
    assert len(programs) > 1
    assert not mismatches(programs) and not unordered(programs) and not deadlock(programs)
    calls = [item for program in programs for item in program.items if isinstance(item, Collective)]
    assert sum(item.tag != "" for item in calls) > len(calls) / 2
