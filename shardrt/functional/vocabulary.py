"""Embedding, cross entropy and logits of a vocabulary whose rows are split over the ranks of an axis.

Rank r has the rows [first, first + count) of a weight (vocab, width). The losses nowhere need logits of all
words: each rank computes its own words' logits and reduces a row to two numbers: the logarithm of the sum of
exponentials, and the logit of the target (0 on other ranks). One all-gather of these for a call,
whatever its chunks, gives all ranks the loss: 8 (n - 1) bytes per row (16 in float64). Backward needs none.
Megatron-LM has three all-reduces of one number per row, one after the other: 24 (n - 1) / n bytes in a ring,
which is more at 2 ranks, the same at 3, less from 4 on. Either is little next to a row of the input.

Kinds of the values along the axis, as in collective.py (targets and indices are I):

    embedding             weight V               -> P   put reduce_from (I) or reduce_scatter_to (V) behind it
    cross_entropy         logits V               -> I   gradient of the logits V
    linear_cross_entropy  x R, weight V          -> I   gradient of x is P: put copy_to (I) or gather (V)
                                                        before it, which sums it
    gather_logits         logits V               -> I   for sampling, and for losses that are not here

Slices come from `rows_of`: as equal as can be, and two neighbours of 2 n slices are one of n slices. A slice
is padded where an all-gather wants equal ones (gather_logits), never the weight.

With a weight that is multiplied in parts (in_parts.py), each part of a rank has separate matmuls and
two numbers for each row. All parts' numbers are joined in order, so the loss is bitwise identical on any
number of ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardrt import autograd
from shardrt.autograd import Function, Variable, contiguous
from shardrt.comm import Communicator
from shardrt.functional._arrays import (
    check_floats,
    computed,
    empty,
    empty_exact,
    empty_like,
    empty_rows,
    flat,
    for_product,
    indices,
    kernels,
    operands,
    rows,
    tensor,
)
from shardrt.functional._losses import checked, chunks, counted, reduced, scale_of
from shardrt.functional._types import Array, Tensor
from shardrt.functional.collective import gathered
from shardrt.functional.in_parts import add_neighbours, apart, multiplied
from shardrt.functional.loss import CrossEntropy
from shardrt.functional.words import also

__all__ = [
    "VocabularyPart",
    "cross_entropy",
    "embedding",
    "gather_logits",
    "linear_cross_entropy",
    "rows_of",
]


def rows_of(vocab: int, rank: int, size: int) -> tuple[int, int]:
    """(first, count) of the rows that `rank` of `size` has, from ceil(rank vocab / size) on.

    So ranks differ by one row at most, rank 0 has as many as any, and twice as many ranks have halves of
    these parts.
    """
    first, stop = (-(-place * vocab // size) for place in (rank, rank + 1))
    return first, stop - first


@dataclass(frozen=True)
class VocabularyPart:
    """Which rows of a (vocab, width) this rank of `communicator` has."""

    communicator: Communicator
    vocab: int  # of all ranks together

    @property
    def first(self) -> int:
        """The first word whose row is here."""
        return rows_of(self.vocab, self.communicator.rank, self.communicator.size)[0]

    @property
    def count(self) -> int:
        """How many rows are here."""
        return rows_of(self.vocab, self.communicator.rank, self.communicator.size)[1]


class VocabularyEmbedding(Function):
    handles = (1,)

    def forward(self, indices: Array, weight: Variable, part: VocabularyPart) -> Array:
        self.saved = (indices, weight, part)
        table = contiguous(weight.lent_bits())
        y = empty((*indices.shape, weight.shape[1]), computed(table))
        kernels().embedding.forward(flat(indices), table, rows(y), part.first, part.vocab)
        return y

    def backward(self, dy: Array) -> tuple:
        indices, weight, part = self.saved
        return None, *autograd.call_or_defer(_add_rows, indices, dy, part, into=(weight,)), None


def _add_rows(indices: Array, dy: Array, part: VocabularyPart, weight: Variable) -> tuple:
    dweight, accumulate, token = weight.gradient_target()
    if not accumulate:
        dweight.fill(0)  # the kernel adds: most rows have no gradient
    kernels().embedding.backward(flat(indices), rows(dy), dweight, part.first)
    return (token,)


def embedding(values: Any, weight: "Tensor", part: VocabularyPart) -> "Tensor":
    """The rows of the whole weight that `values` name, as far as they are here, else 0: a partial sum.

    The sum of the ranks' results (..., width) is what the whole weight gives; each of its rows is bitwise one
    rank's.

    Raises what F.embedding does, and ValueError for a weight of other than part.count rows.

    Args:
        values: integers (...) of [0, part.vocab), the same on all ranks.
        weight: (part.count, width), this rank's rows, the only ones that get a gradient from here.
    """
    op = "vocabulary.embedding"
    weight = tensor(weight)
    check_floats(op, weight=weight)
    if weight.ndim != 2:
        raise ValueError(f"{op}: weight must be (rows, width), got {weight.shape}")
    _check_rows(op, "weight", weight, weight.shape[0], part)
    return VocabularyEmbedding.apply(indices(op, "indices", values, part.vocab), weight, part)


class VocabularyCrossEntropy(CrossEntropy):
    def forward(
        self,
        logits: Array,
        targets: Array,
        part: VocabularyPart,
        ignore_index: int,
        reduction: str,
        inplace: bool,
    ) -> Array:
        logits2 = rows(logits)  # (tokens, count)
        pairs = empty_exact((1, 2, len(logits2)), logits)
        _forward(logits2, flat(targets), pairs[0], part, ignore_index, part.first)
        losses, lse = _joined(pairs, flat(targets), part, ignore_index)
        count = counted(targets, ignore_index, reduction)
        self.saved = (logits, targets, part.first, lse, ignore_index, reduction, count, inplace)
        return reduced(losses, targets, reduction, count)

    def backward(self, dy: Array) -> tuple:
        return *super().backward(dy), None


@also(
    {
        "label_smoothing": (0.0, "it is not there for logits that are cut: gather_logits has them whole"),
        "weight": (None, 'weigh the losses of reduction="none"'),
    },
    input="logits",
    target="targets",
)
def cross_entropy(
    logits: "Tensor",
    targets: Any,
    part: VocabularyPart,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace: bool = False,
) -> "Tensor":
    """F.cross_entropy of the whole vocabulary, from this rank's slice of the logits.

    The rest is as in F.cross_entropy, errors too.

    Args:
        logits: (..., part.count), of the words from part.first on.
        targets: integers (...) of [0, part.vocab) or ignore_index, the same on all ranks, as is the loss.
    """
    op = "vocabulary.cross_entropy"
    logits = tensor(logits)
    check_floats(op, logits=logits)
    targets = checked(op, "logits", logits, (part.vocab,), targets, ignore_index, reduction)
    _check_rows(op, "logits", logits, logits.shape[-1], part)
    if inplace and logits.requires_grad and logits.is_leaf:
        raise ValueError(
            f"{op}: inplace=True would overwrite a leaf tensor with its gradient; pass inplace=False"
        )
    return VocabularyCrossEntropy.apply(logits, targets, part, ignore_index, reduction, inplace)


class VocabularyLinearCrossEntropy(Function):
    """With chunk 0 the logits are kept, and become their gradient; else backward makes them again.

    On a GPU too, that is in backward, not when the logits are read as in LinearCrossEntropy: the sum of all
    ranks' exponentials is known only then. Costs one more read of the rank's slice of the logits.
    """

    handles = (1,)

    def forward(
        self,
        x: Array,
        weight: Variable,
        targets: Array,
        part: VocabularyPart,
        ignore_index: int,
        reduction: str,
        chunk: int,
    ) -> Array:
        pairs = empty_exact((len(_Words(weight, part).places), 2, len(rows(x))), x)
        x, _ = operands(x, weight)
        x2, words = rows(x), _Words(weight, part)
        memory = words.memory(min(chunk or len(x2), len(x2)), computed(x))
        for some, logits in words.chunks(memory, len(x2)):
            words.multiply(x2[some], logits)
            for own, first, pair in zip(logits, words.firsts, pairs, strict=True):
                _forward(own, flat(targets)[some], pair[:, some], part, ignore_index, first)
        losses, lse = _joined(pairs, flat(targets), part, ignore_index)
        count = counted(targets, ignore_index, reduction)
        kept = () if chunk else memory
        self.saved = (x, weight, targets, part, lse, ignore_index, reduction, count, chunk, *kept)
        return reduced(losses, targets, reduction, count)

    def backward(self, dy: Array) -> tuple:
        x, weight, targets, part, lse, ignore_index, reduction, count, chunk, *kept = self.saved
        x2, words = rows(x), _Words(weight, part)
        scale = scale_of(dy, reduction, count)
        dx = empty(x.shape, words.sum_dtype(computed(x))) if self.needs[0] else None
        dweight, accumulate, token = None, False, None
        if self.needs[1] and not kept:
            dweight, accumulate, token = weight.gradient_target()
        memory = dlogits = kept or words.memory(min(chunk, len(x2)), computed(x))
        for some, logits in words.chunks(memory, len(x2)):
            if not kept:
                words.multiply(x2[some], logits)
            for own, first in zip(logits, words.firsts, strict=True):
                arrays = own, flat(targets)[some], lse[some], own, scale
                kernels().cross_entropy.backward(*arrays, ignore_index, first)
                if reduction == "none":
                    own *= flat(dy)[some][:, None]
            dlogits = [for_product(own, x) for own in logits]
            if dx is not None:
                words.add_input_gradient(dlogits, rows(dx)[some])
            if dweight is not None:
                words.add_weight_gradient(x2[some], dlogits, dweight, accumulate)
                accumulate = True
        if dweight is not None and not accumulate:
            dweight.fill(0)  # there were no rows
        if kept:
            into = (weight if self.needs[1] else None,)
            (token,) = autograd.call_or_defer(_add_weight_gradient, x, dlogits, words, into=into)
            self.saved = None  # the logits are gone: a second backward is an error
        return dx, token, None, None, None, None, None


def _add_weight_gradient(x: Array, dlogits: list[Array], words: "_Words", weight: Variable) -> tuple:
    dweight, accumulate, token = weight.gradient_target()
    words.add_weight_gradient(rows(x), dlogits, dweight, accumulate)
    return (token,)


class _Words:
    """This rank's rows of the weight, all at once or in parts, and the matmuls with them.

    places: of each part among the rows; firsts: the first word of each part.
    """

    def __init__(self, weight: Variable, part: VocabularyPart) -> None:
        self._weight, self._how = weight, getattr(weight, "in_parts", None)
        self.places = [slice(0, part.count)] if self._how is None else self._how.places
        self.firsts = [part.first + place.start for place in self.places]

    def memory(self, count: int, dtype: Any) -> list[Array]:
        """For the logits of so many rows, by part."""
        return [empty_rows(count, place.stop - place.start, dtype) for place in self.places]

    def chunks(self, memory: list[Array], count: int) -> Iterator[tuple[slice, list[Array]]]:
        """(rows, their logits by part), as _losses.chunks."""
        for some, _ in chunks(memory[0], count):
            yield some, [logits[: some.stop - some.start] for logits in memory]

    def sum_dtype(self, dtype: Any) -> Any:
        """Of the input's gradient."""
        return dtype if self._how is None else self._how.sum_dtype(dtype)

    def multiply(self, x: Array, logits: list[Array]) -> None:
        for own, place in zip(logits, self.places, strict=True):
            kernels().linear.forward(x, self._rows(place), None, own)

    def add_input_gradient(self, dlogits: list[Array], dx: Array) -> None:
        if self._how is None:
            kernels().linear.backward_input(dlogits[0], self._rows(self.places[0]), dx)
            return

        def product(number: int, out: Array) -> None:
            kernels().linear.backward_input(dlogits[number], self._rows(self.places[number]), out)

        add_neighbours(dx, len(self.places), product, computed(dlogits[0]))

    def add_weight_gradient(self, x: Array, dlogits: list[Array], dweight: Array, accumulate: bool) -> None:
        for own, place in zip(dlogits, self.places, strict=True):
            if self._how is None:
                kernels().linear.backward_weight(x, own, dweight, accumulate)
            else:
                multiplied(kernels().linear.backward_weight, (x, own), dweight[place], accumulate)

    def _rows(self, place: slice) -> Array:
        matrix = contiguous(self._weight.lent_bits())
        return matrix if self._how is None else apart(matrix[place])


