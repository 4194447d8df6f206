"""Every pair of formats: there and back bitwise with what both hold, or one line that says why not."""

import shutil

import numpy as np
import pytest

from shardrt.__main__ import main
from shardrt.exchange.checkpoint import PARAMETER
from shardrt.exchange.formats import FORMATS, module_of
from tests.exchange.made import adapter, checkpoint, whole, write

# Pairs that are refused: an adapter has no model, and a model has no adapter.
REFUSED = {("peft", "shardrt"): "an adapter alone is no run"} | {
    (source, "peft"): "no tensor of it belongs to a LoRA adapter" for source in FORMATS if source != "peft"
}
PAIRS = [(source, target) for source in FORMATS for target in FORMATS]


def convert(source, target, to, *more):
    return main(["ckpt", "convert", str(source), str(target), "--to", to, *map(str, more)])


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same checkpoint in each format, and an adapter: format -> folder."""
    top = tmp_path_factory.mktemp("pairs")
    found = {"shardrt": write(checkpoint(), top / "shardrt"), "peft": adapter(top / "peft")}
    for name in FORMATS.keys() - found:
        found[name] = top / name
        assert convert(found["shardrt"], top / name, name, "--ranks", 2) == 0
    return found


def values(path, name):
    """All numbers of a checkpoint, and how far its training is."""
    opened = module_of(name).read(path)
    return {key: whole(tensor) for key, tensor in opened.tensors.items()}, opened.training.step


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=map("-".join, PAIRS))
def test_a_pair_leads_back_bitwise_or_is_refused_in_a_line(source, target, sources, tmp_path, capsys):
    config = ("--config", sources["safetensors"] / "config.json") if source != "peft" else ()
    code = convert(sources[source], tmp_path / "there", target, "--ranks", 3, *config)
    if (source, target) in REFUSED:
        error = capsys.readouterr().err
        assert code == 65 and not (tmp_path / "there").exists()
        assert error.startswith("error: ") and error.count("\n") == 1 and REFUSED[source, target] in error
        return
    assert code == 0
    if source == "peft" and target in ("dcp", "deepspeed"):
        assert (
            "left out: adapter_config.json: there is no place for it here; copy it" in capsys.readouterr().out
        )
        shutil.copy(sources["peft"] / "adapter_config.json", tmp_path / "there")
    back = "peft" if source == "peft" else "shardrt"
    assert convert(tmp_path / "there", tmp_path / "back", back, *config) == 0
    (wanted, step), (found, after) = values(sources[back], back), values(tmp_path / "back", back)
    if source == "peft" or not (module_of(source).STATE and module_of(target).STATE):
        wanted, found = (
            {key: array for key, array in arrays.items() if key[0] == PARAMETER} for arrays in (wanted, found)
        )
    else:
        assert after == step == 7
    assert wanted.keys() == found.keys()
    for key, array in wanted.items():
        assert found[key].dtype == array.dtype and np.array_equal(found[key], array), key
