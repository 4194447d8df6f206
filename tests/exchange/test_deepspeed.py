"""DeepSpeed's folders: read and written; the real DeepSpeed loads them and goes on, where it is installed."""

import json
import re
import shutil
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
from tests.exchange.deepspeed_files import CASES, launch, unpacked
from tests.exchange.hostile_deepspeed import rewritten
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
    ours = ("--to", "deepspeed", "--dialect", "shardrt")
    assert convert(tmp_path / "one", tmp_path / "three", *ours, "--ranks", 3, "--zero-stage", 3) == 0
    assert convert(tmp_path / "three", tmp_path / "own", "--to", "shardrt", "--ranks", 2) == 0
    assert convert(tmp_path / "own", tmp_path / "back", *ours, "--zero-stage", 2) == 0
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


def test_without_the_optimizers_files_weights_are_read_where_they_are_whole(tmp_path, capsys):
    for case in ("zero2-bf16-frozen", "zero3-tied"):
        folder, _ = unpacked(case, tmp_path / case)
        for path in folder.glob("*/*optim_states.pt"):
            path.unlink()
    whole_, cut = tmp_path / "zero2-bf16-frozen", tmp_path / "zero3-tied"
    assert convert(whole_, tmp_path / "own", "--to", "shardrt") == 0
    assert (
        "left out: optimizer state: *_optim_states.pt, which have it, are not here" in capsys.readouterr().out
    )
    assert convert(cut, tmp_path / "none", "--to", "shardrt") == 65
    assert "is not whole: ZeRO-3 has it in *_optim_states.pt" in capsys.readouterr().err


def of_program(training):
    """What no tensor says, with lists for tuples."""
    return json.loads(json.dumps([training.step, training.steps, training.groups, training.extra]))


@pytest.mark.parametrize("case", ["zero1", "zero2-bf16-frozen", "zero3-tied"])
def test_groups_counts_and_names_go_through_shardrt_and_back(case, tmp_path, capsys):
    folder, _ = unpacked(case, tmp_path / case)
    assert convert(folder, tmp_path / "own", "--to", "shardrt") == 0
    said = capsys.readouterr().out
    for name in ("global_samples", "buffer_names", "note", "lr_scheduler"):
        assert f"left out: {name}: a run does not use it" in said
    assert ("left out: clip_grad 1.0: B's own settings" in said) == (case != "zero3-tied")  # not in its files
    assert convert(tmp_path / "own", tmp_path / "back", "--to", "deepspeed", "--ranks", 2) == 0
    _, *left = capsys.readouterr().out.splitlines()
    assert [line.partition(", ")[0] for line in left] == [
        "left out: names: they are not those of a known family"
    ]
    was, now = deepspeed.read(folder), deepspeed.read(tmp_path / "back")
    assert_same(values(now), values(was))
    assert of_program(now.training) == of_program(was.training)
    assert now.training.extra["global_samples"] == 12 and now.training.extra["skipped_steps"] == 0


