"""One line: time of ours and of the raw call by turns, then a check of each. Collective."""

import time
from dataclasses import dataclass, replace

import numpy as np

from bench.collectives.contestants import Contestant
from bench.collectives.ops import ROOT, Case
from bench.collectives.values import count_wrong, fill, poison
from shardrt import device as devices
from shardrt.comm import Communicator
from shardrt.device import Array


@dataclass(frozen=True)
class Effort:
    """How often. Of each of `rounds` rounds, `calls` calls in a row are timed; checks: rounds of checking."""

    warmup: int
    calls: int
    rounds: int
    checks: int


@dataclass(frozen=True)
class Line:
    """Seconds of a call over ranks, each rank's median over rounds. None where the check failed.

    wrong: elements, on all ranks in all rounds of checking; None where nothing was checked. overhead: ours
    less the raw call's, both averaged over ranks, median over rounds. fastest: the round that was disturbed
    least, averaged over ranks.
    """

    communicator: str
    case: Case
    average: float | None
    least: float | None
    most: float | None
    wrong: int | None
    raw: float | None = None
    raw_wrong: int | None = None
    overhead: float | None = None
    fastest: float | None = None
    raw_fastest: float | None = None

    @property
    def algorithm(self) -> float | None:
        """Bytes per second: the size over the average time."""
        return self.case.nbytes / self.average if self.average else None

    @property
    def bus(self) -> float | None:
        """Bytes per second that the slowest link carries, for the best algorithm; comparable between ops."""
        return self.algorithm * self.case.op.bus(self.case.ranks) if self.average else None

    @property
    def overhead_allowed(self) -> float | None:
        """What we allow ourselves above the raw call: 5 us and 1 % of it."""
        return 5e-6 + 0.01 * self.raw if self.raw else None


def line(
    name: str, case: Case, ours: Contestant, raw: Contestant | None, control: Communicator, effort: Effort
) -> Line:
    """Time and check one case. `control` starts the rounds and brings the ranks' figures together."""
    raw = raw if raw is not None and raw.offers(case) else None
    contestants = [ours] if raw is None else [ours, raw]
    seconds = _timed(contestants, case, control, effort)  # (ranks, contestants, rounds)
    wrong = [_wrong(contestant, case, control, effort.checks) for contestant in contestants]
    ranks = np.median(seconds[:, 0], axis=1)
    found = Line(name, case, None, None, None, wrong[0], raw_wrong=None if raw is None else wrong[1])
    rounds = seconds.mean(axis=0)  # (contestants, rounds)
    if not wrong[0]:
        times = {"average": float(ranks.mean()), "least": float(ranks.min()), "most": float(ranks.max())}
        found = replace(found, **times, fastest=float(rounds[0].min()))
    if raw is not None and not wrong[1]:
        theirs = float(np.median(seconds[:, 1], axis=1).mean())
        found = replace(found, raw=theirs, raw_fastest=float(rounds[1].min()))
        if not wrong[0]:
            found = replace(found, overhead=float(np.median(rounds[0] - rounds[1])))
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
    start = time.perf_counter()
    for _ in range(effort.calls):
        call(source, target, case)
    stream.synchronize()
    return (time.perf_counter() - start) / effort.calls


def _wrong(contestant: Contestant, case: Case, control: Communicator, checks: int) -> int | None:
    """Wrong elements on all ranks, each round with other values."""
    if not checks:
        return None
    device, rank = contestant.device, contestant.rank
    stream = device.current_stream
    source, target = contestant.arrays(case)
    wrong = 0
    for round_ in range(1, checks + 1):
        control.barrier(stream=stream)  # a target that ranks share is poisoned when nobody reads it
        poison(target)
        stream.synchronize()
        control.barrier(stream=stream)
        if case.op.name != "broadcast" or rank == ROOT:
            fill(device, source, rank, round_, case.dtype)
        stream.synchronize()
        contestant.call(source, target, case)
        stream.synchronize()
        wrong += count_wrong(
            device, target, lambda start, stop, r=round_: case.expected(rank, start, stop, r)
        )
    total = np.array([wrong], np.int64)
    control.all_reduce(total, stream=devices.current().current_stream)
    return int(total[0])
