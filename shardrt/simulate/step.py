"""A step of a script on simulated ranks, recorded, priced and reported.

`simulate` prints it of one command, and `plan` compares those of many: both call this.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardrt.device.cpu import CPUDevice
from shardrt.device.cuda import CUDADevice
from shardrt.device.program import Program
from shardrt.device.timeline import Span
from shardrt.simulate.clock import price
from shardrt.simulate.machine import Machine
from shardrt.simulate.report import Report, report
from shardrt.simulate.roles import Roles, columns, compared, launches
from shardrt.simulate.script import record, spans_kept
from shardrt.simulate.timing import Timing
from shardrt.simulate.values import Values

__all__ = ["Simulated", "simulated"]


@dataclass(frozen=True)
class Simulated:
    """What ran when, in all steps, and what the last one was.

    Attributes:
        spans: of the first recorded rank, in places of its items.
    """

    timing: Timing
    spans: Sequence[Span]
    report: Report


def simulated(
    command: Sequence[str],
    ranks: int,
    machine: Machine,
    *,
    steps: int = 2,
    stands_for: Roles | None = None,
    shape: tuple[int, ...] | None = None,
    values: Values | None = None,
    check: int = 0,
    jitter: float = 0.0,
) -> Simulated:
    """Record `steps` optimizer steps of a script, which is given with its arguments, and price the last.

    Raises as `record` does.

    Args:
        stands_for, shape, values: see `record`.
        check: so many more ranks of each role are compared, and those with most launches are priced.
        jitter: see `price`.
    """

    def recorded(stands_for: Roles | None) -> list[Program]:
        return record(
            command,
            ranks,
            steps=steps,
            like=CPUDevice if machine.of_cpus else CUDADevice,
            stands_for=stands_for,
            local_size=machine.ranks_per_node,
            shared=machine.of_cpus,
            shape=shape,
            values=values,
        )

    notes: list[str] = []
    with spans_kept() as spans_of:
        first = most = recorded(stands_for)
        for more in columns(first, check):
            others = recorded(more)
            notes += [f"roles: {compared(*pair)}" for pair in zip(others, first, strict=True)]
            if launches(others[0]) > launches(most[0]):
                most = others
        spans = spans_of(most[0])
    timing = price(most, machine, jitter)
    found = report(most, machine, spans, timing=timing)
    if jitter:
        notes.append(
            f"ranks come to each collective at independent normal times ({1e3 * jitter:g} ms of standard "
            "deviation), whatever they were before, and it begins with the last"
        )
    return Simulated(timing, spans, replace(found, assumptions=(*found.assumptions, *notes)))
