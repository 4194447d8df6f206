"""Waits for an idle machine, and reports how much other processes used it meanwhile."""

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

DISTURBED = 0.1  # cores that other processes used; beyond it a run's times are doubtful


def announce(runs: int, patience: float) -> None:
    """Say on stderr what may take long before anything is printed."""
    wait = f"up to {patience:.0f} s for each to have an idle machine (--patience)"
    _report(f"runs: {runs}, {wait if patience > 0 else 'while other programs use the machine'}")


def watched(run: Callable[[], dict], patience: float) -> dict:
    """The figures that `run` gives, with `other_load`: the cores that other processes used meanwhile.

    Waits for the machine to be idle and repeats a run that was disturbed, for up to `patience` seconds, and
    says so on stderr.
    """
    end = time.monotonic() + patience
    while True:
        _wait_for_idle(end)
        load, figures = load_of_others(run)
        if load <= DISTURBED or time.monotonic() >= end:
            return figures | {"other_load": load}
        _report(f"other processes used {load:.1f} cores meanwhile: this run is repeated")


def _wait_for_idle(end: float) -> None:
    reported = False
    while time.monotonic() < end:
        load, _ = load_of_others(lambda: time.sleep(1))
        if load <= DISTURBED:
            return
        if not reported:
            left = max(0.0, end - time.monotonic())
            _report(f"other processes use {load:.1f} cores: waiting up to {left:.0f} s for them to end")
        reported = True


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load_of_others(action: Callable[[], Any]) -> tuple[float, Any]:
    """(cores that processes other than this one's children used during `action`, its result)."""
    start, busy, own = time.monotonic(), busy_seconds(), children_seconds()
    result = action()
    others = (busy_seconds() - busy) - (children_seconds() - own)
    return max(0.0, others / (time.monotonic() - start)), result


def busy_seconds() -> float:
    """Processor time that all processes of this machine have used, over all cores, and what its host kept."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal


def children_seconds() -> float:
    """Processor time that this process's children, now ended, have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
