"""`python -m shardrt trace RUN`: one traced step of one rank as an SVG, and a breakdown of step times."""

import argparse
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardrt.parallel.table import Table
from shardrt.tools.runs import BadRun, read_trace, traced_step
from shardrt.train import charts
from shardrt.train.screen import Screen
from shardrt.train.trace import TRACE
from shardrt.untrusted import printable, say

Event = dict[str, Any]

COLOURS = {
    "forward": "#4c78a8",
    "backward": "#72b7b2",
    "all_gather": "#f58518",
    "reduce_scatter": "#e45756",
    "all_reduce": "#ff9da6",
    "optimizer": "#54a24b",
    "wait": "#c8c8c8",
}
NAMES = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce"}
_OTHER = "#b279a2"  # copies, updates
_PARTS = {"forward": "forward", "backward": "backward", "optimizer": "optimizer", "data": "data"}
_PARTS |= {"wait": "waiting for streams", "step": "other"}
COLLECTIVES = "collectives in compute"
# The parts of a step in the colours of the spans.
PART_COLOURS = {part: COLOURS.get(phase, "#9d755d") for phase, part in _PARTS.items()}
PART_COLOURS |= {"weight gradients": "#54a24b", "data": "#b279a2", COLLECTIVES: COLOURS["all_reduce"]}


# An action of a pipeline: kind, micro-batch and stage. Colours alternate between a rank's stages.
ACTION = re.compile(r"([FBIW])(\d{1,9}) of stage (\d{1,9})")
_ACTION_PARTS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradients"}
ACTION_COLOURS = {
    "F": ("#4c78a8", "#9ecae9"),
    "B": ("#72b7b2", "#b5dcd9"),
    "I": ("#f58518", "#ffbf79"),
    "W": ("#54a24b", "#88d27a"),
}
_ROUNDED = 2e-3  # microseconds by which a span may seem to end after its successor begins
_FIRST = ("gather", "compute", "reduce")  # streams from the top, then the others
_PIXELS = 850  # of a step's picture
_ACTION_NAMES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}


def add_to(commands: Any) -> None:
    """Add `trace` to argparse's subparsers."""
    message = "draw a step that --report.trace has kept, as an SVG"
    parser = commands.add_parser("trace", help=message, description=message)
    parser.add_argument("path", metavar="RUN", type=Path, help="a run's folder, or a trace.json")
    parser.add_argument("--step", type=int, metavar="N", help="which step (the last one that was traced)")
    parser.add_argument("--rank", type=int, metavar="R", help="of which rank (0; of a pipeline all)")
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="where to (RUN/schedule.svg)")
    parser.set_defaults(run=draw)


def draw(options: argparse.Namespace) -> int:
    """Write the picture and print the breakdown of the step's time; returns the exit code."""
    folder = options.path if options.path.is_dir() else options.path.parent
    path = folder / TRACE if folder == options.path else options.path
    if not path.exists() and (folder / "metrics.jsonl").exists():
        raise BadRun(f"{path} does not exist: no step was traced; train with --report.trace FIRST:LAST")
    events, rank = read_trace(path), options.rank or 0
    steps = steps_of(events, rank)
    if not steps:
        raise BadRun(f"{options.path}: the trace has no step of rank {rank}")
    number = max(steps) if options.step is None else options.step
    if number not in steps:
        raise BadRun(f"{options.path}: the trace has no step {number}; it has {', '.join(map(str, steps))}")
    output = options.output or folder / "schedule.svg"
    try:
        whole = options.rank is None and has_actions(events)
        drawn = pipeline_picture(events, number) if whole else picture(events, rank, number)
        drawn = printable(drawn, lines=True)
    except ValueError as error:  # names that matplotlib parses as formulas
        raise BadRun(f"{options.path}: can't be drawn ({error})") from None
    output.write_text(drawn, encoding="utf-8")
    for each in ranks_of(events) if whole else [rank]:
        if number in steps_of(events, each):
            parts = split(events, each, number)
            message = ", ".join(f"{name} {ms:.1f}" for name, ms in parts.items())
            Screen().explain(f"step {number}, rank {each}: {sum(parts.values()):.1f} ms = {message}")
    say(f"wrote {output}")
    return 0


def ranks_of(events: list[Event]) -> list[int]:
    """The ranks in a trace."""
    return sorted({event["pid"] for event in events})


def steps_of(events: list[Event], rank: int) -> dict[int, Event]:
    """Number of each traced step -> the span around it."""
    found = {}
    for event in events:
        number = traced_step(event) if event["pid"] == rank else None
        if number is not None:
            found[number] = event
    return dict(sorted(found.items()))


