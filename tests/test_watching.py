"""`python -m shardrt report` and `watch`: of runs that are done, go on, were killed, or are no runs."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from shardrt.__main__ import main
from shardrt.tools import watch
from shardrt.tools.runs import BadRun
from shardrt.train import charts
from tests.lab.jobs import tool_refuses
from tests.test_doctor import processes
from tests.train.test_trace import traced_run

ABOUT = {
    "kind": "run",
    "architecture": "gpt",
    "parameters": 1_500_000,
    "trained_parameters": 1_500_000,
    "ranks": 2,
    "steps": 4,
    "unit": "token",
    "data": "<b>text</b> & more",
    "device_bytes": {"sharded parameters": 3_000_000},
    "host_bytes": {},
}
CHARTS = ("Loss", "Gradient norm", "Learning rate", "Rate", "Step time", "Memory", "Planned and measured")
TRACED = ("Step 3, the compute stream", "Step 3, the other streams", "step 3, rank 0 of 2")
CURVE = r'd="([^"]*)" clip-path="[^"]*" style="[^"]*stroke-width: 1.5'


def step(number, **more):
    figures = {"loss": 5.5, "norm": 1.25, "lr": 1e-3, "ms": 12.5, "tokens_per_s": 1e5, "eta_s": 61.0}
    figures |= {"memory_mb": 150.0, "memory_rank": 1, "slowest_rank": 0, "lag_ms": 2.5}
    return {"kind": "step", "step": number, **figures, **more}


def written(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def run(tmp_path):
    """A run that goes on, or was killed: nobody knows, and a line is being written."""
    folder = tmp_path / "cut"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(written(ABOUT, step(1), step(2, loss=None)) + '{"kind": "st')
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two ranks that is done, with a trace."""
    return traced_run(tmp_path_factory.getbasetemp())


class Page(HTMLParser):
    """Checks that every element ends where it should; keeps what is told, and what refers to elsewhere."""

    def __init__(self, path):
        super().__init__()
        self.open, self.titles, self.headings, self.attributes, self.tags = [], [], [], [], set()
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)
        self.close()
        assert not self.open, f"never ended: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open[-2:] == ["svg", "title"]:
            self.titles.append(data)
        elif self.open[-1:] in (["h1"], ["h2"]):
            self.headings.append(data)


def reported(run, capsys):
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"wrote {run}/report.html\n"
    page = Page(run / "report.html")
    assert not page.tags & {"script", "link", "img", "iframe", "object", "a", "image"}
    assert not {name for name, _ in page.attributes} & {"src", "onload", "srcset"}
    assert all(value.startswith("#") for name, value in page.attributes if name.endswith("href"))
    text = re.sub(r'xmlns(:xlink)?="[^"]*"', "", page.text)  # names, which nothing loads
    assert not re.search(r"https?:|url\((?!#)|@import", text)
    names = [value for name, value in page.attributes if name == "id"]
    assert len(names) == len(set(names)), "a chart shows the parts of another"
    return page


@pytest.mark.mpi
def test_the_report_of_a_run_has_everything_and_loads_nothing(finished, capsys):
    page = reported(finished, capsys)
    assert page.titles == [*CHARTS[:6], "Waiting for the slowest rank", CHARTS[6], *TRACED]
    assert page.headings[0] == "it" and page.headings[-2:] == ["Environment", "Settings"]
    for message in (
        "3 of 3, loss ",
        "batch_size = 4",
        "<th>state</th><td>done</td>",
        "<th>rank 1</th><td>done;",
    ):
        assert message in page.text, message
    assert re.search("<th>numpy</th><td>[0-9.]+</td>", page.text) and "<th>MPI</th><td>" in page.text
    assert re.search("rank [01], at most", page.text)
    for category in ("sharded parameters", "optimizer state", "activations"):
        assert f"device: {category}" in page.text
    assert len(re.findall(CURVE, page.text)) == 8, "two curves of the loss, one of each of the others"
    parts, spans = page.text[page.text.index(TRACED[0]) :].split(TRACED[2])
    for name in ("forward", "backward"):  # two charts beside each other, one colour for one thing
        pattern = f"<title>{name}[^<]*</title>\\s*<path[^>]*fill: (#[0-9a-f]+)"
        assert set(re.findall(pattern, parts)) == set(re.findall(pattern, spans)) != set()


