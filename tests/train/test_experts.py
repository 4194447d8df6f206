"""Runs of a Llama with experts: their load is reported; evaluation leaves balance out. See test_folds.py."""

from dataclasses import replace
from functools import partial

import pytest

from models import generate, train
from models.hub import load_pretrained
from models.llama import Llama, LlamaConfig
from shardrt.tools import report
from shardrt.tools.runs import read_run
from tests.lab import jobs
from tests.lab.jobs import arguments, curves, records, remove_after

pytestmark = pytest.mark.usefixtures("here")

SHAPE = LlamaConfig(2, 2, 1, 16, 12, 16, 256, tied=False, experts=4, balance_loss=0.1)
COMMON = ("--config", "experts.toml", "--steps", "3", "--sample.length", "4")
run = partial(jobs.run, common=COMMON)
folder = jobs.folder_of({"two": (2, ("--export",))}, COMMON, experts=jobs.with_experts(SHAPE))


def test_the_load_is_told_in_progress_and_in_the_report(folder, capsys):
    run(1, "shown")
    (line, *_) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 1/3  loss")]
    load = records(folder, "shown", "step")[0]["expert_load"]
    assert f"load {load:4.1f}x" in line and "% empty" in line and len(line) <= 80
    page = report.page(read_run(folder / "runs" / "shown"))
    last = records(folder, "shown", "step")[-1]
    assert f"the busiest has {last['expert_load']:.2f} times an equal share" in page
    for title in ("Tokens of the busiest expert", "Experts without tokens"):
        assert f"<title>{title}</title>" in page


def test_a_run_says_how_much_is_trained_and_what_it_is(folder, capsys):
    run(1, "introduced", "--steps", "1")
    assert "Llama 2 x 16, T 16, 2 of 4 experts" in " ".join(capsys.readouterr().out.split())


def test_flops_are_those_of_the_weights_that_a_token_meets(folder):
    recipe = train.parse(arguments(*COMMON))
    plain = replace(SHAPE, experts=0, n_hidden=SHAPE.experts_per_token * SHAPE.n_hidden)
    mixed, dense = (each.task().flops(each.network()) for each in (recipe, replace(recipe, model=plain)))
    assert mixed - dense == 6 * SHAPE.block_size * SHAPE.n_layer * SHAPE.experts * SHAPE.n_embd  # routers


def test_evaluation_is_the_cross_entropy_alone(folder):
    run(1, "heavy", "--model.balance-loss", "100", "--optimizer.lr", "1e-9", "--optimizer.min-lr", "1e-9")
    assert records(folder, "heavy", "step")[0]["loss"] > 200
    assert all(record["held_out_loss"] < 6 for record in records(folder, "heavy", "evaluation"))


def test_a_bias_balances_and_is_kept_when_a_run_goes_on(folder):
    options = ("--model.expert-bias", "--model.balance-loss", "0", "--checkpoint.every", "2")
    run(2, "whole", *options, "--steps", "5")
    run(2, "cut", *options, "--steps", "5")
    remove_after(folder / "runs" / "cut", 2)
    run(2, "cut", *options, "--steps", "5", "--resume", "auto")
    found, expected = (curves(folder, name) for name in ("cut", "whole"))
    assert found == expected
    biases = {name: values for name, values in expected[2].items() if name.endswith("expert_bias")}
    assert len(biases) == 2 and all(any(values) for values in biases.values())
    run(2, "staged-bias", *options, "--steps", "5", "--parallel.pp", "2", "--micro-batches", "2")
    staged = curves(folder, "staged-bias")[2]
    assert {name: staged[name] for name in biases} == biases


def test_what_a_run_exports_is_tuned_with_adapters_and_its_own_balance(folder):
    exported = folder / "runs" / "two" / "pretrained"
    assert load_pretrained(exported).config == replace(SHAPE, balance_loss=0.0)
    assert isinstance(generate.of_folder(exported)[0], Llama)
    tuned = ("--init-from", str(exported), "--lora.rank", "2", "--export", "--model.balance-loss", "5")
    run(2, "tuned", *tuned)
    assert records(folder, "tuned", "step")[0]["loss"] > 10
    before, after = (load_pretrained(f"{folder}/runs/{name}/pretrained") for name in ("two", "tuned"))
    others = after.state_dict()
    changed = {name for name, values in before.state_dict().items() if (others[name] != values).any()}
    assert changed == {
        "head.weight",
        *(f"blocks.{i}.attention.{x}.weight" for i in (0, 1) for x in ("qkv", "output")),
    }
