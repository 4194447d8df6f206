"""Times contestants that alternate, then checks each of them. Collective over the ranks of `control`."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from shardrt.comm import Communicator
from shardrt.comm.objects import all_gather_object
from shardrt.device import Device

Call = Callable[[], Any]


@dataclass(frozen=True)
class Contestant:
    """One way to do a case.

    Attributes:
        call: does it once; on a GPU it returns when the work is launched in the current stream. All that can
            be done before is done: the time of `call` is what is measured.
        check: does it once with the values of a round (1, 2, ...), and gives the number of wrong elements on
            this rank. None: there is nothing to check.
    """

    call: Call
    check: Callable[[int], int] | None = None


@dataclass(frozen=True)
class Effort:
    """How often. Of each of `rounds` rounds, `calls` calls in a row are timed; checks: rounds of checking.

    each: whether every call is timed by itself, too (nccl-tests' -I). blocking, over_ranks: its -z and -a.
    After each call, blocking 1 and 3 wait for it and for all ranks, 2 for it; 3 does not count the wait for
    ranks. Of the ranks' times over_ranks 0 takes rank 0's, 1 the mean, 2 the least, 3 the largest.
    """

    warmup: int = 1
    calls: int = 20
    rounds: int = 3
    checks: int = 1
    each: bool = False
    blocking: int = 0
    over_ranks: int = 1

    def one(self, seconds: np.ndarray) -> np.ndarray:
        """Of times by rank (the first axis), the one that is reported."""
        return (seconds[0], seconds.mean(axis=0), seconds.min(axis=0), seconds.max(axis=0))[self.over_ranks]


@dataclass(frozen=True)
class Measured:
    """What became of one contestant.

    Attributes:
        seconds: of a call, (ranks, rounds): the mean of the calls of a round.
        each: seconds of every call, (ranks, rounds * calls) in their order; None unless that was asked for.
        wrong: elements on all ranks; None where nothing was checked.
    """

    seconds: np.ndarray
    each: np.ndarray | None
    wrong: int | None


class HostReadings:
    """The clock of the host. A GPU's is bench.gpu.clock.Events: its readings are events in the stream."""

    now = staticmethod(time.perf_counter_ns)

    def seconds(self, stop: int, start: int) -> float:
        """Between two readings."""
        return (stop - start) / 1e9


def readings_of(device: Device) -> Any:
    """The clock that tells when a call of `device` was done."""
    if device.name == "cpu":
        return HostReadings()
    from ..gpu.clock import Events

    return Events()


def measured(
    contestants: Mapping[str, Contestant], device: Device, control: Communicator, effort: Effort
) -> dict[str, Measured]:
    """Time contestants in turns, then check them. `control` starts the rounds and brings figures together."""
    read = readings_of(device)
    for contestant in contestants.values():
        for _ in range(effort.warmup):
            contestant.call()
    rounds = [
        [_round(contestant.call, device, control, effort, read) for contestant in contestants.values()]
        for _ in range(effort.rounds)
    ]
    found = np.array(all_gather_object(control, rounds))  # ranks, rounds, contestants, figures of a round
    wrong = {who: wrong_elements(each, device, control, effort.checks) for who, each in contestants.items()}
    return {who: _measured(found[:, :, place], wrong[who]) for place, who in enumerate(contestants)}


def in_order(*calls: Call) -> Call:
    """One call that makes all of these, or none. A loop over two would cost 40 ns, 3 % of a short message."""
    if len(calls) == 1:
        return calls[0]
    if len(calls) == 2:
        first, second = calls

        def both() -> None:
            first()
            second()

        return both

    def everyone() -> None:
        for call in calls:
            call()

    return everyone


def _measured(figures: np.ndarray, wrong: int | None) -> Measured:
    """figures: (ranks, rounds, seconds of a call by the whole round, then those of each call)."""
    each = figures[:, :, 1:].reshape(len(figures), -1)
    return Measured(figures[:, :, 0], each if each.size else None, wrong)


def wrong_elements(contestant: Contestant, device: Device, control: Communicator, checks: int) -> int | None:
    """Wrong elements on all ranks, each round with other values."""
    if not checks or contestant.check is None:
        return None
    wrong = 0
    for number in range(1, checks + 1):
        wrong += contestant.check(number)
    device.current_stream.synchronize()
    return sum(all_gather_object(control, wrong))


def _round(call: Call, device: Device, control: Communicator, effort: Effort, read: Any) -> list[float]:
    """Seconds of a call on this rank, from a start that all ranks share; then of each, if asked for."""
    stream = device.current_stream
    stream.synchronize()
    meet = partial(control.barrier, stream=stream)
    meet()
    with _without_collector():
        if effort.blocking:
            each = _blocking(call, effort, stream.synchronize, meet)
        elif effort.each:
            each = one_by_one(call, effort.calls, read)
        else:
            return [in_a_row(call, effort.calls, stream.synchronize)]
    return [sum(each) / effort.calls, *(each if effort.each else ())]


def in_a_row(call: Call, calls: int, wait: Call) -> float:
    """Seconds of one of so many calls, all together, until the last is done."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - start) / calls


def one_by_one(call: Call, calls: int, read: Any) -> list[float]:
    """Seconds of each of so many calls: between a reading of the clock after it and the one before.

    A call costs one reading and one assignment more than without: 0.1 us on the host.
    """
    now, stamps = read.now, [None] * (calls + 1)
    stamps[0] = now()
    for place in range(1, calls + 1):
        call()
        stamps[place] = now()
    return [read.seconds(stop, start) for start, stop in pairwise(stamps)]


def _blocking(call: Call, effort: Effort, wait: Call, meet: Call) -> list[float]:
    """Seconds of each call with what -z has after it."""
    found = []
    for _ in range(effort.calls):
        start = time.perf_counter()
        call()
        wait()
        done = time.perf_counter()
        if effort.blocking in (1, 3):
            meet()
        found.append((done if effort.blocking == 3 else time.perf_counter()) - start)
    return found


@contextmanager
def _without_collector() -> Iterator[None]:
    """A block that the garbage collector does not interrupt: its pauses are not the call's."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