def linear_cross_entropy(
    x: "Tensor",
    weight: "Tensor",
    targets: Any,
    part: VocabularyPart,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk: int = 128,
) -> "Tensor":
    """F.linear_cross_entropy of the whole vocabulary, from this rank's rows of the weight.

    The rest is as there, errors too.

    Args:
        x: (..., inputs), the same values on all ranks; its gradient is this rank's summand of a sum.
        weight: (part.count, inputs).
        targets: integers (...) of [0, part.vocab) or ignore_index, the same on all ranks, as is the loss.
        chunk: rows of logits at a time, 0 for all, as in F.linear_cross_entropy: chunk * part.count elements.
    """
    op = "vocabulary.linear_cross_entropy"
    x, weight = tensor(x), tensor(weight)
    check_floats(op, x=x, weight=weight)
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{op}: x must be (..., inputs) and weight (rows, inputs), got {x.shape} and {weight.shape}"
        )
    _check_rows(op, "weight", weight, weight.shape[0], part)
    targets = checked(op, "x", x, (part.vocab,), targets, ignore_index, reduction)
    if chunk < 0:
        raise ValueError(f"{op}: chunk must be at least 0, got {chunk}")
    return VocabularyLinearCrossEntropy.apply(x, weight, targets, part, ignore_index, reduction, chunk)


