"""`python -m shardrt trace RUN`: one traced step of one rank as an SVG; and where the time of steps went."""

import argparse
from pathlib import Path
from typing import Any

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
PART_COLOURS |= {"data": "#b279a2", COLLECTIVES: COLOURS["all_reduce"]}


def add_to(commands: Any) -> None:
    """Add `trace` to argparse's subparsers."""
    told = "draw a step that --report.trace has kept, as an SVG"
    parser = commands.add_parser("trace", help=told, description=told)
    parser.add_argument("path", metavar="RUN", type=Path, help="a run's folder, or a trace.json")
    parser.add_argument("--step", type=int, metavar="N", help="which step (the last one that was traced)")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="of which rank (0)")
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="where to (RUN/schedule.svg)")
    parser.set_defaults(run=draw)


def draw(options: argparse.Namespace) -> int:
    """Write the picture and say where the step's time went; gives the exit code."""
    folder = options.path if options.path.is_dir() else options.path.parent
    path = folder / TRACE if folder == options.path else options.path
    if not path.exists() and (folder / "metrics.jsonl").exists():
        raise BadRun(f"{path} is not there: no step was traced; train with --report.trace FIRST:LAST")
    events = read_trace(path)
    steps = steps_of(events, options.rank)
    if not steps:
        raise BadRun(f"{options.path}: no step of rank {options.rank} in the trace")
    number = max(steps) if options.step is None else options.step
    if number not in steps:
        raise BadRun(f"{options.path}: step {number} is not in the trace, but {', '.join(map(str, steps))}")
    output = options.output or folder / "schedule.svg"
    try:
        drawn = printable(picture(events, options.rank, number), lines=True)
    except ValueError as error:  # names that matplotlib takes for formulas, and are none
        raise BadRun(f"{options.path}: can't be drawn ({error})") from None
    output.write_text(drawn, encoding="utf-8")
    parts = split(events, options.rank, number)
    told = ", ".join(f"{name} {ms:.1f}" for name, ms in parts.items())
    Screen().explain(f"step {number}, rank {options.rank}: {sum(parts.values()):.1f} ms = {told}")
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
    """Milliseconds of the compute stream by what it did. The parts add up to the step.

    A span counts for what is not in a span inside it. "waiting for streams" is communication, and copies,
    that compute did not hide; collectives in compute are those of clipping and of the ranks' agreeing.
    """
    parts: dict[str, float] = {}
    around: list[tuple[float, str]] = []  # end and part of the spans that are going on
    for event in spans_in(events, rank, step)["compute"]:
        while around and around[-1][0] <= event["ts"]:
            around.pop()
        part = _PARTS.get(event["name"].partition(" ")[0], COLLECTIVES)
        parts[part] = parts.get(part, 0.0) + event["dur"] / 1e3
        if around:
            parts[around[-1][1]] -= event["dur"] / 1e3
        around.append((event["ts"] + event["dur"], part))
    order = [*dict.fromkeys(_PARTS.values()), COLLECTIVES]
    return {part: parts[part] for part in order if part in parts}


def busy(events: list[Event], rank: int, step: int) -> dict[str, float]:
    """Milliseconds for which each other stream ran something in a step."""
    others = {s: spans for s, spans in spans_in(events, rank, step).items() if s != "compute"}
    return {stream: sum(event["dur"] for event in spans) / 1e3 for stream, spans in others.items()}


def picture(events: list[Event], rank: int, step: int) -> str:
    """One step, for a page: gathers above, compute, reductions and copies below."""
    spans = spans_in(events, rank, step)
    begin = spans["compute"][0]["ts"]
    order = sorted(spans, key=lambda s: (["gather", "compute", "reduce"].index(s) if s in _FIRST else 3, s))
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
            told = f"{event['name']}: {event['dur'] / 1e3:.2f} ms"
            outer = unit == "(root)" and stream == "compute"
            label = "" if phase == "wait" else unit or name
            bars.append(charts.Bar(start, start + event["dur"] / 1e3, label, colour, told, faint=outer))
        rows[f"{stream} stream"] = bars
    of = f"rank {rank} of {len(ranks_of(events))}"
    order_of = [*(NAMES.get(phase, phase) for phase in COLOURS), "copies, updates"]
    legend = {name: legend[name] for name in dict.fromkeys(order_of) if name in legend}
    return charts.schedule(f"step {step}, {of}", rows, legend, axis=f"milliseconds of one step, {of}")


_FIRST = ("gather", "compute", "reduce")