def spans_in(events: list[Event], rank: int, step: int) -> dict[str, list[Event]]:
    """Stream -> the spans of a rank that began in a step, by start; the step's own span first of compute."""
    whole = steps_of(events, rank)[step]
    stop = whole["ts"] + whole["dur"]
    found: dict[str, list[Event]] = {}
    for event in events:
        own = event["ph"] == "X" and event["pid"] == rank
        if own and (event is whole or whole["ts"] <= event["ts"] < stop):
            found.setdefault(event["cat"], []).append(event)
    for spans in found.values():
        spans.sort(key=lambda event: (event["ts"], -event["dur"]))
    return found


def split(events: list[Event], rank: int, step: int) -> dict[str, float]:
    """Milliseconds of the compute stream by activity. The activities add up to the step.

    A span counts without the spans inside it. "waiting for streams" is communication and copies that compute
    did not hide. Collectives in compute come from clipping and from agreement between ranks.
    """
    parts: dict[str, float] = {}
    around: list[tuple[float, str]] = []  # end and activity of the open spans
    for event in spans_in(events, rank, step)["compute"]:
        while around and around[-1][0] <= event["ts"] + _ROUNDED:
            around.pop()
        part = _part(event["name"])
        parts[part] = parts.get(part, 0.0) + event["dur"] / 1e3
        if around:
            parts[around[-1][1]] -= event["dur"] / 1e3
        around.append((event["ts"] + event["dur"], part))
    order = dict.fromkeys([*_PARTS.values(), "weight gradients", COLLECTIVES])
    return {part: parts[part] for part in order if part in parts}


def _part(name: str) -> str:
    """The activity of a span of the compute stream."""
    action = ACTION.fullmatch(name)
    return _ACTION_PARTS[action[1]] if action else _PARTS.get(name.partition(" ")[0], COLLECTIVES)


def busy(events: list[Event], rank: int, step: int) -> dict[str, float]:
    """Milliseconds for which each other stream ran something in a step."""
    others = {s: spans for s, spans in spans_in(events, rank, step).items() if s != "compute"}
    return {stream: sum(event["dur"] for event in spans) / 1e3 for stream, spans in others.items()}


def picture(events: list[Event], rank: int, step: int) -> str:
    """One step, for a page: gathers above, compute, reductions and copies below."""
    rows, legend = rows_of(events, rank, step)
    of = f"rank {rank} of {len(ranks_of(events))}"
    return charts.schedule(f"step {step}, {of}", rows, legend, axis=f"milliseconds of one step, {of}")


def rows_of(events: list[Event], rank: int, step: int) -> tuple[dict[str, list[charts.Bar]], dict[str, str]]:
    """The contents of `picture`: the bars of each stream, in ms, and the meaning of their colours."""
    spans = spans_in(events, rank, step)
    begin = spans["compute"][0]["ts"]
    order = [s for s in _FIRST if s in spans] + sorted(spans.keys() - {*_FIRST})
    rows, legend = {}, {}
    for stream in order:
        bars = []
        for event in spans[stream]:
            phase, _, unit = event["name"].partition(" ")
            if phase == "step" or (stream == "compute" and phase not in COLOURS):
                continue
            start = (event["ts"] - begin) / 1e3
            colour = COLOURS.get(phase, _OTHER)
            name = NAMES.get(phase, phase if phase in COLOURS else "copies, updates")
            legend.setdefault(name, colour)
            message = f"{event['name']}: {event['dur'] / 1e3:.2f} ms"
            outer = unit == "(root)" and stream == "compute"
            label = "" if phase == "wait" else unit or name
            bars.append(charts.Bar(start, start + event["dur"] / 1e3, label, colour, message, faint=outer))
        rows[f"{stream} stream"] = bars
    order_of = [*(NAMES.get(phase, phase) for phase in COLOURS), "copies, updates"]
    return rows, {name: legend[name] for name in dict.fromkeys(order_of) if name in legend}


def has_actions(events: list[Event]) -> bool:
    """Whether a trace is of a pipeline."""
    return any(event["ph"] == "X" and ACTION.fullmatch(event["name"]) for event in events)


