"""Names: each dialect there and back, torchtitan's own rearrangement, a user's table."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models import gpt
from shardrt.exchange import names
from shardrt.exchange.checkpoint import PARAMETER, BadCheckpoint
from tests.exchange.made import CONFIG, RECIPE, Held, checkpoint, whole

HERE = Path("here")


def family():
    return names.family_of_recipe(RECIPE, HERE, 100)


@pytest.mark.parametrize("dialect", names.DIALECTS)
def test_a_dialect_is_known_by_its_names_and_leads_back(dialect):
    made = checkpoint()
    there = names.renamed(made.tensors, "shardrt", dialect, family(), HERE)
    assert names.dialect_of(name for _, name in there.tensors) == dialect
    back = names.renamed(there.tensors, dialect, "shardrt", family(), HERE)
    assert back.tensors.keys() == made.tensors.keys()
    for key, tensor in made.tensors.items():
        assert back.tensors[key].shape == tensor.shape
        assert np.array_equal(whole(back.tensors[key]), whole(tensor)), key


def test_queries_and_keys_are_as_torchtitan_has_them():
    """`_reverse_permute` of torchtitan's Llama3StateDictAdapter (torchtitan 0.3.0)."""
    made = checkpoint()
    hub = names.renamed(made.tensors, "shardrt", "huggingface", family(), HERE).tensors
    titan = names.renamed(made.tensors, "shardrt", "torchtitan", family(), HERE).tensors
    for kind, _ in made.tensors:
        for ours, theirs, heads in (("q", "wq", CONFIG.n_head), ("k", "wk", CONFIG.n_kv_head)):
            w = whole(hub[kind, f"model.layers.1.self_attn.{ours}_proj.weight"])
            rows, columns = w.shape
            wanted = w.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
            found = whole(titan[kind, f"layers.1.attention.qkv_linear.{theirs}.weight"])
            assert np.array_equal(found, wanted)


def test_a_tied_head_is_there_twice_in_torchtitan_and_is_named_on_the_way_back():
    there = names.renamed(checkpoint().tensors, "shardrt", "torchtitan", family(), HERE)
    assert ("exp_avg", "lm_head.weight") not in there.tensors
    head = whole(there.tensors[PARAMETER, "lm_head.weight"])
    assert np.array_equal(head, whole(there.tensors[PARAMETER, "tok_embeddings.weight"]))
    back = names.renamed(there.tensors, "torchtitan", "shardrt", family(), HERE)
    assert [line.partition(":")[0] for line in back.left] == ["parameter lm_head.weight"]


def test_linear_layers_of_gpt2_are_transposed():
    config = gpt.GPTConfig(n_layer=1, n_head=2, n_embd=8, vocab_size=16, block_size=4)
    recipe = {"architecture": "gpt", "model": vars(config)}
    weights = {
        (PARAMETER, name): Held(np.random.default_rng(0).normal(size=p.whole_shape))
        for name, p in gpt.GPT(config).named_parameters()
    }
    kind = names.family_of_recipe(recipe, HERE, 100)
    hub = names.renamed(weights, "shardrt", "huggingface", kind, HERE).tensors
    ours = whole(weights[PARAMETER, "blocks.0.attention.qkv.weight"])
    assert np.array_equal(whole(hub[PARAMETER, "transformer.h.0.attn.c_attn.weight"]), ours.T)


def test_missing_tensors_and_a_missing_config_are_named():
    tensors = dict(checkpoint().tensors)
    del tensors[PARAMETER, "blocks.1.norm2.weight"]
    with pytest.raises(BadCheckpoint, match=r"missing: 'blocks\.1\.norm2\.weight'"):
        names.renamed(tensors, "shardrt", "huggingface", family(), HERE)
    with pytest.raises(BadCheckpoint, match="--config"):
        names.renamed(tensors, "shardrt", "huggingface", None, HERE)
    with pytest.raises(BadCheckpoint, match="layers"):
        names.family_of_recipe(RECIPE | {"model": {**RECIPE["model"], "n_layer": 10**6}}, HERE, 100)
    with pytest.raises(BadCheckpoint, match="recipe"):
        names.family_of_recipe(RECIPE | {"model": {"n_head": "many"}}, HERE, 100)


