"""The optimizer's parameter groups: as files have them, and as a command line sets them.

A program that loads a checkpoint takes its learning rate and the other settings from there. So none is made
up: where A does not say all SETTINGS of a parameter that has optimizer state, --optimizer must.
"""

import tomllib
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from sys import float_info
from typing import Any

from shardrt.exchange.checkpoint import FIRST_MOMENT, PARAMETER, SECOND_MOMENT, BadCheckpoint, Checkpoint

_OF_ADAMW = (PARAMETER, FIRST_MOMENT, SECOND_MOMENT)
SETTINGS = ("lr", "betas", "eps", "weight_decay")  # of AdamW, as PyTorch calls them


def checked(groups: Any, path: Path) -> list[dict[str, Any]]:
    """The groups that a file has.

    Raises:
        BadCheckpoint: if they are no list of tables with lists of names, or one of SETTINGS is no number.
    """
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise BadCheckpoint(f"{path}: the parameter groups are not a list of tables")
    for group in groups:
        params = group.get("params")
        if not isinstance(params, list) or not all(isinstance(name, str) for name in params):
            raise BadCheckpoint(f"{path}: a parameter group has no list of names")
        for name in SETTINGS:
            if name in group and (fault := _fault(name, group[name])):
                raise BadCheckpoint(f"{path}: the optimizer's {name} is {fault}")
    return groups


def settings(text: str) -> dict[str, Any]:
    """Those of a command line, as "lr = 3e-4, betas = [0.9, 0.95]": the inside of a table of TOML.

    Raises:
        ArgumentTypeError: for another name than SETTINGS, or another value than numbers.
    """
    try:
        table = tomllib.loads(f"given = {{ {text} }}")
    except tomllib.TOMLDecodeError as error:
        raise ArgumentTypeError(f"{text!r} is not as 'lr = 3e-4, betas = [0.9, 0.95]': {error}") from None
    given = table.pop("given")
    for name, value in [*table.items(), *given.items()]:
        if name not in SETTINGS:
            raise ArgumentTypeError(f"{name!r} is none of {', '.join(SETTINGS)}")
        if fault := _fault(name, value):
            raise ArgumentTypeError(f"{name} is {fault}")
    return given


def completed(checkpoint: Checkpoint, given: Mapping[str, Any]) -> Checkpoint:
    """With the given settings in all groups, and one more group for parameters that are in none.

    Raises:
        BadCheckpoint: if settings of a parameter that has optimizer state are still not known, or settings
            are given and no parameter has such state.
    """
    trained = dict.fromkeys(name for kind, name in checkpoint.tensors if kind != PARAMETER)
    if given and not trained:
        raise BadCheckpoint(
            f"{checkpoint.path}: there is no optimizer state, for which --optimizer says {given}"
        )
    groups = [{**group, **given} for group in checkpoint.training.groups]
    grouped = {name for group in groups for name in group["params"]}
    rest = dict.fromkeys(name for name in trained if name not in grouped)
    other = next((kind for kind, name in checkpoint.tensors if name in rest and kind not in _OF_ADAMW), None)
    if other is not None:
        raise BadCheckpoint(
            f"{checkpoint.path}: the state {other!r} is not of AdamW, and nothing says the settings of its "
            "optimizer; convert with --weights-only"
        )
    groups += [{**given, "params": list(rest)}] if rest else []
    for group in groups:
        missing = [name for name in SETTINGS if name not in group]
        of = [name for name in group["params"] if name in trained]
        if missing and of:
            raise BadCheckpoint(
                f"{checkpoint.path}: the optimizer's {', '.join(missing)} for {len(of)} parameters "
                f"({of[0][:120]}) are not known; give them, as --optimizer 'lr = 3e-4, weight_decay = 0.1', "
                "or convert with --weights-only"
            )
    return replace(checkpoint, training=replace(checkpoint.training, groups=groups))


def _fault(name: str, value: Any) -> str:
    """What is wrong with the value of a setting; "" if nothing is."""
    if name != "betas":
        return "" if _is_number(value) else "no number"
    two = isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value))
    return "" if two else "not two numbers"


def _is_number(value: Any) -> bool:
    """Infinities and NaN are none."""
    return type(value) in (int, float) and -float_info.max <= value <= float_info.max
