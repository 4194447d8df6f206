"""The optimizer's settings go along, through shardrt too; none is made up."""

import json

import pytest

from shardrt.__main__ import main
from shardrt.exchange.checkpoint import PARAMETER, BadCheckpoint
from shardrt.exchange.formats import dcp, own
from shardrt.exchange.groups import completed
from tests.exchange.made import checkpoint, write
from tests.exchange.test_convert import convert, sign

GROUPS = [
    {"lr": 3e-4, "betas": [0.9, 0.97], "eps": 1e-9, "weight_decay": 0.3, "params": []},
    {"lr": 2e-4, "betas": [0.8, 0.99], "eps": 1e-8, "weight_decay": 0.0, "params": []},
]
OURS = ("--dialect", "shardrt")  # no config.json, by which other names are made
ALL = "lr = 1e-5, betas = [0.5, 0.75], eps = 1e-6, weight_decay = 0.25"


def of_a_loop(groups=(), extra=None):
    """A checkpoint of a loop of one's own: shardrt's, without a recipe."""
    made = checkpoint()
    made.training.groups, made.training.extra = list(groups), extra or {}
    return made


def grouped():
    made = of_a_loop(extra={"train_state": {"ntokens_seen": 4096}})
    names = sorted(made.training.steps)
    made.training.groups = [{**GROUPS[0], "params": names[:5]}, {**GROUPS[1], "params": names[5:]}]
    return made


def settings(training):
    """Settings by parameter."""
    keys = ("lr", "betas", "eps", "weight_decay")
    return {
        name: [list(group[key]) if key == "betas" else group[key] for key in keys]
        for group in training.groups
        for name in group["params"]
    }


def test_groups_and_counts_of_tokens_go_through_shardrt(tmp_path, capsys):
    made = grouped()
    write(made, tmp_path / "own")
    assert settings(own.read(tmp_path / "own").training) == settings(made.training)
    titan = ("--to", "dcp", *OURS, "--layout", "flat")
    assert convert(tmp_path / "own", tmp_path / "titan", *titan) == 0
    assert convert(tmp_path / "titan", tmp_path / "back", "--to", "shardrt", *OURS) == 0
    assert "train_state: a run does not use it; it is kept" in capsys.readouterr().out
    back = own.read(tmp_path / "back").training
    assert settings(back) == settings(made.training)
    assert back.extra["train_state"] == {"ntokens_seen": 4096}
    assert convert(tmp_path / "back", tmp_path / "again", *titan) == 0
    assert settings(dcp.read(tmp_path / "again").training) == settings(made.training)
    assert dcp.read(tmp_path / "again").training.extra["train_state"] == {"ntokens_seen": 4096}


@pytest.mark.parametrize("to", ["dcp", "deepspeed"])
def test_settings_that_are_not_known_must_be_given(to, tmp_path, capsys):
    write(of_a_loop(), tmp_path / "own")
    assert convert(tmp_path / "own", tmp_path / "out", "--to", to, *OURS) == 65
    assert "lr, betas, eps, weight_decay for 14 parameters" in capsys.readouterr().err
    some = "lr = 1e-5, eps = 1e-6"
    assert convert(tmp_path / "own", tmp_path / "out", "--to", to, *OURS, "--optimizer", some) == 65
    assert "optimizer's betas, weight_decay for" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert convert(tmp_path / "own", tmp_path / "out", "--to", to, *OURS, "--optimizer", ALL) == 0
    assert convert(tmp_path / "out", tmp_path / "back", "--to", "shardrt", *OURS) == 0
    found = settings(own.read(tmp_path / "back").training)
    assert len(found) == 14 and set(map(str, found.values())) == {str([1e-5, [0.5, 0.75], 1e-6, 0.25])}
    assert convert(tmp_path / "own", tmp_path / "weights", "--to", to, *OURS, "--weights-only") == 0


