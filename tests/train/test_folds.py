"""Runs with `--parallel.ep` are the runs without: same samples, losses and load of experts, on any axes."""

from functools import partial

import numpy as np
import pytest

from models import train
from models.llama import LlamaConfig
from shardrt.checkpoint import CheckpointManager, full_state_dict, get_optimizer_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import explain
from shardrt.train import job, pipelines
from tests import lab
from tests.lab import jobs
from tests.lab.jobs import arguments, curves, records
from tests.ranks import ROOT

pytestmark = pytest.mark.usefixtures("here")

SHAPE = LlamaConfig(2, 2, 1, 8, 8, 8, 256, tied=False, experts=4, balance_loss=0.1, expert_bias=True)
COMMON = ("--config", "experts.toml", "--steps", "10", "--sample.length", "4", "--micro-batches", "2")
COMMON += ("--report.eval-interval", "10")
run = partial(jobs.run, common=COMMON)
ALL = ("--parallel.pp", "2", "--parallel.cp", "2", "--parallel.tp", "2", "--parallel.sequence")
RUNS = {  # name: ranks, options
    "one": (1, ()),
    "dp 2, tp 2": (4, ("--parallel.tp", "2")),
    "tp 2, ep 2": (2, ("--parallel.tp", "2", "--parallel.ep", "2")),
    "dp 2, cp 2, ep 4": (4, ("--parallel.cp", "2", "--parallel.ep", "4")),
    "all, ep 2": (16, (*ALL, "--parallel.ep", "2", "--checkpoint.every", "10")),
}


folder = jobs.folder_of(RUNS, COMMON, experts=jobs.with_experts(SHAPE))


def test_the_load_of_experts_is_told(folder):
    steps = records(folder, "one", "step")
    assert all(1 <= step["expert_load"] <= 2 and 0 <= step["empty_experts"] < 1 for step in steps)
    assert len({step["expert_load"] for step in steps}) > 1


@pytest.mark.parametrize("name", [name for name in RUNS if name != "one"])
def test_ten_steps_are_those_of_one_rank(folder, name):
    assert len(curves(folder, name)[0]) == 10
    jobs.assert_alike(folder, name, "one", 1e-5, atol=2e-5)
    for found, expected in zip(records(folder, name, "step"), records(folder, "one", "step"), strict=True):
        for figure in ("expert_load", "empty_experts"):
            assert found[figure] == expected[figure]


def test_in_the_mode_for_it_all_numbers_of_ranks_have_the_same_bits_with_experts_spread_or_not(folder):
    how = (*jobs.INVARIANT, "--steps", "3")
    for ranks in (1, 2, 4):
        run(ranks, f"tree {ranks}", *how, *(("--parallel.ep", "2") if ranks > 1 else ()))
    assert curves(folder, "tree 1") == curves(folder, "tree 2") == curves(folder, "tree 4")


def test_the_record_names_the_axes_and_the_most_rows(folder):
    assert records(folder, "all, ep 2", "run")[0]["axes"] == {
        "pp": 2,
        "dp_shard": 2,
        "cp": 2,
        "tp": 2,
        "ep": 2,
    }
    (end,) = records(folder, "all, ep 2", "end")
    assert 1 <= end["most_rows"] <= 2


def test_a_run_on_all_axes_goes_on_on_one_rank_and_back(folder):
    """Sixteen ranks: experts over four of the eight of a stage."""
    axes = (*ALL, "--parallel.ep", "4", "--sample.length", "1", "--report.final-samples", "4")
    kept = ("--checkpoint.every", "1", "--resume", "auto")
    for until, ranks, options in ((2, 16, axes), (4, 1, ()), (6, 16, axes)):
        run(ranks, "to and fro", *kept[: 2 if until == 2 else 4], *options, "--steps", str(until))
    lab.assert_close(curves(folder, "to and fro")[0], curves(folder, "one")[0][:6], rtol=1e-5)


def held(folder, source, options, to=""):
    """The whole state of a run from the checkpoint `source`, as rank 0 has it; it is saved in folder `to`."""
    recipe = train.parse(arguments(*COMMON, *options))
    mesh = init_device_mesh()
    recipe = pipelines.resolved(recipe, mesh.size)
    mesh = job.with_axes(recipe, mesh)
    model = job.sharded_model(recipe, mesh, recipe.task())
    optimizer = job.optimizer_of(recipe, model)
    step, _ = CheckpointManager(folder / source, model, optimizer, mesh).restore()
    if to:
        CheckpointManager(folder / to, model, optimizer, mesh).save(step)
    return full_state_dict(model), get_optimizer_state_dict(model, optimizer)


def test_checkpoints_go_from_all_axes_to_one_rank_and_back_to_the_bit(folder):
    ((weights, state),) = thread.run(1, held, folder, "runs/all, ep 2/checkpoints", (), "on one")
    thread.run(16, held, folder, "on one", (*ALL, "--parallel.ep", "4"), "back")
    ((found, theirs),) = thread.run(1, held, folder, "back", ())
    assert any(np.any(values) for name, values in weights.items() if name.endswith("expert_bias"))
    assert all(np.any(entry["exp_avg_sq"]) for entry in state["state"].values())
    lab.assert_equal((found, theirs["state"]), (weights, state["state"]))


def test_the_recipe_with_experts_can_be_spread(folder):
    config = str(ROOT / "models/configs/moe-small.toml")
    recipe = train.parse(["--config", config, "--data", "text.txt", "--parallel.ep", "2"])

    def lines():
        model = job.sharded_model(recipe, init_device_mesh(), recipe.task())
        return [line for line in explain(model).splitlines() if ".experts " in line.split("FULL_SHARD")[0]]

    for message in thread.run(2, lines):
        assert len(message) == 4 and all("FULL_SHARD on efsdp (" in line for line in message)
        assert all("cut on ep (0 1)" in line for line in message)


LOW = ("--precision.param", "bfloat16", "--precision.reduce", "bfloat16")
TREE = ("--deterministic", "world-invariant")
EP, TP = ("--parallel.ep", "2"), ("--parallel.tp", "2")
test_what_can_not_be_is_told_in_the_words_of_the_command = jobs.set_up_refusals(
    ("parallel.ep must divide the 4 ranks, got 3", 4, "--parallel.ep", "3"),
    ("parallel.ep must divide the 1 rank of each stage, got 2", 2, *EP, "--parallel.pp", "2"),
    (
        "parallel.ep: fold: 3 ranks along 'ep' split an axis of",
        *(6, "--parallel.ep", "3", *TP, "--batch-size", "6"),
    ),
    (
        "parallel.ep: ExpertParallel: 3 ranks must divide the 4 experts of 'blocks.0.mlp.experts'",
        *(3, "--parallel.ep", "3", "--batch-size", "6"),
    ),
    ("parallel.ep: expert_plan: a Llama has no nn.Experts", 2, *EP, "--model.experts", "0"),
    ("parallel.ep: experts on several ranks have no copies: leave fsdp.copies at 1", 4, *EP, *jobs.HYBRID),
    ("are added before they are rounded to 16 bits", 2, *EP, *TREE, *LOW),
    ("leave TokenParallel out", 2, *TP, *TREE),
    (
        "the style TokenParallel of 'blocks.0.mlp' does not support it",
        *(2, *TP, "--parallel.tensor-invariant", "2", "--model.n-kv-head", "2"),
    ),
    ("parallel.ep must be at least 1, got 0", 2, "--parallel.ep", "0"),
    ("parallel.expert_rows must be at least 1, got 0.5", 2, "--parallel.expert-rows", "0.5"),
    common=COMMON,
)
