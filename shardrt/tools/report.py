"""`python -m shardrt report RUN`: one HTML page about a run that goes on, has ended or was killed.

The page is one file: styles inside, charts as SVG, no script, nothing loaded from elsewhere. Its frame and
its styles are in report.html.
"""

import argparse
import time
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from shardrt.tools import trace
from shardrt.tools.runs import BadRun, Run, pipeline_described, read_run
from shardrt.train import charts
from shardrt.untrusted import printable, say

MEGABYTE = 1e6


def add_to(commands: Any) -> None:
    """Add `report` to argparse's subparsers."""
    message = "make one HTML page about a run, which may still be going"
    parser = commands.add_parser("report", help=message, description=message)
    parser.add_argument("path", metavar="RUN", type=Path, help="a run's folder, runs/NAME")
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="where to (RUN/report.html)")
    parser.set_defaults(run=report)


def report(options: argparse.Namespace) -> int:
    """Write the page; returns the exit code. Raises BadRun, OSError."""
    run = read_run(options.path)
    if not run.about:
        raise BadRun(f"{options.path}: the record of the run is missing from its metrics")
    output = options.output or options.path / "report.html"
    try:
        made = page(run)
    except (KeyError, TypeError, ValueError) as error:
        raise BadRun(f"{options.path}: a record is not as expected ({error!r})") from None
    output.write_text(printable(made, lines=True), encoding="utf-8")
    say(f"wrote {output}")
    return 0


def page(run: Run) -> str:
    """The whole page."""
    template = files("shardrt.tools").joinpath("report.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        name=escape(run.path.resolve().name),
        summary=_table(_summary(run)),
        curves="\n".join(curves(run)),
        memory="\n".join(_memory(run)),
        time="\n".join(_time(run)),
        ranks="\n".join(_ranks(run)),
        environment=_table(_flat(run.about.get("environment", {}))),
        settings=escape(run.config) or "no config.toml",
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


def curves(run: Run) -> list[str]:
    """The charts over the steps."""
    steps, held = run.steps, run.evaluations
    losses = [
        charts.Series.of("one batch", steps, "loss"),
        charts.Series.of("held out", held, "held_out_loss", dots=True),
    ]
    drawn = [charts.lines("Loss", losses, y=f"nats per {run.unit}")]
    for title, label, key, unit in (
        ("Gradient norm", "before clipping", "norm", "norm"),
        ("Learning rate", "", "lr", "lr"),
        ("Rate", "all ranks", f"{run.unit}s_per_s", f"{run.unit}s/s"),
        ("Step time", "", "ms", "ms"),
        ("Memory", "resident, largest rank", "memory_mb", "MB"),
    ):
        series = charts.Series.of(label, steps, key)
        drawn.append(charts.lines(title, [series], y=unit, from_zero=title == "Memory"))
    if any("held_out_accuracy" in record for record in held):
        series = charts.Series.of("held out", held, "held_out_accuracy", dots=True)
        drawn.append(charts.lines("Accuracy", [series], y="part that is right"))
    if any("expert_load" in record for record in steps):
        series = charts.Series.of("busiest", steps, "expert_load")
        drawn.append(charts.lines("Tokens of the busiest expert", [series], y="over equal shares"))
        series = charts.Series.of("no tokens", steps, "empty_experts")
        drawn.append(charts.lines("Experts without tokens", [series], y="part of all", from_zero=True))
    if any("lag_ms" in record for record in steps):
        series = charts.Series.of("", steps, "lag_ms")
        drawn.append(charts.lines("Waiting for the slowest rank", [series], y="ms per step"))
    return [charts.svg(chart) for chart in drawn]


def _summary(run: Run) -> Iterable[tuple[str, str]]:
    about, last = run.about, (run.steps or [{}])[-1]
    adapters = f", {about['trained_parameters'] / 1e6:.2f} M of them trained"
    whole = about.get("trained_parameters") == about.get("parameters")
    yield (
        "model",
        f"{about['architecture']}, {about['parameters'] / 1e6:.2f} M parameters{'' if whole else adapters}",
    )
    yield "data", str(about.get("data", ""))
    axes = about.get("axes", {})
    sizes = ", ".join(f"{name} {size}" for name, size in axes.items())
    yield "ranks", f"{about.get('ranks', '')} ({sizes})" if len(axes) > 1 else str(about.get("ranks", ""))
    if piped := about.get("pipeline"):
        yield "pipeline", pipeline_described(piped)
    yield "state", f"{'done' if run.end else run.doctor['verdict']}"
    if "began" in about:
        yield "began", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about["began"]))
    if "seconds" in run.end:
        yield "took", f"{run.end['seconds']:.0f} s"
    if last:
        loss = last.get("loss")
        yield (
            "last step",
            f"{last['step']} of {run.total or '?'}, loss {'not finite' if loss is None else f'{loss:.4f}'}",
        )
    if run.evaluations:
        figures = {k.removeprefix("held_out_"): v for k, v in run.evaluations[-1].items() if k != "step"}
        del figures["kind"]
        yield "held out", ", ".join(f"{k.replace('_', ' ')} {_number(v)}" for k, v in figures.items())
    rates = [r[f"{run.unit}s_per_s"] for r in run.steps[1:] if f"{run.unit}s_per_s" in r]
    if rates:
        yield "rate", f"{sorted(rates)[len(rates) // 2]:,.0f} {run.unit}s/s, the median of what was logged"
    if "expert_load" in last:
        yield (
            "load of experts",
            f"the busiest has {last['expert_load']:.2f} times an equal share of the tokens, "
            f"{100 * last['empty_experts']:.1f} % have none (last step)",
        )
    if "slowest_rank" in last:
        slowest = [r["slowest_rank"] for r in run.steps if "slowest_rank" in r]
        worst = max(set(slowest), key=slowest.count)
        times = f"{slowest.count(worst)} of {len(slowest)} logged times"
        yield "slowest rank", f"{worst}, in {times}: it was in collectives least, so the others waited for it"


