"""Runs with `--parallel.pp` are the runs without: same samples, losses, checkpoints and text."""

import re
from argparse import Namespace
from dataclasses import replace
from functools import partial

import pytest

from models import train
from models.language import LlamaRecipe
from models.llama import LlamaConfig
from shardrt.comm import thread
from shardrt.parallel.schedules import schedule
from shardrt.parallel.table import Table
from shardrt.tools import report, watch
from shardrt.tools import trace as drawing
from shardrt.tools.runs import read_run
from shardrt.train import config as settings
from shardrt.train import job, pipelines
from tests import lab
from tests.lab import jobs
from tests.lab.jobs import TINY, arguments, assert_alike, curves, records, start, weights

pytestmark = pytest.mark.usefixtures("here")

STEPS = 3
COMMON = ("--steps", str(STEPS), "--batch-size", "8", "--sample.temperature", "0")
COMMON += ("--report.eval-interval", str(STEPS))
run = partial(jobs.run, common=COMMON)
DROPOUT = ("--model.dropout", "0.1")
PARTS = ("--micro-batches", "4")
PP = ("--parallel.pp", "2", *PARTS)
IN_BACKWARD = ("--optimizer.clip-norm", "inf", "--optimizer.in-backward")
LLAMA = ("--config", "llama.toml")
SAVING = (*jobs.ON_HOST, "--memory.recompute", "full", "--memory.offload-activations")
RUNS = {  # name: ranks, options
    "data": (1, (*PARTS, *DROPOUT)),
    "pipeline": (2, (*PP, *DROPOUT)),
}
# What changes no bit of "pipeline".
SAME = {
    "both ends on one rank": (2, ("--parallel.schedule", "zbvzerobubble")),
    "a table from a file": (2, ("--parallel.schedule", "own.csv", "--micro-batches", "1")),
    "four ranks": (4, ("--parallel.pp", "4", "--parallel.schedule", "GPipe")),
    "less memory": (2, ("--parallel.schedule", "ScheduleZB-H1", *SAVING)),
}
# What does as much as without a pipeline: ranks along the data, options, how close losses are.
LIKEWISE = {
    "copies": (2, (*jobs.HYBRID, *DROPOUT, "--fsdp.check-copies", "1"), 2e-6),
    "adapters": (1, ("--lora.rank", "2", "--export"), 2e-6),
    "float16": (1, ("--precision.param", "float16"), 2e-5),
    "updates in backward": (1, (*LLAMA, *IN_BACKWARD, "--parallel.schedule", "DualPipeV"), 2e-6),
}


SHAPE = LlamaConfig(2, 2, 1, 16, 32, 16, 256, tied=False)
OWN = LlamaRecipe("llama", model=SHAPE, steps=STEPS, report=TINY.report, sample=TINY.sample)
trained = jobs.folder_of(RUNS, COMMON, llama=OWN)
TABLES = {
    "waits": "0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1\n",
    "circle": "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
    "poem": "Shall I, compare thee\n",
}


@pytest.fixture(scope="module")
def folder(trained):
    """A folder with runs in it that several tests look at, and with tables of schedules."""
    schedule("ZB-H1", 2, 4).save(trained / "own.csv")
    for name, text in TABLES.items():
        (trained / f"{name}.csv").write_text(text)
    return trained


def test_a_run_in_stages_is_the_run_in_one(folder):
    assert len(curves(folder, "data")[0]) == STEPS
    assert_alike(folder, "pipeline", "data", 2e-6, atol=2e-5)


def test_the_record_describes_the_pipeline_and_the_rank_that_takes_most(folder, capsys):
    (about,) = records(folder, "pipeline", "run")
    assert about["axes"] == {"pp": 2, "dp_shard": 1}
    assert about["pipeline"] == {
        "schedule": "1F1B",
        "stages": ["embedding to blocks.0", "blocks.1 to head"],
        "micro_batches": 4,
        "bubble": 0.2,
    }
    assert about["device_bytes"]["links"] > 0
    assert about["parameters"] == records(folder, "data", "run")[0]["parameters"]
    assert Table.load(folder / "runs" / "pipeline" / "pipeline.csv") == schedule("1F1B", 2, 4)
    watch.watch(Namespace(path=folder / "runs" / "pipeline", once=True))
    assert "1F1B, 2 stages, 4 micro-batches, idle for 20 %" in capsys.readouterr().out


