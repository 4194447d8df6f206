"""Runs with `--parallel.tp` and `--parallel.sequence` are the runs without: same samples, losses and text."""

from collections import Counter
from dataclasses import replace
from functools import partial
from json import loads

import numpy as np
import pytest

from models import train
from models.generate import of_folder
from shardrt.comm import thread
from shardrt.faults import flight
from shardrt.nn.parameter_placement import REPLICATE
from shardrt.train import config as settings
from shardrt.train import job, loop
from shardrt.train.errors import COPIES
from tests import lab
from tests.lab import jobs
from tests.lab.jobs import arguments, assert_alike, curves, records, start, weights

pytestmark = pytest.mark.usefixtures("here")

STEPS = 4
COMMON = ("--steps", str(STEPS), "--model.dropout", "0.1", "--sample.temperature", "0")
COMMON += ("--report.eval-interval", str(STEPS))
run = partial(jobs.run, common=COMMON)
TP = ("--parallel.tp", "2")
SEQUENCE = (*TP, "--parallel.sequence", "True")
SAVING = (*jobs.ON_HOST, "--memory.recompute", "full", "--memory.offload-activations")
RUNS = {  # name: ranks, options
    "data": (2, ()),
    "tensor": (2, TP),
    "both": (4, TP),
    "sequence": (4, SEQUENCE),
}
# What changes no bit without them changes none with them.
ALIKE = {
    "less memory": (*SAVING, "--memory.update-on", "host"),
    "copies": (*jobs.HYBRID, "--fsdp.check-copies", "1"),
}
# What changes numbers changes them as without.
LIKEWISE = {
    "adapters": (("--lora.rank", "2", "--export"), 2e-6),
    "parts of a batch": (("--micro-batches", "2", "--model.dropout", "0.0", "--model.loss-chunk", "8"), 2e-6),
    "float16": (("--precision.param", "float16"), 2e-5),
}


folder = jobs.folder_of(RUNS, COMMON)


@pytest.mark.parametrize("name", ["tensor", "both", "sequence"])
def test_a_run_over_more_axes_is_the_run_over_data_alone(folder, name):
    assert len(curves(folder, "data")[0]) == STEPS
    assert_alike(folder, name, "data", 2e-6, atol=2e-5)


def test_the_record_says_how_ranks_are_used_and_counts_the_whole_model_once(folder):
    found = {name: records(folder, name, "run")[0] for name in RUNS}
    assert found["data"]["axes"] == {"dp_shard": 2}
    assert found["tensor"]["axes"] == {"dp_shard": 1, "tp": 2} and found["tensor"]["ranks"] == 2
    assert found["both"]["axes"] == {"dp_shard": 2, "tp": 2} and found["both"]["ranks"] == 4
    assert len({record["parameters"] for record in found.values()}) == 1
    # Seconds of a step's products, from flops of the whole model, and those that all ranks can make.
    ideal = {name: last["mfu"] * last["ms"] for name in RUNS for last in records(folder, name, "step")[-1:]}
    assert ideal["tensor"] == pytest.approx(ideal["data"])
    assert ideal["both"] == pytest.approx(ideal["data"] / 2)


@pytest.mark.parametrize("what", ALIKE)
def test_what_saves_memory_changes_no_bit(folder, what):
    ranks, compared = (4, "both") if what == "copies" else (2, "tensor")
    run(ranks, what, *TP, *ALIKE[what])
    assert curves(folder, what) == curves(folder, compared)


@pytest.mark.parametrize("what", LIKEWISE)
def test_what_changes_numbers_does_so_likewise(folder, what):
    options, rtol = LIKEWISE[what]
    alone = f"{what}, alone"
    run(1, alone, *options)
    run(2, what, *SEQUENCE, *options)
    assert curves(folder, what)[0] != curves(folder, "tensor")[0]
    assert_alike(folder, what, alone, rtol, norms=False)
    if what == "adapters":  # they are merged into what is exported
        exported = (weights(folder, name, "pretrained") for name in (what, alone))
        lab.assert_close(*exported, atol=1e-6)


