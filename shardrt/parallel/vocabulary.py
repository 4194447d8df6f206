"""VocabParallel, and Words: how a weight describes its rows if its rows are words.

Each rank has the rows of its own words. nn.Embedding, F.linear_cross_entropy and the head of the language
models ask the weight, by `weight.words`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shardrt import functional as F
from shardrt.functional import vocabulary
from shardrt.functional.in_parts import InParts
from shardrt.functional.vocabulary import VocabularyPart, rows_of
from shardrt.nn.extents import contiguous
from shardrt.nn.layers import Embedding, Linear
from shardrt.nn.lora import is_adapted
from shardrt.nn.module import Module
from shardrt.nn.parameter_placement import set_placement
from shardrt.parallel.axis import Alone, Axis
from shardrt.parallel.conversion import Converting
from shardrt.parallel.styles import Style
from shardrt.tensor import Tensor


class Words:
    """The part of a vocabulary that this rank has, and where activations come from and go to."""

    def __init__(self, axis: Axis | Alone, vocab: int) -> None:
        self.axis = axis
        self.part = VocabularyPart(axis.communicator, vocab)

    def embedding(self, indices: Any, weight: Tensor) -> Tensor:
        """As F.embedding of the whole weight; with sequence parallelism this rank's slice of the time."""
        return self.axis.leave(vocabulary.embedding(indices, weight, self.part))

    def linear_cross_entropy(self, x: Tensor, weight: Tensor, targets: Any, **how: Any) -> Tensor:
        """As F.linear_cross_entropy of the whole weight and, with sequence parallelism, the whole time."""
        return vocabulary.linear_cross_entropy(self.axis.enter(x), weight, targets, self.part, **how)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """Of the whole vocabulary, the same on all ranks."""
        return vocabulary.gather_logits(F.linear(self.axis.enter(x), weight), self.part)


class Logits(Converting):
    """Around a head: each rank computes the logits of its words, and gets those of the others."""

    def run(self, module: Module, forward: Callable, /, x: Tensor, *loss: Any) -> Tensor:
        if loss:  # models.head, which asks the weight
            return forward(x, *loss)
        return vocabulary.gather_logits(forward(self.axis.enter(x)), module.weight.words.part)


@dataclass(frozen=True)
class VocabParallel(Style):
    """An Embedding, or the Linear of a head, of which each rank has the rows of some words.

    The loss is made without the logits of all words in one place (functional/vocabulary.py), where the model
    asks for it with F.linear_cross_entropy of this weight, as models.head does. A Linear that is called gives
    logits of all words, gathered. Where both have one weight, the plan names both.
    """

    modules = (Embedding, Linear)

    def apply(self, module: Module, axis: Axis) -> None:
        if isinstance(module, Linear) and module.bias is not None:
            raise ValueError(
                f"VocabParallel: {module.name!r} has a bias, which the loss would ignore; make it with "
                "bias=False"
            )
        if is_adapted(module):
            raise ValueError(
                f"VocabParallel: {module.name!r} has a LoRA adapter, which the loss would ignore; "
                "merge_lora first"
            )
        weight = module.weight
        if isinstance(module, Linear):
            module.wrap_forward(Logits(axis))
        if weight.words is not None and weight.words.axis is axis:
            return  # it is tied, and split already
        vocab, width = weight.shape
        if vocab < axis.size:
            raise ValueError(
                f"VocabParallel: {module.name!r} must have at least {axis.size} rows, one for each rank, "
                f"got {vocab}"
            )
        rows = [rows_of(vocab, rank, axis.size) for rank in range(axis.size)]
        parts = tuple(contiguous(first * width, count * width) for first, count in rows)
        count, words = rows[axis.rank][1], Words(axis, vocab)
        set_placement(weight, axis.cut((vocab, width), (count, width), parts, words))

    def put_in_parts(self, module: Module, axis: Axis | Alone, parts: int) -> None:
        weight = module.weight
        vocab, here = weight.whole_shape[0], parts // axis.size
        if vocab < parts:
            raise ValueError(
                f"set_tensor_invariant: {module.name!r} must have at least {parts} rows, one for each part, "
                f"got {vocab}"
            )
        begins = [rows_of(vocab, axis.rank * here + part, parts)[0] for part in range(here + 1)]
        own = tuple((slice(first - begins[0], stop - begins[0]),) for first, stop in pairwise(begins))
        weight.in_parts = InParts(0, own, goes_on=axis.size > 1)
        if weight.words is None:
            weight.words = Words(axis, vocab)