@pytest.mark.parametrize("what", SAME)
def test_what_changes_no_bit(folder, what):
    ranks, options = SAME[what]
    run(ranks, what, *RUNS["pipeline"][1], *options)
    assert curves(folder, what) == curves(folder, "pipeline")


@pytest.mark.parametrize("what", LIKEWISE)
def test_what_does_as_without_a_pipeline(folder, what):
    ranks, options, rtol = LIKEWISE[what]
    alone = [word for word in options if word not in ("--parallel.schedule", "DualPipeV")]
    run(ranks, f"{what}, alone", *PARTS, *alone)
    run(2 * ranks, what, *PP, *options)
    assert_alike(folder, what, f"{what}, alone", rtol, norms=False)
    if what == "adapters":  # they are merged into what is exported
        exported = (weights(folder, name, "pretrained") for name in (what, f"{what}, alone"))
        lab.assert_close(*exported, atol=1e-6)


def test_three_axes(folder):
    run(2, "data of two", *PARTS)
    run(8, "three axes", *PP, "--parallel.tp", "2", "--parallel.sequence")
    assert_alike(folder, "three axes", "data of two", 2e-6)


def test_bits_depend_neither_on_stages_nor_on_parts_of_the_data(folder):
    how = (*LLAMA, *jobs.INVARIANT)
    run(1, "invariant", *how)
    run(4, "invariant, in stages", *how, "--parallel.pp", "2")
    assert curves(folder, "invariant, in stages") == curves(folder, "invariant")


def test_a_run_that_is_resumed_ends_with_the_same_bits(folder):
    how = (*RUNS["pipeline"][1], "--checkpoint.every", "1")
    run(2, "resumed", *how, "--steps", "1")
    run(2, "resumed", *how, "--resume", "auto", "--parallel.schedule", "ZB-H1")
    steps, evaluations, found = curves(folder, "resumed")
    assert (steps, evaluations[1:], found) == curves(folder, "pipeline")  # one at its first end


def test_a_run_moves_from_pipeline_to_pipeline(folder):
    every = ("--checkpoint.every", "1", "--resume", "auto", *DROPOUT)
    moves = [(2, PP), (1, PARTS), (4, (*PP, "--parallel.pp", "4", "--parallel.schedule", "ZB-H1"))]
    for step, (ranks, options) in enumerate(moves, start=1):
        run(ranks, "moved", *every[2:] if step > 1 else DROPOUT, *every[:2], *options, "--steps", str(step))
    assert [record["axes"].get("pp") for record in records(folder, "moved", "run")] == [2, None, 4]
    lab.assert_close(curves(folder, "moved")[0], curves(folder, "data")[0], rtol=2e-6)


def test_images_are_classified_alike(folder):
    pytest.importorskip("sklearn")
    quick = settings.ReportConfig(log_interval=1, eval_interval=2, eval_samples=16, final_samples=16)
    recipe = train.parse(["--architecture", "regnet", "--steps", "2"])
    recipe = replace(recipe, report=quick, micro_batches=2, batch_size=16)
    for name, pp in (("regnet", 1), ("regnet in stages", 2)):
        parallel = settings.ParallelConfig(pp=pp)
        thread.run(pp, job.launch, replace(recipe, name=name, parallel=parallel))
    assert_alike(folder, "regnet in stages", "regnet", 1e-5)


@pytest.mark.mpi
def test_traces_show_actions_links_and_how_long_ranks_are_idle(folder, capsys):
    how = arguments("--name", "processes", *COMMON, *RUNS["pipeline"][1], "--report.trace", "3")
    done = start("tests.train.plain", *how, ranks=2, cwd=folder)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "FULL_SHARD over 1 rank x pp 2" in said
    assert "place what, in MB stage 0 stage 1 device sharded parameters" in said
    assert curves(folder, "processes") == curves(folder, "pipeline")
    path = folder / "runs" / "processes"
    kept = read_run(path)
    for rank, row in enumerate(kept.table.ranks):
        traced = drawing.actions_in(kept.events, rank, 3)
        message = [(acted.kind, acted.stage, acted.micro_batch) for acted in traced]
        assert message == [action[:3] for action in row]
        parts = drawing.split(kept.events, rank, 3)
        assert {"forward", "backward", "optimizer"} <= parts.keys()
    streams = {event["cat"] for event in kept.events if event["ph"] == "X"}
    assert {"F 0 to 1", "B 1 to 0"} <= streams
    for _, whole, idle, replayed in drawing.idle(kept.events, 3, kept.table):
        assert 0 <= replayed < whole and 0 <= idle < whole
    assert report.report(Namespace(path=path, output=None)) == 0
    page = (path / "report.html").read_text()
    assert "1F1B, 2 stages" in page and "ms in the replay" in page and "F3 of stage 1" in page
    assert drawing.draw(Namespace(path=path, rank=None, step=None, output=None)) == 0
    assert "step 3, rank 1" in capsys.readouterr().out