def test_the_report_of_a_run_that_was_cut_off_says_what_is_there(run, capsys):
    page = reported(run, capsys)
    assert page.titles == [*CHARTS[:6], "Waiting for the slowest rank", CHARTS[6]]
    for message in ("2 of 4, loss not finite", "No step was traced", "nothing is known", "no flight files"):
        assert message in page.text
    assert "&lt;b&gt;text&lt;/b&gt; &amp; more" in page.text and "<b>" not in page.text


def test_what_cannot_be_reported_is_one_line(run, capsys):
    def fails(message, command="report"):
        assert tool_refuses(capsys, command, run) == f"error: {message}"

    metrics = run / "metrics.jsonl"
    for text in ("[]", '{"traceEvents": [{"name": "x", "pid": 0, "ph": "X", "cat": "s", "ts": 0}]}'):
        (run / "trace.json").write_text(text)
        fails(f"{run}/trace.json: not a complete trace")
    (run / "trace.json").unlink()
    for text, message in (
        (written(step(1)), f"{run}: the record of the run is missing from its metrics"),
        (written({"kind": "run"}), f"{run}: a record is not as expected (KeyError('trained_parameters'))"),
        (written(ABOUT) + "{]\n", f"{metrics}: line 2 is damaged"),
        (written(ABOUT) + '{"kind": "step"}\n', f"{metrics}: line 2 is damaged"),
        ("", f"{metrics}: the file is empty: the run has recorded no step yet"),
    ):
        metrics.write_text(text)
        fails(message)
    metrics.write_bytes(b"\xff\xfe\n")
    fails(f"{metrics}: line 1 is damaged")
    metrics.unlink()
    fails(f"{run}: not a run of models.train: metrics.jsonl is missing")
    fails(f"{run}: not a run of models.train: metrics.jsonl is missing", "watch")
    shutil.rmtree(run)
    fails(f"{run}: no such folder")
    fails(f"{run}: no such folder", "watch")


def test_watching_prints_whole_lines_as_they_come_until_the_end(run, capsys, monkeypatch):
    metrics, printed = run / "metrics.jsonl", []

    def append(text):
        with open(metrics, "a") as file:
            file.write(text)

    def resume():  # as RunLog.rewind: another file, without what is done again
        (run / "new").write_text(written(ABOUT, step(1), ABOUT, step(2)))
        (run / "new").replace(metrics)

    evaluation = {"kind": "evaluation", "step": 3, "held_out_loss": 2.0, "held_out_accuracy": 0.5}
    line = written(step(3, loss=4.5))
    happenings = iter(
        [
            lambda: append(line[12:40]),
            lambda: append(line[40:]),
            resume,
            lambda: append(written(evaluation)),
            lambda: None,
            lambda: append(written({"kind": "end", "seconds": 7.0})),
        ]
    )

    def sleep(seconds):
        printed.append(capsys.readouterr().out.splitlines())
        next(happenings)()

    monkeypatch.setattr(watch.time, "sleep", sleep)
    assert main(["watch", str(run)]) == 0
    printed.append(capsys.readouterr().out.splitlines())
    about = "gpt, 1.50 M parameters, 2 ranks, 4 steps"
    first, nothing, third, again, held_out, still, end = printed
    assert first[0] == about and [line[:8] for line in first[1:]] == ["step 1/4", "step 2/4"]
    assert "loss     nan" in first[2] and len({len(line) for line in first[1:]}) == 1
    assert nothing == still == []
    (third,) = third
    assert third.startswith("step 3/4  loss  4.5000") and third.endswith("  left    1:01")
    assert [line[:8] for line in again] == [about[:8], "step 2/4"]
    assert held_out == ["step 3/4  held-out loss 2.0000, 50.00 % right"]
    assert end == ["done in 7 s"]