def test_what_is_no_plain_value_is_left_out_in_a_line(tmp_path, capsys):
    made = checkpoint()
    made.training.extra = {"rng": b"state", "skipped_steps": 2, "note": "kept"}
    written(made, tmp_path / "d", 1, 1)
    assert convert(tmp_path / "d", tmp_path / "own", "--to", "shardrt") == 0
    assert "left out: rng: it is not a plain value\n" in capsys.readouterr().out
    assert deepspeed.read(tmp_path / "d").training.extra.keys() >= {"skipped_steps", "note"}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda one, other: other.unlink(), "it is one of [2, 2] ranks' files, 1 are here"),
        (lambda one, other: one.unlink(), "files of rank 0 are missing"),
        (lambda one, other: shutil.copy(one, renamed(one, 2)), "it is one of [2, 2] ranks' files, 3 are"),
        (lambda one, other: shutil.copy(one, renamed(one, 7)), "files of rank 2 are missing"),
        (lambda one, other: later(other), "it is of step [4, 4], rank 0 of step [3, 3]"),
        (lambda one, other: later(other, "exp_avg"), "it has other kinds of optimizer state than rank 0"),
        (lambda one, other: settle(one, "partition_count", [1, 2]), "one of [1, 2] ranks' files, 2 are"),
        (lambda one, other: settle(one, "param_alignment_paddings", [[0, 1, 0], [0] * 3]), "are missing"),
        (lambda one, other: settle(one, "param_alignment_paddings", [[-1, 1, 0]] * 2), "3 natural numbers"),
    ],
)  # fmt: skip
def test_files_that_do_not_belong_together_are_refused(change, line, tmp_path, capsys):
    folder, _ = unpacked("zero1", tmp_path / "d")
    change(*sorted(folder.glob("*/*optim_states.pt")))
    assert convert(folder, tmp_path / "own", "--to", "shardrt") == 65
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and line in error, error


def renamed(path, rank):
    """The file of another rank."""
    return path.with_name(path.name.replace("rank_0_", f"rank_{rank}_"))


def settle(path, name, value):
    """Set an entry of a rank's optimizer."""
    rewritten(path, lambda content: content["optimizer_state_dict"].update({name: value}))


def later(path, lost=""):
    """Give a rank's file another step, and take a kind of state out."""

    def change(content):
        for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["step"] = 4.0
            state.pop(lost, None)

    rewritten(path, change)


@pytest.mark.parametrize(("case", "seeds"), [("zero1", 260), ("zero3-tied", 240)])
def test_mutants_are_refused_in_one_line(case, seeds, tmp_path):
    valid, _ = unpacked(case, tmp_path / "valid")
    (tmp_path / "scratch").mkdir()
    words = [str(valid), str(tmp_path / "scratch"), "0", str(seeds)]
    command = [sys.executable, "-m", "tests.exchange.hostile_deepspeed", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    refused = int(re.search(rf"(\d+) of {seeds} refused", done.stdout)[1])
    assert seeds / 2 < refused < seeds  # a change of a weight is none that a reader could notice


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


def deepspeed_trains(folder, first, last, stage):
    """Run DeepSpeed from one step to another on 2 ranks; returns the losses."""
    program = Path(__file__).with_name("deepspeed_llama.py")
    launch(folder, str(first), str(last), str(stage), program=program)
    return json.loads((folder / f"losses-{last}.json").read_text())


@pytest.mark.skipif(not (find_spec("deepspeed") and find_spec("torch")), reason="needs DeepSpeed")
def test_ten_steps_after_each_conversion_are_those_of_the_program_that_was_left(tmp_path):
    """To 1e-5: DeepSpeed's own ten steps and ours, ours and DeepSpeed's in another stage."""
    from shardrt.comm import thread
    from tests.exchange.test_page import assert_alike, shardrt_trains

    theirs, ours, back = tmp_path / "theirs", tmp_path / "ours", tmp_path / "back"
    theirs.mkdir()
    deepspeed_trains(theirs, 0, 3, 2)
    config = ("--config", theirs / "config.json")
    assert convert(theirs, ours, "--to", "shardrt", *config) == 0
    wanted = deepspeed_trains(theirs, 3, 13, 2)
    losses = thread.run(2, shardrt_trains, ours, 13)[0]
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_alike(theirs / "global_step13", ours, tmp_path, 1e-5)
    more = ("--dialect", "huggingface", "--ranks", 2, "--zero-stage", 3)
    assert convert(ours, back, "--to", "deepspeed", *more, *config) == 0
    wanted = thread.run(1, shardrt_trains, ours, 23)[0]
    np.testing.assert_allclose(deepspeed_trains(back, 13, 23, 3), wanted, rtol=1e-5)
    assert_alike(back / "global_step23", ours, tmp_path, 1e-5)
