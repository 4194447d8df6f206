"""Times of ours and of the raw call, alternating, then a check of each. Collective."""

import time
from dataclasses import dataclass
from functools import partial

import numpy as np

from shardrt.comm import Communicator
from shardrt.comm.objects import all_gather_object
from shardrt.device import Array

from ..harness.values import count_wrong, fill, poison
from . import report
from .contestants import Contestant
from .ops import Case


@dataclass(frozen=True)
class Effort:
    """How often. Of each of `rounds` rounds, `calls` calls in a row are timed; checks: rounds of checking.

    blocking, over_ranks: nccl-tests' -z and -a. After each call 1 and 3 wait for it and for all ranks, 2 for
    it; 3 does not count the wait for ranks. Of the ranks' times 0 takes rank 0's, 1 the mean, 2 the least,
    3 the largest.
    """

    warmup: int
    calls: int
    rounds: int
    checks: int
    blocking: int = 0
    over_ranks: int = 1

    def one(self, seconds: np.ndarray) -> np.ndarray:
        """Of times by rank (the first axis), the one that is reported."""
        return (seconds[0], seconds.mean(axis=0), seconds.min(axis=0), seconds.max(axis=0))[self.over_ranks]


def line(
    name: str, case: Case, ours: Contestant, raw: Contestant | None, control: Communicator, effort: Effort
) -> dict:
    """Time and check one case; see report.record. `control` starts the rounds and brings figures together."""
    contestants = {"ours": ours, "raw": raw}
    offering = {who: each for who, each in contestants.items() if each is not None and each.offers(case)}
    seconds = dict(zip(offering, _timed([*offering.values()], case, control, effort), strict=True))
    wrong = {who: wrong_elements(each, case, control, effort.checks) for who, each in offering.items()}
    return report.record(name, case, wrong, seconds, effort.one)


def _timed(contestants: list[Contestant], case: Case, control: Communicator, effort: Effort) -> np.ndarray:
    """Seconds of a call, of every contestant, rank and round."""
    arrays = []
    for contestant in contestants:
        source, target = contestant.arrays(case)
        for array in (source, target):
            array.fill(0)  # sums of what was summed before would run out of their type
        for _ in range(effort.warmup):
            contestant.call(source, target, case)
        arrays.append((source, target))
    rounds = [
        [_round(each, *own, case, control, effort) for each, own in zip(contestants, arrays, strict=True)]
        for _ in range(effort.rounds)
    ]
    return np.array(all_gather_object(control, rounds)).transpose(2, 0, 1)


def _round(
    contestant: Contestant, source: Array, target: Array, case: Case, control: Communicator, effort: Effort
) -> float:
    """Seconds of a call on this rank, from a start that all ranks share."""
    stream = contestant.device.current_stream
    call = getattr(contestant, case.op.name)
    stream.synchronize()
    control.barrier(stream=stream)
    apart = 0.0
    start = time.perf_counter()
    for _ in range(effort.calls):
        call(source, target, case)
        if effort.blocking:
            stream.synchronize()
        if effort.blocking in (1, 3):
            done = time.perf_counter()
            control.barrier(stream=stream)
            apart += time.perf_counter() - done
    stream.synchronize()
    spent = time.perf_counter() - start
    return (spent - apart if effort.blocking == 3 else spent) / effort.calls


def wrong_elements(contestant: Contestant, case: Case, control: Communicator, checks: int) -> int | None:
    """Wrong elements on all ranks, each round with other values."""
    if not checks:
        return None
    device, rank = contestant.device, contestant.rank
    stream = device.current_stream
    source, target = contestant.arrays(case)
    wrong = 0
    for round_ in range(1, checks + 1):
        control.barrier(stream=stream)  # a shared target is poisoned when no rank reads it
        poison(target)
        stream.synchronize()
        control.barrier(stream=stream)
        if case.gives(rank):
            fill(device, source, lambda indices, r=round_: case.given(rank, indices, r))
        stream.synchronize()
        contestant.call(source, target, case)
        stream.synchronize()
        if case.gets(rank):
            right = partial(case.expected, rank, round_=round_)
            wrong += count_wrong(device, target, right, case.tolerance)
    return sum(all_gather_object(control, wrong))
