"""bench.rounding: errors against float32, ours beside PyTorch's."""

import json

import numpy as np
import pytest

from bench import rounding

SMALL = "--size small --layers 1 --dim 32 --heads 2 --seq 8 --batch 2 --vocab 16 --batches 2".split()


def test_errors_are_relative():
    exact = 2.0, {"a": np.array([3.0, 4.0]), "b": np.array([1.0])}
    found = 2.5, {"a": np.array([3.0, 4.5]), "b": np.array([1.0])}
    assert rounding.errors(found, exact) == (0.25, {"a": pytest.approx(0.1), "b": 0.0})


@pytest.mark.torch
def test_ours_in_float32_are_those_of_torch_and_in_bfloat16_not_as_near(monkeypatch, capsys, tmp_path):
    pytest.importorskip("torch")
    file = tmp_path / "result.json"
    monkeypatch.setattr("sys.argv", ["rounding", *SMALL, "-o", str(file)])
    rounding.main()
    told = json.loads(file.read_text())
    assert told["gradients"]["shardrt float32"] < 1e-5 < 1e-3 < told["gradients"]["shardrt bfloat16"] < 3e-2
    assert 1e-3 < told["gradients"]["torch bfloat16"] < 3e-2
    assert {name: len(losses) for name, losses in told["losses"].items()} == dict.fromkeys(
        told["gradients"], 2
    )
    low, middle, high = told["gradient_ratios"]
    assert low <= middle <= high and 0.3 < middle < 2
    assert f"{middle:.2f} ({low:.2f} to {high:.2f}" in capsys.readouterr().out
