"""A trace holds what the streams did: valid to the Trace Event Format, and true."""

import json
from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest

from shardrt import device
from shardrt.__main__ import main
from shardrt.device import timeline
from shardrt.device.arena import Arena
from shardrt.device.timeline import Passed, Span
from shardrt.tools import trace as tool
from shardrt.train import config as settings
from shardrt.train.trace import arrows, events_of, nested
from tests.lab.jobs import TINY, arguments, furnish, start, tool_refuses

STEPS, RANKS, UNITS = (2, 3), (0, 1), ("blocks.0", "blocks.1", "(root)")
EXACT = 1e-3  # microseconds: to what times are written


@cache
def traced_run(temporary):
    """The folder of a run on two ranks of which steps 2 and 3 were traced; made once."""
    folder = temporary / "traced"
    folder.mkdir()
    furnish(folder)
    done = start(
        "tests.train.plain", *arguments("--name", "it", "--report.trace", "2:3"), ranks=2, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "it"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return traced_run(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def events(run):
    return json.loads((run / "trace.json").read_text())["traceEvents"]


def check(whole):
    """What the Trace Event Format asks of each type of event that we write, and viewers of them together."""
    assert whole["displayTimeUnit"] in ("ms", "ns")
    named, threads, flows, last = set(), defaultdict(list), defaultdict(dict), -1.0
    for event in whole["traceEvents"]:
        kind = event["ph"]
        assert isinstance(event["name"], str) and type(event["pid"]) is type(event["tid"]) is int
        if kind == "M":
            expected = {"name": str} if event["name"].endswith("_name") else {"sort_index": int}
            assert event["name"] in ("process_name", "thread_name", "process_sort_index", "thread_sort_index")
            assert {key: type(value) for key, value in event["args"].items()} == expected
            named.add((event["pid"], event["tid"]) if event["name"] == "thread_name" else event["pid"])
            continue
        assert event["ts"] >= max(last, 0.0), "in order of time"
        last = event["ts"]
        if kind == "X":
            assert event["dur"] >= 0 and isinstance(event["cat"], str)
            threads[event["pid"], event["tid"]].append(event)
        elif kind == "C":
            assert event["args"] and all(
                type(value) is int and value >= 0 for value in event["args"].values()
            )
        else:
            assert kind in ("s", "f") and (kind == "s" or event["bp"] == "e")
            assert kind not in flows[event["id"]], "an arrow begins and ends once"
            flows[event["id"]][kind] = event
    assert threads.keys() <= named and {pid for pid, _ in threads} <= named
    for spans in threads.values():
        check_nested(spans)
    for ends in flows.values():
        assert ends.keys() == {"s", "f"} and ends["s"]["ts"] <= ends["f"]["ts"]
        assert all(ends["s"][key] == ends["f"][key] for key in ("name", "cat", "pid"))
        for end in ends.values():
            assert any(inside(end["ts"], span) for span in threads[end["pid"], end["tid"]])


def check_nested(spans):
    around = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        while around and around[-1] <= span["ts"] + EXACT:
            around.pop()
        stop = span["ts"] + span["dur"]
        assert not around or stop <= around[-1] + EXACT, f"{span['name']} crosses what is around it"
        around.append(stop)


def inside(time, span):
    return span["ts"] - EXACT <= time <= span["ts"] + span["dur"] + EXACT


@pytest.mark.mpi
def test_a_trace_is_valid(run):
    check(json.loads((run / "trace.json").read_text()))


@pytest.mark.mpi
def test_every_unit_is_there_in_every_step_on_every_rank(events):
    for rank in RANKS:
        assert tuple(tool.steps_of(events, rank)) == STEPS
        for step in STEPS:
            spans = tool.spans_in(events, rank, step)
            message = [event["name"] for event in spans["compute"]]
            for unit in UNITS:
                assert message.count(f"forward {unit}") == message.count(f"backward {unit}") == 1
                assert [e["name"] for e in spans["reduce"]].count(f"reduce_scatter {unit}") == 1
            gathers = [event["args"]["unit"] for event in spans["gather"] if "all_gather" in event["name"]]
            assert set(gathers) == set(UNITS)
            assert gathers.count("blocks.0") == 2, "before forward and before backward"


@pytest.mark.mpi
def test_arrows_lead_from_gathers_to_what_uses_them_and_from_gradients_to_reductions(events):
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(threads.values()) >= {"compute", "gather", "reduce"}
    led = set()
    for end in (event for event in events if event["ph"] == "f"):
        on = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (end["pid"], end["tid"])]
        target = max((e for e in on if inside(end["ts"], e)), key=lambda e: e["ts"])
        led.add((end["pid"], end["name"], target["name"]))
    for rank in RANKS:
        for block in ("blocks.0", "blocks.1"):
            assert (rank, f"after all_gather {block}", f"forward {block}") in led
            assert (rank, f"after backward {block}", f"reduce_scatter {block}") in led
        assert (rank, "after all_gather blocks.0", "backward blocks.0") in led


@pytest.mark.mpi
def test_slots_in_use_are_counted_and_all_given_back(events):
    for rank in RANKS:
        by_name = defaultdict(list)
        for event in events:
            if event["ph"] == "C" and event["pid"] == rank:
                by_name[event["name"]].append(event["args"]["slots"])
        assert by_name.keys() == {"gathered parameters", "full gradients"}
        assert max(by_name["gathered parameters"]) >= 2 and by_name["gathered parameters"][-1] == 0
        assert max(by_name["full gradients"]) >= 1 and by_name["full gradients"][-1] == 0


@pytest.mark.mpi
def test_the_parts_of_a_step_are_the_step(events):
    others = []  # the share of a step that is in no part; a rank that loses its processor has more
    for rank in RANKS:
        for step in STEPS:
            whole = tool.steps_of(events, rank)[step]["dur"] / 1e3
            parts = tool.split(events, rank, step)
            assert sum(parts.values()) == pytest.approx(whole, rel=1e-6)
            assert all(ms >= 0 for ms in parts.values())
            assert {"forward", "backward", "optimizer"} <= parts.keys()
            others.append(parts["other"] / whole)
    assert min(others) < 1 / 2


@pytest.mark.mpi
def test_a_step_is_drawn(run, tmp_path, capsys):
    file = tmp_path / "step.svg"
    assert main(["trace", str(run), "--step", "2", "--rank", "1", "-o", str(file)]) == 0
    assert capsys.readouterr().out.startswith("step 2, rank 1: ")
    drawn = file.read_text()
    for message in ("gather stream", "compute stream", "reduce stream", "forward blocks.0: ", "rank 1 of 2"):
        assert message in drawn
    message = tool_refuses(capsys, "trace", run, "--step", 1)
    assert message == f"error: {run}: the trace has no step 1; it has 2, 3"
    message = tool_refuses(capsys, "trace", tmp_path)
    assert message == f"error: {tmp_path}/trace.json: No such file or directory"
    (tmp_path / "metrics.jsonl").touch()
    message = tool_refuses(capsys, "trace", tmp_path)
    assert "no step was traced; train with --report.trace FIRST:LAST" in message
    (tmp_path / "trace.json").write_text('{"traceEvents": [{')
    assert tool_refuses(capsys, "trace", tmp_path) == f"error: {tmp_path}/trace.json: not a complete trace"


def test_arrows_are_what_streams_waited_for():
    here = device.get("cpu")
    filler, event = here.new_stream("filler"), here.new_event()
    with timeline.record_all() as recorded:
        filler.submit(sum, (1, 2), label="fill a")
        filler.record(event)
        here.current_stream.wait(event)
        here.current_stream.submit(sum, (1, 2), label="use a")
        here.current_stream.record(event)
        filler.wait(event)
        filler.submit(sum, (1, 2), label="fill b")
        filler.synchronize()
    events = events_of(recorded, 0, recorded.spans[0].start)
    ends = [(e["ph"], e["name"], e["tid"]) for e in events if e["ph"] in "sf"]
    assert ends == [
        ("s", "after fill a", "filler"),
        ("f", "after fill a", "compute"),
        ("s", "after use a", "compute"),
        ("f", "after use a", "filler"),
    ]
    filler.close()


def test_an_arrow_belongs_to_the_work_around_it_where_none_follows():
    spans = {"a": [Span("a", "outer", 0, 9), Span("a", "inner", 1, 2)], "b": [Span("b", "whole", 0, 9)]}
    (arrow,) = arrows([Passed("a", 1, 3.0, False), Passed("b", 1, 4.0, True)], spans)
    assert (arrow.source.label, arrow.target.label, arrow.arrives) == ("inner", "whole", 4.0)
    assert list(arrows([Passed("a", 1, 3.0, False), Passed("a", 1, 4.0, True)], spans)) == []
    assert list(arrows([Passed("b", 2, 4.0, True)], spans)) == [], "recorded before the trace began"


def test_spans_that_cross_are_cut_where_the_other_ends():
    crossing = [Span("s", "b", 1, 4), Span("s", "a", 0, 3), Span("s", "c", 1.5, 2), Span("s", "d", 5, 6)]
    cut = [(span.label, span.start, span.stop) for span in nested(crossing)]
    assert cut == [("a", 0, 3), ("c", 1.5, 2), ("b", 3, 4), ("d", 5, 6)]


def test_nothing_is_kept_while_nothing_is_traced():
    here = device.get("cpu")
    event = here.new_event()
    here.current_stream.record(event)
    assert event.mark is None and timeline.new_mark() == 0
    arena = Arena(here, lambda: here.zeros((4,), "float32"), 1, name="slots")
    with timeline.record_all() as recorded:
        pass
    arena.release(arena.acquire())
    assert recorded.counts == recorded.spans == recorded.passed == []


@pytest.mark.parametrize(("given", "steps"), [("", []), ("3", [3]), ("3:5", [3, 4, 5]), ("1:1", [1])])
def test_steps_to_trace_are_read(given, steps):
    assert list(settings.ReportConfig(trace=given).traced) == steps


@pytest.mark.parametrize("given", ["0", "0:2", "3:2", "a", "1:", ":2", "1:2:3", "-1"])
def test_steps_that_are_none_are_refused(given):
    with pytest.raises(ValueError, match=r"report.trace must be FIRST:LAST, steps from 1 on, got '"):
        settings.ReportConfig(trace=given)


def test_steps_behind_the_last_one_are_refused():
    with pytest.raises(ValueError, match="report.trace must end by the last step, 3, got 2:9"):
        replace(TINY, report=replace(TINY.report, trace="2:9"))
