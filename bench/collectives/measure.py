"""One line: time of ours and of the raw call, alternating, then a check of each. Collective."""

import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from bench.collectives.contestants import Contestant
from bench.collectives.ops import Case
from bench.collectives.values import count_wrong, fill, poison
from shardrt import device as devices
from shardrt.comm import Communicator
from shardrt.device import Array


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


@dataclass(frozen=True)
class Line:
    """Seconds of a call over ranks, each rank's median over rounds. None where the check failed.

    time, raw: the one over ranks that `Effort.over_ranks` chooses, ours and the raw call's; None also where
    there is no such call. wrong: elements, on all ranks in all rounds of checking; None where nothing was
    checked. overhead, ratio: ours less and over the raw call's within a round, median over rounds. fastest:
    the round that was disturbed least.
    """

    communicator: str
    case: Case
    time: float | None = None
    average: float | None = None
    least: float | None = None
    most: float | None = None
    wrong: int | None = None
    raw: float | None = None
    raw_wrong: int | None = None
    overhead: float | None = None
    ratio: float | None = None
    fastest: float | None = None
    raw_fastest: float | None = None

    @property
    def algorithm(self) -> float | None:
        """Bytes per second: the size over the time."""
        return self.case.nbytes / self.time if self.time else None

    @property
    def bus(self) -> float | None:
        """Bytes per second that the slowest link carries, for the best algorithm; comparable between ops."""
        return self.algorithm * self.case.op.bus(self.case.ranks) if self.time else None

    @property
    def overhead_allowed(self) -> float | None:
        """What we allow ourselves above the raw call: 5 us and 1 % of it."""
        return 5e-6 + 0.01 * self.raw if self.raw else None


def line(
    name: str, case: Case, ours: Contestant, raw: Contestant | None, control: Communicator, effort: Effort
) -> Line:
    """Time and check one case. `control` starts the rounds and brings the ranks' figures together."""
    contestants = [each for each in (ours, raw) if each is not None and each.offers(case)]
    seconds = _timed(contestants, case, control, effort)  # (ranks, contestants, rounds)
    wrong = [wrong_elements(contestant, case, control, effort.checks) for contestant in contestants]
    rounds = effort.one(seconds)  # (contestants, rounds)
    times = effort.one(np.median(seconds, axis=2))  # (contestants,)
    found = Line(name, case)
    for who, contestant in enumerate(contestants):
        right = not wrong[who]
        time_, fastest = (float(times[who]), float(rounds[who].min())) if right else (None, None)
        if contestant is raw:
            found = replace(found, raw=time_, raw_wrong=wrong[who], raw_fastest=fastest)
            continue
        found = replace(found, time=time_, wrong=wrong[who], fastest=fastest)
        if right:
            ranks = np.median(seconds[:, who], axis=1)
            over = {"average": float(ranks.mean()), "least": float(ranks.min()), "most": float(ranks.max())}
            found = replace(found, **over)
    if len(contestants) == 2 and not any(wrong):
        overhead, ratio = np.median(rounds[0] - rounds[1]), np.median(rounds[0] / rounds[1])
        found = replace(found, overhead=float(overhead), ratio=float(ratio))
    return found


def _timed(contestants: list[Contestant], case: Case, control: Communicator, effort: Effort) -> np.ndarray:
    """Seconds of a call, of every rank, contestant and round."""
    arrays = []
    for contestant in contestants:
        source, target = contestant.arrays(case)
        for array in (source, target):
            array.fill(0)  # sums of what was summed before would run out of their type
        for _ in range(effort.warmup):
            contestant.call(source, target, case)
        arrays.append((source, target))
    seconds = np.zeros((control.size, len(contestants), effort.rounds))
    for round_ in range(effort.rounds):
        for which, contestant in enumerate(contestants):
            seconds[control.rank, which, round_] = _round(contestant, *arrays[which], case, control, effort)
    stream = devices.current().current_stream
    control.all_gather(seconds.reshape(-1), stream=stream)
    return seconds


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
    total = np.array([wrong], np.int64)
    control.all_reduce(total, stream=devices.current().current_stream)
    return int(total[0])
