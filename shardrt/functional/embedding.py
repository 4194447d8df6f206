"""Rows of a table by index: token and position embeddings."""

from typing import TYPE_CHECKING, Any

from shardrt import autograd, dtypes
from shardrt.autograd import Function, Variable, contiguous
from shardrt.functional import in_time
from shardrt.functional._arrays import check_floats, computed, empty, flat, kernels, rows, tensor
from shardrt.functional._arrays import indices as checked

if TYPE_CHECKING:
    from shardrt.tensor import Tensor

Array = Any


class Embedding(Function):
    __slots__ = ()
    handles = (1,)

    def forward(self, indices: Array, weight: Variable) -> Array:
        self.saved = (indices, weight)
        table = contiguous(weight.lent_bits())
        y = empty((*indices.shape, weight.shape[1]), computed(table))
        kernels().embedding.forward(flat(indices), table, rows(y))
        return y

    def backward(self, dy: Array) -> tuple:
        indices, weight = self.saved
        return None, *autograd.later(_add_rows, indices, dy, into=(weight,))


def _add_rows(indices: Array, dy: Array, weight: Variable) -> tuple:
    how = getattr(weight, "in_parts", None)
    if how is not None:  # each row is of one rank's part of the time
        table = empty(weight.shape, dtypes.exact(dy.dtype))
        table.fill(0)
        kernels().embedding.backward(flat(indices), rows(dy), table)
        return (in_time.put(weight, how.joined(table)),)

    def fill(first: int, stop: int, out: Array, accumulate: bool) -> None:
        if not accumulate:
            out.fill(0)  # the kernel adds: most rows have no gradient
        kernels().embedding.backward(flat(indices), rows(dy), out, first)

    return (weight.put_rows(fill),)


def embedding(indices: Any, weight: "Tensor") -> "Tensor":
    """The rows of weight that indices name: integers (...), or a range, and (rows, width) -> (..., width).

    Raises ValueError that names the first index outside [0, rows), TypeError if they are no integers. Indices
    that are on a GPU already are not looked at: the rows of those outside are nan.
    """
    weight = tensor(weight)
    if weight.ndim != 2:
        raise ValueError(f"embedding: weight must be (rows, width), got {weight.shape}")
    check_floats("embedding", weight=weight)
    return Embedding.apply(checked("embedding", "indices", indices, weight.shape[0]), weight)
