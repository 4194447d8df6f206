"""DeepSpeed's folders: read and written; the real DeepSpeed loads them and goes on, where it is installed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from shardrt.__main__ import main
from shardrt.exchange.checkpoint import FIRST_MOMENT, PARAMETER
from shardrt.exchange.formats import Options, deepspeed, format_of
from shardrt.exchange.output import Output
from tests.exchange.made import checkpoint, whole

RUN = Path(__file__).with_name("deepspeed_run.py")


def convert(*words):
    return main(["ckpt", "convert", *map(str, words)])


def values(opened):
    return {key: whole(tensor) for key, tensor in opened.tensors.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert np.array_equal(one[key], other[key]), key


def written(made, target, ranks, stage, dtype="float32"):
    plan = deepspeed.files(made, Options(target, ranks, stage, dtype))
    Output(target, {}).write(plan.files)
    return plan


@pytest.mark.parametrize(("stage", "ranks"), [(1, 1), (1, 3), (2, 2), (3, 1), (3, 2), (3, 5)])
def test_what_is_written_is_read_bitwise(tmp_path, stage, ranks):
    made = checkpoint()
    written(made, tmp_path / "d", ranks, stage)
    assert format_of(tmp_path / "d") == "deepspeed"
    opened = deepspeed.read(tmp_path / "d")
    assert_same(values(opened), values(made))
    assert opened.training.step == 7 and opened.training.steps == made.training.steps


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_and_shared_parameters_and_buffers_stay_so(tmp_path, stage):
    made = checkpoint()
    names = [name for kind, name in made.tensors if kind == PARAMETER]
    for kind in ("exp_avg", "exp_avg_sq"):
        del made.tensors[kind, names[1]]
    made.tensors[PARAMETER, "again"] = made.tensors[PARAMETER, names[0]]
    made.training.extra = {"buffer_names": [names[2]]}
    for kind in ("exp_avg", "exp_avg_sq"):
        del made.tensors[kind, names[2]]
    made.training.steps = {name: 7 for kind, name in made.tensors if kind == FIRST_MOMENT}
    written(made, tmp_path / "d", 3, stage)
    opened = deepspeed.read(tmp_path / "d")
    assert_same(values(opened), values(made))
    assert opened.training.extra["buffer_names"] == [names[2]]


def test_other_stages_ranks_and_shardrt_give_it_back(tmp_path, capsys):
    made = checkpoint()
    written(made, tmp_path / "one", 2, 1)
    more = ("--to", "deepspeed", "--ranks", 3, "--zero-stage", 3)
    assert convert(tmp_path / "one", tmp_path / "three", *more) == 0
    assert convert(tmp_path / "three", tmp_path / "own", "--to", "shardrt", "--ranks", 2) == 0
    assert convert(tmp_path / "own", tmp_path / "back", "--to", "deepspeed", "--zero-stage", 2) == 0
    for name in ("three", "back"):
        assert_same(values(deepspeed.read(tmp_path / name)), values(made))


def launch(port, *words):
    """Two ranks of the real DeepSpeed."""
    env = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    result = subprocess.run([*command, RUN, *words], env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.skipif(not (find_spec("deepspeed") and find_spec("torch")), reason="needs DeepSpeed")
def test_deepspeed_goes_on_in_another_stage(tmp_path):
    launch("29751", "--stage", "3", "--save", tmp_path / "a", "--steps", "3", "--truth", tmp_path / "a.npz")
    assert convert(tmp_path / "a", tmp_path / "b", "--to", "deepspeed", "--zero-stage", 2, "--ranks", 2) == 0
    launch("29752", "--stage", "2", "--load", tmp_path / "b", "--steps", "3", "--truth", tmp_path / "b.npz")
    one, other = np.load(tmp_path / "a.npz"), np.load(tmp_path / "b.npz")
    assert set(one.files) == set(other.files)
    for name in one.files:
        assert np.array_equal(one[name], other[name]), name
    opened = deepspeed.read(tmp_path / "b")
    for (kind, name), tensor in opened.tensors.items():
        if name != "scale":
            assert np.array_equal(whole(tensor), one[f"{kind}/{name}"]), (kind, name)