def test_ranks_are_idle_outside_of_actions_and_where_those_wait():
    """Of a step that runs as the table's replay: half of each gap is a wait in the action behind it."""
    table = schedule("ZB-H1", 3, 4)
    replay, events = table.replay(10, 0, 20, 30), []
    for rank, row in enumerate(table.ranks):
        events.append(span(rank, "step 7", -5, 1000))
        before = 0
        for action, begin, stop in zip(row, replay.start[rank], replay.end[rank], strict=True):
            waits = (begin - before) / 2
            message = f"{action.kind}{action.micro_batch} of stage {action.stage}"
            events.append(span(rank, message, begin - waits, stop))
            events += [span(rank, "wait", begin - waits, begin)] if waits else []
            before = stop
    assert drawing.idle(events, 7, table) == [
        (rank, replay.makespan, pytest.approx(idle), pytest.approx(idle))
        for rank, idle in enumerate(replay.idle)
    ]
    assert drawing.split(events, 0, 7)["weight gradients"] == pytest.approx(4 * 30)
    picture = drawing.pipeline_picture(events, 7)
    assert "I3 of stage 2: 20.00 ms" in picture and "wait in F0 of stage 1: 5.00 ms" in picture
    assert "paler" not in picture


def test_a_picture_of_a_pipeline_says_what_its_bars_are():
    """Of two stages on a rank, with a wait that is too short to be seen and one that is not."""
    events = [span(0, "step 1", 0, 100), span(0, "F0 of stage 0", 0, 40), span(0, "F0 of stage 1", 40, 100)]
    events += [span(0, "wait", 10, 10.01), span(0, "wait", 60, 70)]
    picture = drawing.pipeline_picture(events, 1)
    assert "F0 is the forward of micro-batch 0; paler: a rank's second stage" in picture
    assert re.findall("<title>([^<]* of stage [^<]*)<", picture) == [
        "F0 of stage 0: 40.00 ms",
        *["F0 of stage 1: 50.00 ms"] * 2,
        "wait in F0 of stage 1: 10.00 ms",
    ]
    assert re.findall("fill: (#[0-9a-f]{6})[^>]*>F0<", picture) == ["#ffffff", "#222222"]


def span(rank, name, begin, stop):
    times = {"ts": 1e3 * begin, "dur": 1e3 * (stop - begin)}
    return {"name": name, "cat": "compute", "ph": "X", "pid": rank, **times}


def resolved(ranks, *options):
    return pipelines.resolved(train.parse(arguments(*options)), ranks)


def test_a_pipeline_has_the_micro_batches_of_either_name_or_two_for_each_rank(folder):
    assert resolved(2, "--parallel.pp", "2").micro_batches == 4
    assert resolved(8, "--parallel.pp", "2", "--deterministic", "world-invariant").micro_batches == 16
    assert resolved(2, "--parallel.pp", "2", "--parallel.micro-batches", "1").micro_batches == 1
    assert (
        resolved(2, *PP).micro_batches == resolved(2, *PP, "--parallel.micro-batches", "4").micro_batches == 4
    )
    assert resolved(1, "--parallel.micro-batches", "3").micro_batches == 3
    schedule("1F1B", 2, 6).save("six.csv")
    assert resolved(2, "--parallel.pp", "2", "--parallel.schedule", "six.csv").micro_batches == 6
    assert resolved(1).micro_batches == 1


