"""Which part of a step the work of a program belongs to; and a step as a trace, in the words of real ones.

The places of items stand for times while a program is recorded: spans of the timeline are then about items.
"""

from collections.abc import Sequence

from shardrt.device.program import Item, Work
from shardrt.device.timeline import Recording, Span
from shardrt.simulate.timing import Timing

__all__ = ["traced"]

PRODUCTS = ("linear", "matmul", "grouped", "conv2d", "attention")
AGAIN = "recomputed forward"
_OF_MODELS = (*PRODUCTS, "cross_entropy", "embedding", "rms_norm", "layer_norm")
_UPDATES = ("adamw", "sgd", "lion")
_OPTIMIZERS = "shardrt/optim/"  # where updates are issued


def family(work: Work) -> str:
    """The module of a kernel: "linear" of "linear.forward"."""
    return work.name.partition(".")[0]


def updates(work: Work) -> bool:
    """Whether an optimizer issued it: Muon's matmuls are no model's."""
    return family(work) in _UPDATES or work.site.startswith(_OPTIMIZERS)


def phases_of(spans: Sequence[Span]) -> dict[int, str]:
    """By item, the first word of the innermost span of the compute stream that it lies in."""
    found: dict[int, str] = {}
    own = [span for span in spans if span.stream == "compute"]
    for span in sorted(own, key=lambda each: each.start - each.stop):  # the longest first
        phase = span.label.partition(" ")[0]
        found.update(dict.fromkeys(range(int(span.start), int(span.stop)), phase))
    return found


def part_of(work: Work, phase: str) -> str:
    """What it is of a step; by its name, where it lies in no phase."""
    name = work.name.partition(".")[2]
    if updates(work) or phase == "optimizer":
        return "optimizer"
    if phase == "backward" and name.startswith("forward"):
        return AGAIN
    if phase in ("forward", "backward"):
        return phase
    if family(work) in _OF_MODELS:
        return "backward" if name.startswith("backward") else "forward"
    return "other"


def traced(timing: Timing, spans: Sequence[Span]) -> Recording:
    """The last step of the first program, from 0 on, for train/trace.py.

    What the compute stream runs is called after its part of the step and its kernel.

    Args:
        spans: as `phases_of`; those of units stand around the kernels.
    """
    (begin, end), kept, phases = timing.window(0), timing.recordings[0], phases_of(spans)
    items = timing.items_of(0)
    found = [span for span in kept.spans if span.stream != "compute" or span.label == "wait"]
    found += [span for span in kept.spans if span.label.startswith("step ") and span.start == begin]
    for index, item in items:
        if isinstance(item, Work) and item.stream == "compute":
            part = part_of(item, phases.get(index, "")).replace(AGAIN, "backward").replace("other", "step")
            label = f"{part} {item.name}"
            found.append(Span("compute", label, timing.began[0][index], timing.ended[0][index]))
    found += [unit for span in spans if (unit := _around(timing, items, span)) is not None]
    passed = [each for each in kept.passed if begin <= each.time <= end]
    return Recording([span for span in found if begin <= span.start < end], passed)


def _around(timing: Timing, items: list[tuple[int, Item]], span: Span) -> Span | None:
    """The span of what its items did, if they are of these."""
    own = [
        index
        for index, item in items
        if span.start <= index < span.stop and isinstance(item, Work) and item.stream == "compute"
    ]
    if not own or span.stream != "compute":
        return None
    return Span("compute", span.label, timing.began[0][own[0]], timing.ended[0][own[-1]])