def test_micro_batches_draw_the_masks_of_one_rank_with_as_many(folder):
    for name, ranks in (("two masks", 1), ("two masks, shared", 2)):
        run(ranks, name, "--micro-batches", "2")
    assert curves(folder, "two masks")[0] != curves(folder, "data")[0]
    assert_alike(folder, "two masks, shared", "two masks", 2e-6)


def test_a_run_moves_from_mesh_to_mesh(folder):
    every = ("--checkpoint.every", "1", "--resume", "auto")
    moves = [(2, TP), (2, ()), (4, SEQUENCE), (1, ())]
    for step, (ranks, options) in enumerate(moves, start=1):
        run(ranks, "moved", *every[: 2 if step == 1 else 4], *options, "--steps", str(step))
    assert [r["axes"] for r in records(folder, "moved", "run")][1:3] == [
        {"dp_shard": 2},
        {"dp_shard": 2, "tp": 2},
    ]
    # The learning rate of each start is that of a run of so many steps, which warm-up does not depend on.
    lab.assert_close(curves(folder, "moved")[0], curves(folder, "data")[0], rtol=2e-6)


def test_a_run_begins_with_files_and_leaves_them(folder):
    run(2, "left", *TP, "--export")
    of_folder(folder / "runs" / "left" / "pretrained")
    begun = ("--init-from", "runs/left/pretrained", "--steps", "2")
    run(4, "begun", *SEQUENCE, *begun)
    run(1, "begun alone", *begun)
    assert_alike(folder, "begun", "begun alone", 2e-6)


def test_bits_do_not_depend_on_the_parts_of_the_data(folder):
    how = (*TP, *jobs.INVARIANT)
    run(2, "one part", *how)
    run(4, "two parts", *how)
    assert curves(folder, "one part") == curves(folder, "two parts")


def test_bits_do_not_depend_on_any_ranks(folder):
    how = ("--parallel.tensor-invariant", "2", *jobs.INVARIANT)
    run(1, "anywhere", *how)
    for name, ranks, axes in (("two axes", 4, TP), ("data alone", 2, ())):
        run(ranks, name, *how, *axes)
        assert curves(folder, name) == curves(folder, "anywhere")
    assert curves(folder, "one part")[0] != curves(folder, "anywhere")[0]


def test_nor_with_the_time_cut(folder):
    how = ("--parallel.tensor-invariant", "2", "--parallel.sequence", "True")
    run(1, "time, anywhere", *how)
    run(2, "time, cut", *how, *TP)
    assert curves(folder, "time, cut") == curves(folder, "time, anywhere")


def test_what_all_ranks_of_the_axis_hold_is_compared(folder, monkeypatch):
    """A bit of a norm's moment on one of them."""
    original = loop.report

    def flip(job, done, *rest):
        if done == STEPS - 1 and job.mesh.rank == 1:
            groups = [piece.storage.parameters for piece in job.optimizer.slices]
            same = [parameters[0].placement.kind == REPLICATE for parameters in groups].index(True)
            job.optimizer.slices[same].state["v"].view(np.uint32)[3] ^= 1 << 16
        return original(job, done, *rest)

    monkeypatch.setattr(loop, "report", flip)
    with pytest.raises(SystemExit) as stop:
        run(2, "flipped", *TP, "--fsdp.check-copies", "1")
    assert stop.value.code == COPIES


