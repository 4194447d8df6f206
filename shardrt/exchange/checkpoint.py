"""What all formats have in common: named tensors that are read in ranges, and the state of training.

A format is a module in formats/ with three functions:

    recognises(path) -> bool              looks at names of files alone
    read(path) -> Checkpoint              reads headers; tensors are read when a writer asks for elements
    files(checkpoint, options) -> Plan    the files to write, as ranges of tensors; output.py writes them

So a conversion never holds a model, nor one tensor: at most CHUNK bytes are read at a time.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardrt.untrusted import Refused

CHUNK = 16 << 20  # bytes that are read at a time
PARAMETER, FIRST_MOMENT, SECOND_MOMENT = "parameter", "exp_avg", "exp_avg_sq"  # kinds of tensors


class BadCheckpoint(Refused):
    """A checkpoint can't be read or written. The message names the file and its fault, in one line."""


class Tensor(Protocol):
    """A tensor in a file, or a view of others.

    Attributes:
        dtype: of its elements; bfloat16 is ml_dtypes'.
        shape: of the whole tensor.
    """

    dtype: np.dtype
    shape: tuple[int, ...]

    def read_into(self, out: np.ndarray, start: int) -> None:
        """Fill 1-D `out`, of `dtype`, with its elements in C order from `start` on.

        Raises:
            Refused: if the file is damaged or has changed.
            OSError: if the file system fails.
        """
        ...


class Joined:
    """A tensor whose elements lie one after the other in ranges of others.

    Args:
        pieces: (tensor, its first element, elements), all of `dtype`; together as many as `shape` has.
    """

    def __init__(
        self, dtype: np.dtype, shape: tuple[int, ...], pieces: list[tuple[Tensor, int, int]]
    ) -> None:
        self.dtype, self.shape, self._pieces = dtype, shape, pieces
        self._ends = list(accumulate(count for _, _, count in pieces))

    def read_into(self, out: np.ndarray, start: int) -> None:
        """As Tensor.read_into."""
        done, number = 0, bisect_right(self._ends, start)
        while done < out.size:
            tensor, first, count = self._pieces[number]
            inside = start + done - (self._ends[number] - count)
            some = min(count - inside, out.size - done)
            tensor.read_into(out[done : done + some], first + inside)
            done, number = done + some, number + 1


@dataclass
class Training:
    """The state of training apart from tensors.

    Attributes:
        step: updates done; None if the checkpoint does not say.
        steps: updates of each parameter that has optimizer state, by name.
        groups: the optimizer's parameter groups in PyTorch's words: "lr", "betas", "eps", "weight_decay" and
            "params", a list of names.
        extra: other plain values (numbers, strings, lists, tables), as the format names them.
    """

    step: int | None = None
    steps: dict[str, int] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Checkpoint:
    """A checkpoint that is open for reading.

    Attributes:
        path: where it is.
        tensors: (kind, name) -> tensor. The kind is PARAMETER or the name of optimizer state in PyTorch's
            words; names are those in the files without the format's own prefixes ("model.", "optim.state.").
        training: see there.
        config: a config.json of Hugging Face's, if one is with the checkpoint.
        files: other small files that go along (a tokenizer's), name -> content.
        left: what the format holds and a Checkpoint can't, one line each: `convert` prints them.
    """

    path: Path
    tensors: Mapping[tuple[str, str], Tensor]
    training: Training = field(default_factory=Training)
    config: dict[str, Any] | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