def test_wrappers_of_modules_are_no_part_of_names():
    hub = names.renamed(checkpoint().tensors, "shardrt", "huggingface", family(), HERE).tensors
    wrapped = {
        (kind, name.replace("layers.0.", "layers.0._checkpoint_wrapped_module._orig_mod.")): tensor
        for (kind, name), tensor in hub.items()
    }
    back = names.renamed(wrapped, "huggingface", "shardrt", family(), HERE)
    assert back.tensors.keys() == checkpoint().tensors.keys()


TABLE = """
"model.layers.{}.q.weight" = "net.{}.query"
"model.layers.{}.qkv.weight" = ["net.{}.query", "net.{}.key"]
"down.{}" = { from = "net.{}.down", transposed = true }
"cut.{}" = { from = "net.{}.key", rows = [1, 2] }
"turned.{}" = { from = "net.{}.query", interleave = 2 }
"kept.*" = "other.*"
"""


def test_a_table_of_the_user(tmp_path):
    (tmp_path / "names.toml").write_text(TABLE)
    query, key, down = (np.random.default_rng(i).normal(size=(8, 3)) for i in range(3))
    given = {"net.3.query": query, "net.3.key": key, "net.3.down": down, "other.a.b": key, "rest": down}
    tensors = {(PARAMETER, name): Held(values) for name, values in given.items()}
    found = names.from_table(tensors, tmp_path / "names.toml")
    wanted = {
        "model.layers.3.q.weight": query,
        "model.layers.3.qkv.weight": np.concatenate([query, key]),
        "down.3": down.T,
        "cut.3": key[1:3],
        "turned.3": query.reshape(2, 2, 2, 3).swapaxes(1, 2).reshape(8, 3),
        "kept.a.b": key,
        "rest": down,
    }
    assert {name for _, name in found.tensors} == wanted.keys()
    for name, values in wanted.items():
        assert np.array_equal(whole(found.tensors[PARAMETER, name]), values), name
    assert found.of["model.layers.3.qkv.weight"] == ("net.3.query", "net.3.key")


@pytest.mark.parametrize(
    "line",
    ["x", '"a" = 3', '"a.{}" = "b"', '"a" = []', '"a" = {rows = [1, 2]}', '"a" = {from = "net", rows = [1]}',
     '"a" = {from = "net", transposed = 1}', '"a" = {from = "net", shape = 3}', '"a" = ["net", "absent"]',
     '"a***" = "net***"', '"b" = "net"\n"b*" = "rest*"', '"rest" = "net"',
     '"a" = {from = "net", interleave = -2}', "[" * 5000],
)  # fmt: skip
def test_a_table_that_is_none_is_one_line(line, tmp_path):
    (tmp_path / "names.toml").write_text(line)
    tensors = {(PARAMETER, "net"): Held(np.zeros((4, 2))), (PARAMETER, "rest"): Held(np.zeros(3))}
    with pytest.raises(BadCheckpoint) as error:
        names.from_table(tensors, tmp_path / "names.toml")
    assert "\n" not in str(error.value)


def test_a_config_that_is_no_model_is_refused():
    settings = family().settings
    for changed in ({"model_type": "unknown"}, {"num_hidden_layers": 10**9}, {"num_attention_heads": "4"}):
        with pytest.raises(BadCheckpoint):
            names.family_of(settings | changed, HERE, 100)
    with pytest.raises(BadCheckpoint, match="--family"):
        names.family_of(settings, HERE, 100, "nothing")
    assert replace(names.family_of(settings, HERE, 100).config, init_std=CONFIG.init_std) == CONFIG
