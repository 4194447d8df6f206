"""DeepSpeed's folders: read and written; the real DeepSpeed loads them and goes on, where it is installed."""

from importlib.util import find_spec

import numpy as np
import pytest

from shardrt.__main__ import main
from shardrt.exchange.checkpoint import FIRST_MOMENT, PARAMETER
from shardrt.exchange.formats import Options, deepspeed, format_of
from shardrt.exchange.output import Output
from tests.exchange.deepspeed_files import CASES, launch, unpacked
from tests.exchange.made import checkpoint, whole


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


@pytest.mark.parametrize("case", CASES)
def test_what_deepspeed_wrote_is_read_as_deepspeed_reads_it(case, tmp_path):
    folder, truth = unpacked(case, tmp_path / case)
    opened = deepspeed.read(folder)
    found = {f"{kind}/{name}": whole(tensor) for (kind, name), tensor in opened.tensors.items()}
    rates, step = truth.pop("lr"), truth.pop("global_steps")
    assert [group["lr"] for group in opened.training.groups] == list(rates)
    assert opened.training.step == step
    wanted = {name.replace("fp32/", "parameter/"): values for name, values in truth.items()}
    assert set(found) - set(wanted) <= {"parameter/scale"}  # a buffer, which zero_to_fp32.py alone gives
    for name, values in truth.items():
        mine = found[name.replace("fp32/", "parameter/")]
        assert np.array_equal(mine.astype(np.float32), values), name
    moments = [name for kind, name in opened.tensors if kind == FIRST_MOMENT]
    assert set(opened.training.steps) == set(moments)
    assert [name for group in opened.training.groups for name in group["params"]] == moments


@pytest.mark.skipif(not (find_spec("deepspeed") and find_spec("torch")), reason="needs DeepSpeed")
def test_deepspeed_goes_on_in_another_stage(tmp_path):
    launch("--stage", "3", "--save", tmp_path / "a", "--steps", "3", "--truth", tmp_path / "a.npz")
    assert convert(tmp_path / "a", tmp_path / "b", "--to", "deepspeed", "--zero-stage", 2, "--ranks", 2) == 0
    launch("--stage", "2", "--load", tmp_path / "b", "--steps", "3", "--truth", tmp_path / "b.npz")
    one, other = np.load(tmp_path / "a.npz"), np.load(tmp_path / "b.npz")
    assert set(other.files) == {name for name in one.files if not name.startswith("fp32/")}
    for name in other.files:
        assert np.array_equal(one[name], other[name]), name
    opened = deepspeed.read(tmp_path / "b")
    for (kind, name), tensor in opened.tensors.items():
        if name != "scale":
            assert np.array_equal(whole(tensor), one[f"{kind}/{name}"]), (kind, name)