@dataclass
class Acted:
    """An action of a rank in a step: its times, and those of its waits, in ms from the step's begin."""

    kind: str
    micro_batch: int
    stage: int
    start: float
    stop: float
    waits: list[tuple[float, float]]

    @property
    def busy(self) -> float:
        """Milliseconds without its waits."""
        return self.stop - self.start - sum(stop - start for start, stop in self.waits)

    def parts(self) -> list[tuple[float, float]]:
        """The intervals between its waits."""
        edges = [self.start, *(edge for wait in self.waits for edge in wait), self.stop]
        return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if stop > start]


def actions_in(events: list[Event], rank: int, step: int, begin: float | None = None) -> list[Acted]:
    """A rank's actions of a step, in order. begin: time 0, in us; the start of the rank's step if None."""
    found: list[Acted] = []
    spans = spans_in(events, rank, step)["compute"]
    begin = spans[0]["ts"] if begin is None else begin
    for event in spans:
        start = (event["ts"] - begin) / 1e3
        stop, action = start + event["dur"] / 1e3, ACTION.fullmatch(event["name"])
        if action:
            found.append(Acted(action[1], int(action[2]), int(action[3]), start, stop, []))
        elif event["name"] == "wait" and found and start < found[-1].stop:
            found[-1].waits.append((start, min(stop, found[-1].stop)))
    return found


def _actions(events: list[Event], step: int) -> dict[int, list[Acted]]:
    """The actions of a step by rank; time 0 is the first start of all ranks."""
    began = {
        rank: steps_of(events, rank)[step]["ts"]
        for rank in ranks_of(events)
        if step in steps_of(events, rank)
    }
    found = {rank: actions_in(events, rank, step, min(began.values())) for rank in began}
    return {rank: actions for rank, actions in found.items() if actions}


def pipeline_picture(events: list[Event], step: int) -> str:
    """One step of a pipeline, for a page: a row for each rank, its actions, and grey where they wait.

    A bar shows its action's kind and micro-batch. Every second stage of a rank is paler. Waits shorter than a
    pixel belong to their action.
    """
    rows, legend, pale = {}, {"wait": COLOURS["wait"]}, ""
    ranks = _actions(events, step)
    pixel = max((acted.stop for own in ranks.values() for acted in own), default=0.0) / _PIXELS
    for rank, own in ranks.items():
        turns, bars = sorted({acted.stage for acted in own}), []
        pale = "; paler: a rank's second stage" if len(turns) > 1 else pale
        for acted in own:
            acted = replace(acted, waits=[wait for wait in acted.waits if wait[1] - wait[0] >= pixel])
            colours = ACTION_COLOURS[acted.kind]
            legend.setdefault(_ACTION_NAMES[acted.kind], colours[0])
            label = f"{acted.kind}{acted.micro_batch}"
            message = f"{label} of stage {acted.stage}: {acted.busy:.2f} ms"
            parts = acted.parts()
            longest = max(parts, key=lambda part: part[1] - part[0], default=None)
            for part in parts:
                colour = colours[turns.index(acted.stage) % 2]
                bars.append(charts.Bar(*part, label if part is longest else "", colour, message))
            for start, stop in acted.waits:
                waited = f"wait in {message.partition(':')[0]}: {stop - start:.2f} ms"
                bars.append(charts.Bar(start, stop, "", COLOURS["wait"], waited))
        rows[f"rank {rank}"] = bars
    legend = {name: legend[name] for name in (*_ACTION_NAMES.values(), "wait") if name in legend}
    axis = f"milliseconds of one step; F0 is the forward of micro-batch 0{pale}"
    return charts.schedule(f"step {step}, {len(rows)} ranks", rows, legend, axis=axis)


def idle(events: list[Event], step: int, table: Table) -> list[tuple[int, float, float, float]]:
    """For each rank of a pipeline: (rank, ms from the first action to the last, ms idle, ms idle in replay).

    Idle is the time outside actions plus the waits in actions. The replay uses only the measured mean times
    of F, B, I and W of each stage. Raises ValueError for a table of another run.
    """
    own, times = _actions(events, step), {}
    for acted in (acted for actions in own.values() for acted in actions):
        times.setdefault((acted.kind, acted.stage), []).append(acted.busy)
    mean = {key: sum(each) / len(each) for key, each in times.items()}
    costs = [[mean.get((kind, stage), 0.0) for stage in range(table.stages)] for kind in "FBIW"]
    replay = table.replay(*costs)
    begin = min(actions[0].start for actions in own.values())
    whole = max(acted.stop for actions in own.values() for acted in actions) - begin
    return [
        (
            rank,
            whole,
            whole - sum(acted.busy for acted in actions),
            replay.idle[table.rank_of(actions[0].stage)],
        )
        for rank, actions in own.items()
    ]
