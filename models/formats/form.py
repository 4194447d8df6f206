"""What a Format says: how the files of Hugging Face hold one kind of model."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardrt import nn

from ..config_file import Settings


@dataclass(frozen=True)
class Stored:
    """A tensor's name in the files, without the prefix.

    rows: of the parameter, where it is several tensors one after the other; those of all its matrices, where
    it is several of these. transposed: kept the other way round, as GPT-2's linear layers are.
    """

    name: str
    rows: int | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Format:
    """How one kind of model is kept.

    read: settings -> config. describe: config -> settings. tensors: config -> (parameter, its tensors).
    ignored: matches names of tensors that hold nothing to be read. bare: tensors that never have the prefix.
    fresh: field of the config -> parameters that start as those of a new model if the field is changed.
    names: settings that a model has no opinion on: those of the files that it is from go over them.
    holds: config -> whether it is of this kind, where one class is a model of several.
    """

    kind: str
    architecture: str
    model: type[nn.Module]
    prefix: str
    ignored: re.Pattern
    read: Callable[[Settings], Any]
    describe: Callable[[Any], dict[str, Any]]
    tensors: Callable[[Any], Iterator[tuple[str, list[Stored]]]]
    bare: tuple[str, ...] = ()
    fresh: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    names: tuple[str, ...] = ("bos_token_id", "eos_token_id")
    holds: Callable[[Any], bool] = lambda config: True

    def full_name(self, name: str) -> str:
        """As it stands in files that are written."""
        return name if name in self.bare else self.prefix + name
