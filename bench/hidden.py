"""How much of communication a step shows: `python -m bench.step --inject 0.5`.

Each collective is made longer by a part of the time that a unit's forward takes, in its stream and asleep, so
that compute could hide all but what comes before the first unit and after the last. What is seen of that, and
of the schedule itself, is the step's time less that of the same step without sharding. The optimizer is left
out of both, since sharding cuts its work. The contestants take turns, and the slowest rank counts.

Noise moves that difference. It hardly moves what compute waited for other streams, told beside it: of the
rank that waited least, since the others wait for that one as well.
"""

import statistics
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np

from bench.parts import EXPOSED, parts
from bench.training import Training, gathered
from shardrt.comm import Communicator, CountedCommunicator, DelayedCommunicator, world
from shardrt.device import timeline
from shardrt.fsdp import units

Batches = Callable[[int], tuple[np.ndarray, np.ndarray]]


class Delays:
    """Delays what a mesh communicates, from when it is told; give it to init_device_mesh as `wrap`."""

    def __init__(self) -> None:
        self._delays: list[DelayedCommunicator] = []
        self._counts: list[CountedCommunicator] = []

    def __call__(self, communicator: Communicator) -> None:
        self._delays.append(DelayedCommunicator(communicator, 0.0))
        self._counts.append(CountedCommunicator(communicator))

    def set(self, seconds: float) -> None:
        """From now on each collective takes so much longer."""
        for made in self._delays:
            made.delay = seconds

    @property
    def calls(self) -> int:
        """Collectives so far that a delay goes with."""
        return sum(sum(made.calls.values()) - made.calls["barrier"] for made in self._counts)


def race(
    alone: Training,
    sharded: Training,
    delays: Delays,
    batch: Batches,
    part: float,
    warmup: int,
    rounds: int,
) -> dict:
    """Steps of three kinds by turns: not sharded, sharded, and sharded with collectives made longer."""
    mesh = sharded.mesh
    forwards = []
    for number in range(max(2, warmup)):
        stamps = alone.step(*batch(number))
        forwards.append(stamps.forward - stamps.begin)
        sharded.step(*batch(number))
    count = sum(bool(unit.groups) for unit in units(sharded.model))
    delay = float(gathered([min(forwards)], mesh).mean()) * part / count
    kinds = (("alone", alone, 0.0), ("sharded", sharded, 0.0), ("injected", sharded, delay))
    traced = world.current().kind != "thread"  # threads have one timeline for all ranks
    computed: dict[str, list[float]] = {kind: [] for kind, *_ in kinds}
    waited: dict[str, list[float]] = {kind: [] for kind, *_ in kinds}
    whole: dict[str, list[float]] = {kind: [] for kind, *_ in kinds}
    for number in range(rounds):
        for kind, training, seconds in kinds:
            gathered([0.0], mesh)  # all ranks begin together
            delays.set(seconds)
            before = delays.calls
            with timeline.record_all() if traced else nullcontext(timeline.Recording()) as recorded:
                stamps = training.step(*batch(number))
            calls = delays.calls - before
            delays.set(0.0)
            found = parts(stamps, recorded)
            waited[kind].append(sum(found[part] for part in EXPOSED))
            computed[kind].append(stamps.backward - stamps.begin)
            whole[kind].append(stamps.seconds)
    slowest = {kind: gathered(times, mesh).max(axis=0) for kind, times in computed.items()}
    steps = {kind: gathered(times, mesh).max(axis=0) for kind, times in whole.items()}
    least = {kind: gathered(times, mesh).min(axis=0) / steps[kind] for kind, times in waited.items()}
    seen = (slowest["injected"] - slowest["alone"]) / steps["injected"]
    own = (slowest["sharded"] - slowest["alone"]) / steps["sharded"]
    return {
        "inject": part,
        "units": count,
        "delay_ms": round(1e3 * delay, 3),
        "collectives": calls,
        "injected_ms": round(1e3 * delay * calls, 2),
        "step_ms": {kind: round(1e3 * statistics.median(times), 2) for kind, times in steps.items()},
        "seen": round(statistics.median(seen), 5),
        "seen_by_round": seen.round(5).tolist(),
        "seen_without_delays": round(statistics.median(own), 5),
        "waited": round(statistics.median(least["injected"]), 5) if traced else None,
        "waited_by_round": least["injected"].round(5).tolist() if traced else None,
        "waited_without_delays": round(statistics.median(least["sharded"]), 5) if traced else None,
    }


def lines(result: dict) -> list[str]:
    """For a reader."""
    steps, rounds, waited = result["step_ms"], result["seen_by_round"], result["waited_by_round"]
    return [
        f"{result['collectives']} collectives, each {result['delay_ms']:.2f} ms longer ({result['inject']} "
        f"of the forward of one of {result['units']} units): {result['injected_ms']:.0f} ms per step",
        f"ms per step: {steps['alone']:.1f} not sharded, {steps['sharded']:.1f} {result['strategy']}, "
        f"{steps['injected']:.1f} with the longer collectives",
        f"exposed communication and the schedule: {100 * result['seen']:.2f} % of the step "
        f"({100 * min(rounds):.2f} to {100 * max(rounds):.2f}); without the delays "
        f"{100 * result['seen_without_delays']:.2f} %",
        f"waits of compute for other streams: {100 * result['waited']:.2f} % "
        f"({100 * min(waited):.2f} to {100 * max(waited):.2f}); without the delays "
        f"{100 * result['waited_without_delays']:.2f} %",
    ]