COUNTS = ("--parallel.pp", "2", "--micro-batches")
SCHEDULE = (*PP, "--parallel.schedule")
OF_FILE = ("--parallel.pp", "2", "--parallel.schedule")
test_what_can_be_no_pipeline_is_told_in_the_words_of_the_command = jobs.set_up_refusals(
    ("parallel.pp 2: the number of ranks must be a multiple of 2, got 3", 3, *PP),
    (
        "parallel.pp 2 x parallel.tp 2: the number of ranks must be a multiple of 4, got 6",
        6,
        *PP,
        "--parallel.tp",
        "2",
    ),
    ("fsdp.copies must divide the 2 groups of 2 ranks, got 4", 4, *PP, *jobs.HYBRID[:3], "4"),
    (
        "6 stages can't be made of the 4 pieces of a GPT",
        *(2, *SCHEDULE, "Interleaved1F1B", "--parallel.stages-per-rank", "3"),
    ),
    ("batch_size must divide equally among 1 group of 2 ranks and 3 micro-batches, got 4", 2, *COUNTS, "3"),
    (
        "parallel.schedule: DualPipeV: micro-batches must be at least 4",
        *(2, *LLAMA, *COUNTS, "2", "--parallel.schedule", "DualPipeV"),
    ),
    ("parallel.schedule: 1F1B: stages per rank must be 1, got 2", 2, *PP, "--parallel.stages-per-rank", "2"),
    ("parallel.schedule must be one of GPipe, 1F1B", 2, *SCHEDULE, "2F2B"),
    ("none.csv", 2, *SCHEDULE, "none.csv"),
    ("poem.csv, line 1, cell 1: 'Shall I' is not an action", 2, *SCHEDULE, "poem.csv"),
    (
        "parallel.schedule waits.csv: rank 0, action 2, 0B1: I of stage 0 is next for micro-batch 0",
        *(2, *OF_FILE, "waits.csv"),
    ),
    (
        "parallel.schedule circle.csv: the table does not end: rank 0, action 1, 0B0, waits for rank 1",
        *(2, *OF_FILE, "circle.csv"),
    ),
    (
        "parallel.schedule own.csv is a table for 2 ranks, but parallel.pp is 4",
        *(4, "--parallel.pp", "4", "--parallel.schedule", "own.csv"),
    ),
    (
        "parallel.schedule own.csv is a table for 4 micro-batches, but a rank has 2",
        *(2, *COUNTS, "2", "--parallel.schedule", "own.csv"),
    ),
    (
        "own.csv is a table for 2 stages, not 2 for each of 2 ranks",
        *(2, *SCHEDULE, "own.csv", "--parallel.stages-per-rank", "2"),
    ),
    (
        "micro_batches is 4 and parallel.micro_batches 2: they are one number",
        *(2, *PP, "--parallel.micro-batches", "2"),
    ),
    (
        "optimizer.in_backward would update 'wte.weight' before its gradients of two stages are added",
        *(2, *PP, *IN_BACKWARD),
    ),
    ("'wte.weight' is on two stages", 2, *PP, "--deterministic", "world-invariant"),
    (
        "use GPipe, 1F1B or Interleaved1F1B",
        *(2, *LLAMA, *SCHEDULE, "ZB-H1", "--deterministic", "world-invariant"),
    ),
    ("reduce_each: a pipeline reduces once per step", 2, *PP, "--reduce-each"),
    ("parallel.pp must be at least 1, got 0", 2, "--parallel.pp", "0"),
)


def test_a_model_without_pieces_is_reported(folder, monkeypatch):
    recipe = train.parse(arguments(*PP))
    monkeypatch.delattr("models.gpt.GPT.pieces")
    with pytest.raises(ValueError, match="parallel.pp: a GPT has no method pieces"):
        thread.run(2, jobs.set_up, recipe)


def test_a_stage_that_refuses_its_input_is_told_on_all_ranks(folder, monkeypatch):
    """While memory is planned, in the first stage alone."""
    monkeypatch.setattr(
        "models.gpt.extended", lambda *how, **more: (_ for _ in ()).throw(ValueError("too long"))
    )
    message = thread.run(2, message_of, train.parse(arguments(*PP)))
    assert message == ["too long", "too long"]


def message_of(recipe):
    with pytest.raises(ValueError) as caught:
        jobs.set_up(recipe)
    return str(caught.value)
