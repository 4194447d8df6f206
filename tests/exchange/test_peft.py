"""LoRA adapters by `ckpt convert`: as a run exports them, bitwise, and through other formats and back."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import llama, train
from models.adapters import load_adapter
from shardrt.__main__ import main
from shardrt.exchange.formats.peft import CONFIG, WEIGHTS
from tests.exchange import made
from tests.lab import jobs

SMALL = ("--architecture", "llama", "--model.n-layer", "2", "--model.n-embd", "16", "--model.n-head", "2")
SMALL += ("--model.n-kv-head", "1", "--model.n-hidden", "24", "--model.block-size", "16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with adapters, its checkpoint and what it exports."""
    patch = pytest.MonkeyPatch()
    where = tmp_path_factory.mktemp("lora")
    patch.chdir(where)
    (where / "text.txt").write_text(jobs.TEXT)
    common = [
        "--data",
        "text.txt",
        "--steps",
        "2",
        "--batch-size",
        "2",
        "--export",
        "True",
        "--report.eval-samples",
        "2",
    ]
    train.main([*SMALL, *common, "--name", "base"])
    more = ["--init-from", "runs/base/pretrained", "--lora.rank", "2", "--checkpoint.every", "2"]
    train.main(["--architecture", "llama", *common, *more, "--name", "tuned"])
    yield where
    patch.undo()


def test_the_adapters_of_a_run_are_those_that_it_exports(folder, tmp_path):
    source = folder / "runs" / "tuned"
    assert main(["ckpt", "convert", str(source), str(tmp_path / "new"), "--to", "peft"]) == 0
    wanted, found = load_file(source / "adapter" / WEIGHTS), load_file(tmp_path / "new" / WEIGHTS)
    assert wanted.keys() == found.keys() and len(found) == 2 * 2 * 7  # the head is the embedding
    assert all(np.array_equal(wanted[name], found[name]) for name in wanted)
    assert any(found[name].any() for name in found if "lora_B" in name)
    one, other = (json.loads((path / CONFIG).read_text()) for path in (source / "adapter", tmp_path / "new"))
    assert {name: one[name] for name in ("r", "lora_alpha", "bias")} == {
        name: other[name] for name in ("r", "lora_alpha", "bias")
    }


def test_through_safetensors_and_back_it_is_bitwise_the_same(folder, tmp_path):
    source = folder / "runs" / "tuned" / "adapter"
    assert main(["ckpt", "convert", str(source), str(tmp_path / "plain"), "--to", "safetensors"]) == 0
    assert main(["ckpt", "convert", str(tmp_path / "plain"), str(tmp_path / "back"), "--to", "peft"]) == 0
    for name in (WEIGHTS, CONFIG):
        before, after = (path / name for path in (source, tmp_path / "back"))
        same = json.loads if name == CONFIG else lambda text: text
        assert same(before.read_bytes()) == same(after.read_bytes())


def test_peft_reads_it(folder, tmp_path):
    pytest.importorskip("torch")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    main(["ckpt", "convert", str(folder / "runs" / "tuned"), str(tmp_path / "new"), "--to", "peft"])
    base = transformers.LlamaForCausalLM.from_pretrained(folder / "runs" / "base" / "pretrained")
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "new")).merge_and_unload()
    merged = transformers.LlamaForCausalLM.from_pretrained(folder / "runs" / "tuned" / "pretrained")
    for (name, value), (_, other) in zip(model.named_parameters(), merged.named_parameters(), strict=True):
        np.testing.assert_allclose(value.detach().numpy(), other.detach().numpy(), atol=1e-6, err_msg=name)


def test_names_of_a_program_that_trains_a_peft_model_are_read(tmp_path):
    (tmp_path / "a").mkdir()
    matrix = np.ones((2, 4), np.float32)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A{}.weight"
    save_file(
        {name.format(".default"): matrix, "x.base_layer.weight": matrix}, tmp_path / "a" / "model.safetensors"
    )
    (tmp_path / "a" / CONFIG).write_text('{"peft_type": "LORA", "r": 2}')
    assert main(["ckpt", "convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "peft"]) == 0
    assert list(load_file(tmp_path / "b" / WEIGHTS)) == [name.format("")]


@pytest.mark.parametrize(
    "source, message",
    [
        ("base/pretrained", "no tensor of it belongs to a LoRA adapter"),
        ("tuned/adapter", "an adapter alone is no run"),
    ],
)
def test_what_is_no_adapter_or_no_model_is_one_line(folder, tmp_path, capsys, source, message):
    path, to = folder / "runs" / source, "peft" if source == "base/pretrained" else "shardrt"
    assert main(["ckpt", "convert", str(path), str(tmp_path / "x"), "--to", to]) == 65
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


OTHERS = {
    "embedding": (
        ["model.embed_tokens.lora_embedding_A"],
        {},
        r"is the adapter of an embedding \(embed_tokens in target_modules\)",
        "is no matrix of a LoRA adapter of a linear layer",
    ),
    "modules_to_save": (
        ["lm_head.weight"],
        {"modules_to_save": ["lm_head"]},
        r"is trained whole \(modules_to_save\)",
        r"modules_to_save = \['lm_head'\] is not supported",
    ),
    "DoRA": (
        ["model.layers.0.self_attn.q_proj.lora_magnitude_vector"],
        {"use_dora": True},
        r"is of DoRA \(use_dora\)",
        "use_dora = True is not supported",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_lora_of_a_linear_layer_is_named_with_a_way_out(name, tmp_path, capsys):
    more, said, converted, loaded = OTHERS[name]
    path = made.adapter(tmp_path / "a", more=more, **said)
    assert main(["ckpt", "convert", str(path), str(tmp_path / "b"), "--to", "peft"]) == 65
    error = capsys.readouterr().err
    assert re.search(converted, error) and "merge_and_unload()" in error and error.count("\n") == 1
    assert main(["ckpt", "convert", str(path), str(tmp_path / "c"), "--to", "safetensors"]) == 0
    with pytest.raises(ValueError, match=rf"{loaded}.*; PEFT's merge_and_unload\(\) gives a whole model"):
        load_adapter(llama.Llama(made.CONFIG), path)


def test_an_adapter_of_a_head_that_is_the_embedding_is_named(tmp_path):
    path = made.adapter(tmp_path / "a", more=["lm_head.lora_A.weight", "lm_head.lora_B.weight"])
    assert main(["ckpt", "convert", str(path), str(tmp_path / "b"), "--to", "peft"]) == 0
    assert load_file(path / WEIGHTS).keys() == load_file(tmp_path / "b" / WEIGHTS).keys()
    with pytest.raises(ValueError, match="'lm_head', which shares the weights of the embedding .*merge_and_"):
        load_adapter(llama.Llama(made.CONFIG), path)
