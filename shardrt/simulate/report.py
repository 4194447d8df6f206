"""What a priced recording says: the time of a step and where it went, bytes in memory and on links, waits.

    found = report(programs, Machine.load("h100-8"))
    print(found)                    # for people; dataclasses.asdict(found) for programs

It is about the last step of the first program. Milliseconds and bytes; no figure is measured.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from shardrt.device.program import (
    HOST,
    Collective,
    HostRead,
    HostWait,
    Item,
    Program,
    Step,
    Wait,
    Work,
)
from shardrt.device.timeline import Span
from shardrt.simulate.clock import price
from shardrt.simulate.links import transfer
from shardrt.simulate.machine import Machine
from shardrt.simulate.memory import Peak, by_category, by_module, peaks
from shardrt.simulate.phases import PRODUCTS, family, part_of, phases_of, updates
from shardrt.simulate.timing import Timing

__all__ = ["NoStep", "Report", "report"]

_ATTENTION = 12 / 10  # operations of attention over those of its backward kernel, which makes scores again
FORMULA = (
    "MFU: matrix products and attention of forward, once, and of backward, over the peak; recomputed ones "
    "don't count. Causal attention counts the pairs it sees: 6 N + 6 L C T for each token. HFU: all that run"
)
_SHOWN = 6  # rows of a list in the text output


class NoStep(ValueError):
    """No optimizer step was recorded."""


@dataclass(frozen=True)
class Waited:
    """Where the host waited: how often, ms in all, and how the values that it read are called: made up."""

    site: str
    times: int
    ms: float
    values: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """tokens: targets of the loss, of all ranks in a step; 0 where no loss was seen. mfu, hfu: parts of 1.

    split: ms of the compute stream, which add up to the step. streams: ms that each stream is busy.
    exposed: ms of collectives while nothing else runs, by name and unit; "" all together.
    memory: place -> category -> bytes when that place has most. modules: the same bytes, place -> module or
    unit -> category; "" is what none has alone. device_bytes: recorded rank -> its bytes on the device, when
    they are most. links: link -> call -> bytes sent. each_ms: of each recorded step of that rank.
    """

    machine: str
    measured: bool
    ranks: int
    rank: int
    step: int
    ms: float
    tokens: int
    mfu: float
    hfu: float
    peak: float
    dtype: str
    split: dict[str, float]
    streams: dict[str, float]
    exposed: dict[str, float]
    memory: dict[str, dict[str, int]]
    modules: dict[str, dict[str, dict[str, int]]]
    links: dict[str, dict[str, int]]
    waits: tuple[Waited, ...]
    assumptions: tuple[str, ...] = field(default=())
    device_bytes: dict[int, int] = field(default_factory=dict)
    each_ms: tuple[float, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.tokens / self.ms * 1e3

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def report(
    programs: Sequence[Program],
    machine: Machine,
    spans: Sequence[Span] = (),
    timing: Timing | None = None,
) -> Report:
    """Price the programs, unless `timing` says what they take, and say what their last step was.

    One program that does not say for which ranks it stands does so for all; several stand for one rank each.

    Args:
        spans: of the first program's compute stream in places of its items, not seconds (script.py); without
            them the names of kernels tell forward from backward.

    Raises:
        NoStep: if no step ended.
    """
    timing = timing or price(programs, machine)
    program = timing.programs[0]
    numbers = [item.number for item in program.items if isinstance(item, Step)]
    if not numbers:
        raise NoStep("no optimizer step was recorded; the script must call optimizer.step()")
    items = timing.items_of(0)
    seconds = timing.steps[0][-1]
    works = [item for _, item in items if isinstance(item, Work)]
    dtype, peak = _peak(works, machine)
    mine, all_run = _flops(works)
    most = _peaks(timing, 0)
    ranks = [len(each.alike) for each in programs]
    if not all(ranks):
        ranks = [program.world_size] if len(programs) == 1 else [1] * len(programs)
    memories = [{place: by_category(peak) for place, peak in most.items()}]
    memories += [memory_of(timing, number) for number in range(1, len(timing.programs))]
    return Report(
        machine=machine.name,
        measured=machine.measured,
        ranks=program.world_size,
        rank=program.rank,
        step=numbers[-1],
        ms=1e3 * seconds,
        tokens=sum(_tokens(timing, number, count) for number, count in enumerate(ranks)),
        mfu=mine / (seconds * peak),
        hfu=all_run / (seconds * peak),
        peak=peak,
        dtype=dtype,
        split=_split(timing, spans),
        streams={stream: 1e3 * s for stream, s in timing.split(0).items() if stream != HOST},
        exposed={label: 1e3 * s for label, s in timing.exposed(0).items()},
        memory=memories[0],
        modules={place: by_module(peak) for place, peak in most.items()},
        links=_links(timing, items, machine),
        waits=_waits(timing, items),
        assumptions=_assumptions(machine, len(programs)),
        device_bytes={
            each.rank: sum(memory.get("device", {}).values())
            for each, memory in zip(timing.programs, memories, strict=True)
        },
        each_ms=tuple(1e3 * each for each in timing.steps[0]),
    )


# -- how much is computed


def _of_products(work: Work) -> int:
    """Operations of its matmuls, without a kernel's other operations: activations, biases."""
    if family(work) == "linear":
        return 2 * prod(work.sizes) if len(work.sizes) == 3 else 0
    return work.flops if family(work) in PRODUCTS else 0


