"""Where the time of a step went, from what the streams recorded (shardrt.device.timeline)."""

import re
from bisect import bisect_left
from collections.abc import Iterable

from shardrt.device.timeline import Passed, Recording, Span

from .training import Stamps

COMPUTE = ("forward", "backward")
EXPOSED = ("waits for gathers", "waits for reductions", "other waits", "collectives")
PARTS = (*COMPUTE, *EXPOSED, "optimizer", "other")
STREAMS = ("gather", "reduce")  # what they do beside the step is told apart
_WAITS = {"gather": "waits for gathers", "reduce": "waits for reductions"}
_FORWARD = re.compile(r"\d+F\d+")  # of a stage for a micro-batch, in the order of a pipeline's table
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "barrier", "delay")


def parts(stamps: Stamps, recorded: Recording) -> dict[str, float]:
    """Seconds by part, in the order of PARTS; together they are the step.

    Forward, backward and optimizer count without what the compute thread waited in them for another stream,
    and without the collectives that it ran itself (of clipping, of the ranks' agreeing): both are exposed
    communication. "other": reading the loss. A pipeline's forwards are among its backwards; what a stage
    waits for others, the bubble included, are "other waits".
    """
    ends = {
        "forward": stamps.forward,
        "backward": stamps.backward,
        "optimizer": stamps.optimizer,
        "other": stamps.end,
    }
    found = dict.fromkeys(PARTS, 0.0)
    begin = stamps.begin
    for phase, end in ends.items():
        found[phase] = end - begin
        begin = end
    forwards = [s for s in recorded.spans if s.stream == "compute" and _FORWARD.fullmatch(s.label)]
    for span in forwards:
        found["forward"] += span.stop - span.start
        found["backward"] -= span.stop - span.start
    sources = _Sources(recorded.passed)
    for span in recorded.spans:
        kind = span.label.partition(" ")[0]
        if span.stream != "compute" or kind not in ("wait", *_COLLECTIVES):
            continue
        part = _WAITS.get(sources.of(span), "other waits") if kind == "wait" else "collectives"
        phase = next((phase for phase, end in ends.items() if span.start < end), "other")
        phase = "forward" if any(f.start <= span.start < f.stop for f in forwards) else phase
        found[part] += span.stop - span.start
        found[phase] -= span.stop - span.start
    return found


def busy(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds for which each of STREAMS ran something, what it waited for other ranks included."""
    found = dict.fromkeys(STREAMS, 0.0)
    for span in spans:
        if span.stream in found:
            found[span.stream] += span.stop - span.start
    return found


class _Sources:
    """Which stream a wait of the compute stream was for: the one that recorded the point it ended with."""

    def __init__(self, passed: list[Passed]) -> None:
        self._recorded = {point.mark: point.stream for point in passed if not point.waited}
        self._waits = sorted(
            (point.time, point.mark) for point in passed if point.waited and point.stream == "compute"
        )

    def of(self, wait: Span) -> str:
        place = bisect_left(self._waits, (wait.start, 0))
        if place == len(self._waits) or self._waits[place][0] > wait.stop:
            return ""
        return self._recorded.get(self._waits[place][1], "")
