"""Runs of models.train that begin with the files of Llama's kin: on one rank, and with every axis."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import shardrt
from models import generate, train
from models.hub import load_pretrained, save_pretrained
from models.llama import FULL, SLIDING, Llama, LlamaConfig
from shardrt.checkpoint import full_state_dict
from tests.lab import jobs
from tests.lab.jobs import arguments, assert_alike, curves

pytestmark = pytest.mark.usefixtures("here")

SHAPE = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 16, "n_hidden": 24, "block_size": 16}
SHAPE |= {"vocab_size": 256, "init_std": 0.2}
KINDS = {
    "qwen2": LlamaConfig(**SHAPE, qkv_bias=True, sliding_window=5, layer_types=(FULL, SLIDING)),
    "qwen3": LlamaConfig(**SHAPE, head_size=6, qk_norm="head", tied=False),
    "mistral": LlamaConfig(**SHAPE, sliding_window=6, tied=False),
}
COMMON = ("--config", "families.toml", "--steps", "2", "--sample.length", "4", "--micro-batches", "2")
COMMON += ("--export", "--report.eval-interval", "2", "--checkpoint.every", "2")
run = partial(jobs.run, common=COMMON)
folder = jobs.folder_of({}, families=jobs.with_experts(LlamaConfig(**SHAPE)))


def written(kind):
    """The files of a model whose biases aren't zero, made once."""
    if Path(kind).exists():
        return kind
    shardrt.manual_seed(5)
    model, random = Llama(KINDS[kind]), np.random.default_rng(5)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data[...] = random.normal(size=parameter.shape)
    save_pretrained(model, kind)
    return kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_begins_with_files_on_any_axes_and_leaves_such_files(folder, kind, capsys):
    begun = ("--init-from", written(kind))
    run(1, f"{kind} alone", *begun)
    axes = {"tp": (2, "--parallel.tp", "2"), "pp": (2, "--parallel.pp", "2"), "cp": (2, "--parallel.cp", "2")}
    for axis, (ranks, *options) in axes.items():
        run(ranks, f"{kind} {axis}", *begun, *options)
        assert_alike(folder, f"{kind} {axis}", f"{kind} alone", 1e-5, atol=1e-4)
    for name, ranks, options in (("alone", 1, ()), ("tp", 2, ("--parallel.pp", "2"))):
        run(ranks, f"{kind} {name}", *begun, *options, "--steps", "3", "--resume", "auto")
    assert_alike(folder, f"{kind} tp", f"{kind} alone", 1e-5, atol=1e-4)
    left = folder / "runs" / f"{kind} tp" / "pretrained"
    assert json.loads((left / "config.json").read_text())["model_type"] == kind
    before, after = load_pretrained(kind), load_pretrained(left)
    assert after.config == before.config
    other = full_state_dict(after)
    assert all((values != other[name]).any() for name, values in full_state_dict(before).items())
    assert [step for step, *_ in curves(folder, f"{kind} tp")[0]] == [1, 2, 3]
    capsys.readouterr()
    generate.main([f"runs/{kind} tp", "--length", "4"])
    assert capsys.readouterr().out


def test_adapters_of_layers_with_biases_are_the_same_along_tp(folder):
    begun = ("--init-from", written("qwen2"), "--lora.rank", "2", "--sample.length", "0")
    run(1, "adapted alone", *begun)
    run(2, "adapted", *begun, "--parallel.tp", "2")
    assert_alike(folder, "adapted", "adapted alone", 1e-5)
    before, after = (load_pretrained(path).state_dict() for path in ("qwen2", "runs/adapted/pretrained"))
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed and not any("bias" in name or "norm" in name for name in changed)


def test_flops_count_the_keys_that_a_token_sees(folder):
    recipe = train.parse(arguments(*COMMON))
    time, window, heads = 16, 6, SHAPE["n_embd"]
    some = replace(recipe.model, qkv_bias=True, sliding_window=window, layer_types=(FULL, SLIDING))
    whole, less = (each.task().flops(each.network()) for each in (recipe, replace(recipe, model=some)))
    ends = np.linspace(0, time, 10_001)
    seen = [np.minimum(ends, most).mean() for most in (time, window)]
    assert whole - less == pytest.approx(12 * time * heads * (seen[0] - seen[1]), rel=1e-3)