def test_given_settings_stand_above_those_of_the_checkpoint(tmp_path):
    write(grouped(), tmp_path / "own")
    assert convert(tmp_path / "own", tmp_path / "out", "--to", "dcp", *OURS, "--optimizer", "lr = 7e-4") == 0
    groups = dcp.read(tmp_path / "out").training.groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(7e-4, 0.3), (7e-4, 0.0)]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--to", "dcp", *OURS, "--weights-only", "--optimizer", ALL], "there is no optimizer state"),
        (["--to", "shardrt", "--optimizer", ALL], "--optimizer: the recipe of a shardrt run sets it"),
    ],
)
def test_settings_without_use_are_refused(words, line, tmp_path, capsys):
    write(grouped(), tmp_path / "own")
    assert convert(tmp_path / "own", tmp_path / "out", *words) == 65
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("lr = fast", "is not as 'lr = 3e-4"),
        ("lr = '1'", "lr is no number"),
        ("lr = nan", "lr is no number"),
        ("betas = [0.9, inf]", "betas is not two numbers"),
        ("betas = 0.9", "betas is not two numbers"),
        ("momentum = 0.9", "'momentum' is none of lr, betas, eps, weight_decay"),
        ("lr = 1 }\neps = { a = 1", "eps is no number"),
    ],
)
def test_settings_of_the_command_line_are_checked(text, line, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["ckpt", "convert", str(tmp_path), "out", "--to", "dcp", "--optimizer", text])
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    "others",
    [
        7,
        {"param_groups": {"lr": 1}},
        {"param_groups": [{"lr": "1e-3", "params": ["wte"]}]},
        {"param_groups": [{"betas": [1], "params": ["wte"]}]},
        {"param_groups": [{"params": [7]}]},
        {"param_groups": [{"eps": 10**400, "params": ["wte"]}]},
    ],
)
def test_a_manifest_with_other_groups_is_one_line(others, tmp_path, capsys):
    path = write(grouped(), tmp_path / "own")
    body = json.loads((path / "manifest.json").read_text())
    body["extra"]["exchange"] = others
    sign(path, body)
    assert convert(tmp_path / "own", tmp_path / "out", "--to", "dcp") == 65
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("layout", ["flat", "nested"])
def test_settings_of_another_optimizer_go_through_as_they_are(layout, tmp_path, capsys):
    """SGD has no betas, and without momentum no state."""
    made = of_a_loop()
    made.tensors = {(kind, name): one for (kind, name), one in made.tensors.items() if kind == PARAMETER}
    made.training.steps = {}
    sgd = {
        "lr": 0.1,
        "momentum": 0,
        "weight_decay": 0.01,
        "params": sorted({name for _, name in made.tensors}),
    }
    made.training.groups = [sgd]
    write(made, tmp_path / "own")
    assert convert(tmp_path / "own", tmp_path / "out", "--to", "dcp", *OURS, "--layout", layout) == 0
    (group,) = dcp.read(tmp_path / "out").training.groups
    assert group | {"params": sorted(group["params"])} == sgd | {"initial_lr": 0.1}
    assert capsys.readouterr().err == ""


def test_values_of_the_program_go_through_shardrt_to_their_tables(tmp_path, capsys):
    made = grouped()
    values = {"scheduler": {"last_epoch": 7, "base_lrs": [3e-4, 2e-4], "warm": {"up": True}}, "note": "x"}
    made.training.extra = {**values, "data": {"place": 3}}
    made.training.groups[0]["amsgrad"] = True  # without its state, which no AdamW here keeps
    write(made, tmp_path / "own")
    assert convert(tmp_path / "own", tmp_path / "dcp", "--to", "dcp", *OURS, "--layout", "nested") == 0
    assert "left out: data: there is no place for it here" in capsys.readouterr().out
    read = dcp.read(tmp_path / "dcp").training
    assert read.extra == values
    assert not any(group["amsgrad"] for group in read.groups)


def test_the_state_of_another_optimizer_is_no_adamw():
    made = of_a_loop()
    made.tensors = {
        ("momentum" if kind == "exp_avg" else kind, name): tensor
        for (kind, name), tensor in made.tensors.items()
        if kind != "exp_avg_sq"
    }
    with pytest.raises(BadCheckpoint, match="the state 'momentum' is not of AdamW"):
        completed(made, {"lr": 1e-3})