def _flops(works: list[Work]) -> tuple[float, float]:
    """Operations of matmuls: of forward once and backward; and all that ran, those of updates too.

    Forward has as many as the larger of backward's two matmuls: for inputs, and for weights.
    """
    flops: Counter[str] = Counter()
    for work in works:
        if updates(work):
            flops[""] += _of_products(work)
            continue
        name = work.name.removesuffix("_gelu").replace("_parameters", "_weight")
        flops[name] += _of_products(work)
    mine = float(flops["matmul.matmul"]) + _ATTENTION * flops["attention.backward"]
    for kind in ("linear", "grouped", "conv2d"):
        both = flops[f"{kind}.backward_input"], flops[f"{kind}.backward_weight"]
        mine += sum(both) + max(both)
    return mine, float(sum(flops.values()))


def _peak(works: list[Work], machine: Machine) -> tuple[str, float]:
    """The dtype of most matmuls, and the peak operations per second in it."""
    by_dtype: Counter[str] = Counter()
    for work in works:
        by_dtype[work.dtype] += _of_products(work)
    dtype = max(by_dtype, key=by_dtype.__getitem__, default="")
    return dtype, machine.device.flops.get(dtype, machine.device.flops[""])


def _tokens(timing: Timing, number: int, ranks: int) -> int:
    """Targets in the step of as many ranks as this one; those of a tensor axis have the same ones."""
    program = timing.programs[number]
    rows = sum(
        item.sizes[0]
        for _, item in timing.items_of(number)
        if isinstance(item, Work) and item.name.startswith("cross_entropy.forward") and item.sizes
    )
    alike = [len(group.ranks) for group in program.groups.values() if group.role == "tensor"]
    return rows * ranks // max(alike, default=1)


# -- where the time goes


def _split(timing: Timing, spans: Sequence[Span]) -> dict[str, float]:
    """Milliseconds of the compute stream in the last step by what it did; they add up to the step."""
    phases = phases_of(spans)
    begin, end = timing.window(0)
    found: dict[str, float] = defaultdict(float)
    for index, item in timing.items_of(0):
        if getattr(item, "stream", "") != "compute":
            continue
        start, stop = (max(begin, min(end, t[0][index])) for t in (timing.began, timing.ended))
        if isinstance(item, Wait):
            found["waiting for streams"] += stop - start
        elif isinstance(item, Collective):
            found["collectives in compute"] += stop - start
        elif isinstance(item, Work):
            found[part_of(item, phases.get(index, ""))] += stop - start
    found["waiting for the host"] = max(0.0, end - begin - sum(found.values()))
    return {part: 1e3 * seconds for part, seconds in sorted(found.items(), key=lambda each: -each[1])}


# -- bytes


def memory_of(timing: Timing, number: int) -> dict[str, dict[str, int]]:
    """Place -> category -> bytes in the last step of a program, when that place has most."""
    return {place: by_category(peak) for place, peak in _peaks(timing, number).items()}


def _peaks(timing: Timing, number: int) -> dict[str, Peak]:
    items = timing.items_of(number)
    return peaks(timing.programs[number], items[0][0], items[-1][0])


def _links(timing: Timing, items: list[tuple[int, Item]], machine: Machine) -> dict[str, dict[str, int]]:
    """Bytes that the first rank sends in the step: within its node, out of it, to and from the host."""
    program = timing.programs[0]
    found: dict[str, Counter[str]] = defaultdict(Counter)
    known = {}
    over_host = {} if machine.of_cpus else timing.copies[0]
    for index, item in items:
        if isinstance(item, Collective):
            ranks = program.groups[item.group].ranks
            if item.peer >= 0:
                ranks = sorted((program.rank, ranks[item.peer]))
            key = item.call, item.nbytes, tuple(ranks) if isinstance(ranks, list) else ranks, item.parts
            if key not in known:
                known[key] = transfer(machine, item.call, item.nbytes, ranks, program.rank, item.parts)
            if item.call != "recv":
                found["within the node"][item.call] += round(known[key].inside)
                found["between nodes"][item.call] += round(known[key].outside)
        elif index in over_host:
            direction, nbytes = over_host[index]
            found["between host and device"][direction] += nbytes
    return {link: dict(parts) for link, counted in found.items() if (parts := +counted)}