class GatherLogits(Function):
    def forward(self, logits: Array, part: VocabularyPart) -> Array:
        self.saved = (part,)
        size, own = part.communicator.size, rows(logits)
        most = rows_of(part.vocab, 0, size)[1]
        if part.count < most:
            own = empty((len(own), most), logits.dtype)
            own[:, : part.count] = rows(logits)
            own[:, part.count :] = 0
        parts = gathered(own, part.communicator, tag="logits").reshape(size, len(own), most)
        y = empty((*logits.shape[:-1], part.vocab), logits.dtype)
        for rank in range(size):
            first, count = rows_of(part.vocab, rank, size)
            rows(y)[:, first : first + count] = parts[rank, :, :count]
        return y

    def backward(self, dy: Array) -> tuple:
        (part,) = self.saved
        return dy[..., part.first : part.first + part.count].copy(), None


def gather_logits(logits: "Tensor", part: VocabularyPart) -> "Tensor":
    """(..., part.count) of each rank -> (..., part.vocab), the same on all.

    The gradient, which all ranks have, is split: each takes its slice. ValueError for another width.
    """
    op = "vocabulary.gather_logits"
    logits = tensor(logits)
    if logits.ndim == 0:
        raise ValueError(f"{op}: logits must have at least one dimension, got a scalar")
    _check_rows(op, "logits", logits, logits.shape[-1], part)
    return GatherLogits.apply(logits, part)


def _forward(
    logits: Array, targets: Array, pair: Array, part: VocabularyPart, ignore_index: int, first: int
) -> None:
    """Fill the pair (2, rows): the log of the sum of exponentials, and the target's logit.

    Both are of the words from `first` on.
    """
    lse, chosen = pair
    kernels().cross_entropy.forward_part(logits, targets, chosen, lse, ignore_index, first, part.vocab)


def _joined(pairs: Array, targets: Array, part: VocabularyPart, ignore_index: int) -> tuple[Array, Array]:
    """(losses, log of the sum of exponentials) of the whole vocabulary, bitwise identical on all ranks.

    pairs: (parts of this rank, 2, rows).
    """
    everyones = gathered(pairs, part.communicator, tag="cross_entropy")
    losses, lse = empty_like(pairs[0])
    kernels().cross_entropy.join(everyones, targets, losses, lse, ignore_index)
    return losses, lse


def _check_rows(op: str, name: str, x: Any, count: int, part: VocabularyPart) -> None:
    if count != part.count:
        raise ValueError(
            f"{op}: {name} {x.shape} should have {part.count} of {part.vocab} words, those from "
            f"{part.first} on, which rank {part.communicator.rank} of {part.communicator.size} has"
        )