def test_what_a_person_reads_counts_and_fits(run, capsys):
    (run / "metrics.jsonl").write_text(written({**ABOUT, "ranks": 1}, step(1)))
    assert main(["watch", "--once", str(run)]) == 0
    assert capsys.readouterr().out.startswith("gpt, 1.50 M parameters, 1 rank, 4 steps\n")
    parts = [("step 1", 0, 9000.0), *((f"forward {'long.' * 20}", 0, 4000.0), ("optimizer", 4000, 4000.0))]
    events = [
        {"ph": "X", "pid": 0, "cat": "compute", "name": name, "ts": ts, "dur": dur} for name, ts, dur in parts
    ]
    events.append({"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "rank 0"}})
    (run / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert main(["trace", str(run)]) == 0
    message = capsys.readouterr().out.splitlines()[:-1]
    assert "".join(message).endswith("other 1.0") and max(map(len, message)) <= 80
    assert main([]) == 0 and "print a run's figures" in capsys.readouterr().out


def test_watching_ends_with_a_run_that_was_killed(run, capsys, monkeypatch):
    with processes(run / "flight", ["waits", "killed"]) as (alive,):
        monkeypatch.setattr(watch.time, "sleep", lambda seconds: (alive.kill(), alive.wait()))
        assert main(["watch", str(run)]) == 1
    assert (
        capsys.readouterr().out.splitlines()[-1].startswith("the run has ended: rank 1 ended first (killed")
    )


@pytest.mark.mpi
def test_watching_once_says_how_it_stands(finished, run, capsys):
    assert main(["watch", "--once", str(finished)]) == 0
    about, latest, held_out, end = capsys.readouterr().out.splitlines()
    assert about.startswith("gpt, ") and latest.startswith("step 3/3  loss") and "held-out" in held_out
    assert end.startswith("done in ")
    assert main(["watch", "--once", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no flight files: whether it goes on is not known"


def test_a_record_that_lacks_something_is_reported(run, capsys):
    (run / "metrics.jsonl").write_text(written(ABOUT, {"kind": "step", "step": 1}))
    assert main(["watch", str(run)]) == 65  # after the record before it
    assert "a record of kind 'step' is not as expected (KeyError(" in capsys.readouterr().err
    (run / "metrics.jsonl").write_text("{]\n")
    with pytest.raises(BadRun, match="a line is damaged"):
        list(watch.Metrics(run / "metrics.jsonl").new())


def test_a_missing_value_leaves_a_gap_and_what_stands_alone_a_dot():
    def drawn(*values):
        series = charts.Series("a", range(len(values)), values)
        return charts.svg(charts.lines("", [series], y=""))

    def dots(drawn):
        return len(re.findall("<use [^>]*fill: #4c78a8", drawn))

    cut = drawn(1.0, 2.0, None, 3.0, 3.5, float("nan"))
    (path,) = re.findall(CURVE, cut)
    assert re.sub("[^ML]", "", path) == "MLML" and dots(cut) == 0
    assert dots(drawn(1.0, 2.0, None, 3.0)) == dots(drawn(1.0, 2.0)) + 2, "in the chart and its legend"
    assert (
        "no values yet" in drawn(None)
        and "no values yet" in drawn(1e308, -1e308)
        and "no values yet" not in drawn(1.0)
    )


def test_an_axis_from_zero_hides_no_level():
    series = charts.Series("", [1, 2], [351.0, 351.1])
    assert charts.lines("", [series], y="", from_zero=True).get_ylim()[0] == 0
    assert charts.lines("", [series], y="").get_ylim()[0] > 300


def test_of_many_points_no_peak_and_no_gap_is_lost():
    ys = [1.0] * 100_000
    ys[54_321], ys[54_400], ys[77_777] = 9.0, -9.0, None
    xs, kept = charts.thinned(charts.Series("", range(100_000), ys))
    assert len(kept) <= 1200 and {9.0, -9.0} <= set(kept) and list(xs) == sorted(xs)
    assert [x for x, y in zip(xs, kept, strict=True) if y != y] == [77_777]


def test_a_chart_is_the_same_bytes_whatever_the_users_own_settings(monkeypatch):
    import matplotlib

    def drawn():
        series = [charts.Series("$\\wrong", [1, 2], [3.0, 4.0])]
        return charts.svg(charts.lines("<&> $\\wrong$", series, y="$x$"))

    first = drawn()
    assert "&lt;&amp;&gt; $\\wrong$" in first and ">$x$<" in first
    for name, value in (("axes.facecolor", "black"), ("svg.fonttype", "path"), ("font.size", 30.0)):
        monkeypatch.setitem(matplotlib.rcParams, name, value)
    assert drawn() == first


def test_labels_stand_only_where_they_fit():
    def texts(width):
        bars = [charts.Bar(0, 1, "blocks.10", "#000000"), charts.Bar(1, 100, "blocks.11", "#000000")]
        drawn = charts.schedule("", {"compute": bars}, {}, axis="", width=width)
        assert drawn.count("<title>blocks.1") == 2, "under the pointer both are told"
        return re.findall(r"text-anchor: middle; fill: #ffffff[^>]*>([^<]*)<", drawn)

    assert texts(300) == ["11"]  # the first is 2 pixels wide; so the names are short
    assert texts(110 + 25 * 100) == ["10", "11"]
    assert texts(110 + 70 * 100) == ["blocks.10", "blocks.11"]
