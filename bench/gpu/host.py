"""What a launch costs the host, in microseconds: tiny kernels, queued and not waited for."""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from .clock import Clock, Torch, blank, filled
from .state import Run

CALLS = 400  # less than the driver queues before it makes the host wait
ROUNDS = 7


def measure(run: Run, calls: int = CALLS) -> None:
    """A row for each way to launch."""
    clock = Clock()
    kernels, torch = clock.device.kernels, Torch(clock)
    x, row = filled(16), filled(1, 64)
    weight, y = filled(64, 64), blank(1, 64)
    works = {
        "a kernel": lambda: kernels.elementwise.scale_(x, 1.0),
        "a product": lambda: kernels.matmul.matmul(row, weight, y),
        "an allocation": lambda: clock.device.empty((16,), np.float32),
        "an event, recorded and waited for": _handover(clock),
    }
    peers = {}
    with torch.stream():
        if torch.there:
            tx, trow, tw = map(torch.of, (x, row, weight))
            out = torch.torch.empty_like(trow)
            peers["a kernel"] = lambda: tx.mul_(1.0)
            peers["a product"] = lambda: torch.torch.mm(trow, tw, out=out)
            peers["an allocation"] = lambda: torch.torch.empty(16, device=tx.device)
        for name, work in works.items():
            with run.guarded(name):
                theirs = _microseconds(clock, peers[name], calls) if name in peers else None
                beside = "torch" if theirs else ""
                run.add(name, _microseconds(clock, work, calls), "us", beside=beside, theirs=theirs)


def _handover(clock: Clock) -> Callable[[], None]:
    stream, event = clock.device.new_stream("other"), clock.device.new_event()

    def work() -> None:
        clock.device.current_stream.record(event)
        stream.wait(event)

    return work


def _microseconds(clock: Clock, work: Callable[[], Any], calls: int) -> float:
    """Of the host, per call; the least disturbed rounds count."""
    times = [1e6 * clock.on_host(work, calls, wait=False) for _ in range(ROUNDS)]
    clock.finish()
    return statistics.median(sorted(times)[: ROUNDS // 2 + 1])