def _memory(run: Run) -> list[str]:
    plan = [(f"{place}: {name}", [("planned", nbytes / MEGABYTE)]) for place, name, nbytes in _planned(run)]
    together = sum(nbytes for _, _, nbytes in _planned(run)) / MEGABYTE
    before = run.about.get("memory_mb_before")
    rows = [*plan, ("all of it, as planned", [("planned", together)])]
    most = max((r for r in run.steps if "memory_mb" in r), key=lambda r: r["memory_mb"], default=None)
    if before is not None and most is not None:
        rows.append(("before the model", [("measured", before)]))
        rows.append((f"rank {most.get('memory_rank', '?')}, at most", [("measured", most["memory_mb"])]))
    note = (
        "The plan is what was decided before the first step. Measured is resident memory: Python and its "
        "libraries (before the model), compiled kernels, and pages that ranks share are counted, too."
    )
    return [charts.bars("Planned and measured", rows, unit="MB"), f'<p class="note">{note}</p>']


def _planned(run: Run) -> list[tuple[str, str, int]]:
    about = run.about
    places = (("device", about.get("device_bytes", {})), ("host", about.get("host_bytes", {})))
    return [(place, printable(name), nbytes) for place, table in places for name, nbytes in table.items()]


def _time(run: Run) -> list[str]:
    steps = trace.steps_of(run.events, 0)
    if not steps:
        return ['<p class="note">No step was traced: --report.trace FIRST:LAST keeps some.</p>']
    number = max(steps)
    ranks = [rank for rank in trace.ranks_of(run.events) if number in trace.steps_of(run.events, rank)]
    rows = [(f"rank {rank}", list(trace.split(run.events, rank, number).items())) for rank in ranks]
    beside = [
        (f"rank {rank}: {stream}", [("busy", ms)])
        for rank in ranks
        for stream, ms in trace.busy(run.events, rank, number).items()
    ]
    return [
        '<div class="charts">',
        charts.bars(f"Step {number}, the compute stream", rows, unit="ms", colours=trace.PART_COLOURS),
        charts.bars(f"Step {number}, the other streams", beside, unit="ms"),
        "</div>",
        *_pipeline(run, number),
        f'<div class="wide">{trace.picture(run.events, 0, number)}</div>',
    ]


def _pipeline(run: Run, step: int) -> list[str]:
    """A picture of all ranks' actions, and how long they were idle."""
    if not trace.has_actions(run.events):
        return []
    parts = [f'<div class="wide">{trace.pipeline_picture(run.events, step)}</div>']
    if run.table is not None:
        rows = [
            (f"rank {rank}", f"idle for {idle:.1f} of {whole:.1f} ms; {replayed:.1f} ms in the replay")
            for rank, whole, idle, replayed in trace.idle(run.events, step, run.table)
        ]
        note = (
            "Idle is what lies in no action from the first of all ranks to the last, and what actions wait. "
            "The replay runs the table with the measured times of its actions, and with nothing else."
        )
        parts += [_table(rows), f'<p class="note">{note}</p>']
    return parts


def _ranks(run: Run) -> list[str]:
    found = run.doctor
    wrong = ' class="bad"' if found["code"] == 1 else ""
    parts = [f"<p{wrong}>{escape(found['verdict'])}</p>"]
    rows = [
        (
            f"rank {rank['rank']}",
            f"{rank['state']}{': ' + rank['how'] if rank['how'] not in ('', rank['state']) else ''}; "
            f"{rank['host']}, step {rank['step']}, {rank['phase']}, {rank['resident'] / MEGABYTE:.0f} MB; "
            f"last done {rank['done'] or 'nothing'}",
        )
        for rank in found["ranks"]
    ]
    parts.append(_table(rows))
    if found["hang"]:
        parts.append(f"<pre>{escape(found['hang'])}</pre>")
    parts += [f'<p class="note">{escape(line)}</p>' for line in found["errors"]]
    return parts


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = "\n".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>\n{cells}\n</table>"


def _flat(table: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in table.items()]


def _number(value: Any) -> str:
    return (
        f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    )