def _waits(timing: Timing, items: list[tuple[int, Item]]) -> tuple[Waited, ...]:
    times: Counter[str] = Counter()
    took: dict[str, float] = defaultdict(float)
    values: dict[str, dict[str, None]] = defaultdict(dict)
    for index, item in items:
        if isinstance(item, HostWait):
            times[item.site] += 1
            took[item.site] += 1e3 * (timing.ended[0][index] - timing.began[0][index])
        elif isinstance(item, HostRead):
            times[item.site] += 0
            values[item.site][item.why or "a value"] = None
    found = [Waited(site, times[site], took[site], tuple(values[site])) for site in times]
    return tuple(sorted(found, key=lambda each: -each.ms))


def _assumptions(machine: Machine, recorded: int) -> tuple[str, ...]:
    lines = [f"{machine.name}: {machine.origin} ({machine.date})"]
    if not machine.measured:
        lines.insert(0, f"measured = false: {machine.name} was not measured, so these figures are estimates")
    lines.append("all ranks do the same at the same time" if recorded == 1 else f"{recorded} ranks recorded")
    lines.append("memory is what was asked for, without what an allocator rounds up and what libraries take")
    return tuple(lines)


# -- for people


def _lines(found: Report) -> list[str]:
    each = found.tokens_per_s / found.ranks
    lines = [
        f"rank {found.rank} of {found.ranks:,} on {found.machine}, step {found.step}: {found.ms:,.1f} ms"
    ]
    if found.tokens:
        lines.append(
            f"{found.tokens:,} tokens a step, {found.tokens_per_s:,.0f} a second, {each:,.0f} each rank"
        )
    lines += _steps(found.each_ms)
    kind = f"{found.peak / 1e12:,.1f} TFLOP/s{' of ' + found.dtype if found.dtype else ''}"
    lines.append(f"MFU {100 * found.mfu:.1f} %, HFU {100 * found.hfu:.1f} % of {kind}")
    lines.append("the step, ms: " + _listed(found.split))
    lines.append("streams busy, ms: " + _listed(found.streams))
    by_call: Counter[str] = Counter()
    for label, ms in found.exposed.items():
        if label:
            by_call[label.partition(" ")[0]] += ms
    shown = f"exposed communication, ms: {found.exposed['']:,.1f}"
    lines.append(shown + (f" ({_listed(by_call)})" if any(by_call.values()) else ""))
    units = {label: ms for label, ms in found.exposed.items() if label and ms > 0.05}
    for label, ms in sorted(units.items(), key=lambda one: -one[1])[:_SHOWN]:
        lines.append(f"  {ms:10,.2f}  {label}")
    for place, parts in found.memory.items():
        lines.append(f"{place} memory at its peak, MB: {sum(parts.values()) / 1e6:,.1f}")
        lines += [f"  {nbytes / 1e6:10,.1f}  {category or 'other'}" for category, nbytes in parts.items()]
        lines.append("  by module: " + _of_modules(found.modules[place]))
    if len(found.device_bytes) > 1:
        each_rank = (f"{nbytes / 1e6:,.1f} on rank {rank}" for rank, nbytes in found.device_bytes.items())
        lines.append(f"device memory at its peak of those recorded, MB: {', '.join(each_rank)}")
    for link, parts in found.links.items():
        sums = ", ".join(f"{call} {nbytes / 1e6:,.1f}" for call, nbytes in parts.items())
        lines.append(f"sent {link}, MB: {sums}")
    for wait in found.waits:
        made = f", made up: {', '.join(wait.values)}" if wait.values else ""
        lines.append(f"the host waits at {wait.site}: {wait.times} times, {wait.ms:,.2f} ms{made}")
    return [*lines, FORMULA, *(f"assumed: {message}" for message in found.assumptions)]


def _steps(each_ms: Sequence[float]) -> list[str]:
    """What each step took after the first, where they differ by more than 1 %."""
    rest = each_ms[1:]
    if not rest or max(rest) < 1.01 * min(rest):
        return []
    shown = ", ".join(f"{ms:,.1f}" for ms in rest)
    return [f"steps after the first, ms: {shown}; mean {sum(rest) / len(rest):,.1f}"]


def _of_modules(parts: dict[str, dict[str, int]]) -> str:
    """Those with most."""
    own = {module: sum(categories.values()) / 1e6 for module, categories in parts.items() if module}
    shown = [f"{module} {nbytes:,.1f}" for module, nbytes in list(own.items())[:_SHOWN]]
    if len(own) > _SHOWN:
        shown.append(f"{len(own) - _SHOWN:,} more {sum(list(own.values())[_SHOWN:]):,.1f}")
    return ", ".join([*shown, f"no module's own {sum(parts.get('', {}).values()) / 1e6:,.1f}"])


def _listed(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {ms:,.1f}" for name, ms in parts.items() if ms >= 0.05) or "none"
