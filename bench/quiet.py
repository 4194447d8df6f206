"""Waits for a machine that others don't use, and says how much they used it meanwhile."""

import os
import resource
import time
from collections.abc import Callable
from typing import Any

DISTURBED = 0.1  # cores that other processes used; beyond it a run's times are doubtful


def watched(run: Callable[[], dict], patience: float) -> dict:
    """The figures that `run` gives, with `other_load`: the cores that other processes used meanwhile.

    Waits for the machine to be idle and repeats a run that was disturbed, for up to `patience` seconds.
    """
    end = time.monotonic() + patience
    while True:
        while time.monotonic() < end and load_of_others(lambda: time.sleep(1))[0] > DISTURBED:
            pass
        load, figures = load_of_others(run)
        if load <= DISTURBED or time.monotonic() >= end:
            return figures | {"other_load": load}


def load_of_others(action: Callable[[], Any]) -> tuple[float, Any]:
    """(cores that processes other than this one's children used during `action`, its result)."""
    start, busy, own = time.monotonic(), busy_seconds(), children_seconds()
    result = action()
    others = (busy_seconds() - busy) - (children_seconds() - own)
    return max(0.0, others / (time.monotonic() - start)), result


def busy_seconds() -> float:
    """Processor time that all processes of this machine have used, over all cores, and what its host kept."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _wait, irq, softirq, steal, *_ = (
            int(word) for word in file.readline().split()[1:]
        )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def children_seconds() -> float:
    """Processor time that this process's children, now ended, have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