@pytest.mark.mpi
def test_processes_do_the_same_and_traces_and_flight_files_name_what_they_exchange(folder):
    how = arguments("--name", "processes", *COMMON, *SEQUENCE, "--report.trace", "3")
    done = start("tests.train.plain", *how, ranks=2, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "FULL_SHARD over 1 rank x tp 2 with sequence parallelism" in " ".join(done.stdout.split())
    assert_alike(folder, "processes", "data", 2e-6)
    run_folder = folder / "runs" / "processes"
    events = loads((run_folder / "trace.json").read_text())["traceEvents"]
    for rank in (0, 1):
        names = [e["name"] for e in events if (e["ph"], e["pid"]) == ("X", rank)]
        named = Counter(" ".join(name.split()[:2]) for name in names)  # without the module
        # Two layers that are cut by rows in each block, and the embedding.
        assert named["reduce_scatter reduce_scatter_to"] == named["all_gather reduce_scatter_to"] == 2 * 2 + 1
        # Two that are cut by columns, and the head, which keeps what it gathered.
        assert named["all_gather gather"] == named["reduce_scatter gather"] == 2 * 2 + 1
        assert named["all_gather gather_again"] == 2 * 2
        assert {"all_gather gather_again blocks.0.mlp.up", "reduce_scatter gather blocks.0.mlp.up"} <= {
            *names
        }
    recorded = flight.read(run_folder / "flight" / "rank-0.bin").records
    found = {(record.communicator, record.unit) for record in recorded}
    assert ("tensor~2", "reduce_from blocks.0.mlp.down") in found


test_what_cannot_be_cut_is_told_in_the_words_of_the_command = jobs.set_up_refusals(
    ("parallel.tp 2: the number of ranks must be a multiple of 2, got 3", 3, *TP),
    ("parallel.tp 2: the number of ranks must be a multiple of 2, got 1", 1, *TP),
    ("fsdp.copies must divide the 2 groups of 2 ranks, got 4", 4, *TP, *jobs.HYBRID[:3], "4"),
    ("must divide equally among 2 groups of 2 ranks, got 3", 4, *TP, "--batch-size", "3"),
    ("4 ranks must divide the 2 heads of 'blocks.0.attention.qkv'", 4, "--parallel.tp", "4"),
    ("4 parts must divide the 2 heads of", 2, *TP, "--parallel.tensor-invariant", "4"),
    ("parts must be at least 2, the number of ranks, got 1", 2, *TP, "--parallel.tensor-invariant", "1"),
    ("parts must be a power of two, got 3", 1, "--parallel.tensor-invariant", "3"),
    ("15 positions must be divisible by the 2 ranks", 2, *SEQUENCE, "--text.window", "15"),
    ("leave parallel.sequence off", 2, *SEQUENCE, *jobs.INVARIANT[:3], "2"),
    ("must have dropout=0", 2, *TP, "--lora.rank", "2", "--lora.dropout", "0.1"),
    ("parallel.sequence needs parallel.tp above 1", 2, "--parallel.sequence", "True"),
    ("parallel.tp must be at least 1, got 0", 2, "--parallel.tp", "0"),
)


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("regnet", TP, "parallel.tp: no plan to split a RegNet exists"),
        ("vit", SEQUENCE, "sequence_parallel is not supported for a ViT"),
    ],
)
def test_models_without_a_plan_are_reported(architecture, options, message):
    pytest.importorskip("sklearn")
    with pytest.raises(ValueError, match=message):
        thread.run(2, jobs.set_up, train.parse(["--architecture", architecture, *options]))


def test_images_are_classified_alike(folder):
    pytest.importorskip("sklearn")
    recipe = train.parse(["--architecture", "vit", "--steps", "2", "--model.n-layer", "1"])
    quick = settings.ReportConfig(log_interval=1, eval_interval=2, eval_samples=16, final_samples=16)
    for name, tp in (("images", 1), ("images, cut", 2)):
        parallel = settings.ParallelConfig(tp=tp)
        thread.run(2, job.launch, replace(recipe, name=name, report=quick, parallel=parallel))
    assert_alike(folder, "images, cut", "images", 1e-5)
    (ours,), (theirs,) = (records(folder, name, "run") for name in ("images, cut", "images"))
    assert ours["parameters"] == theirs["parameters"]
