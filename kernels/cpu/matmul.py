"""Matmul by NumPy's own OpenBLAS, bound by ctypes: it can add to `out` (beta = 1).

np.matmul cannot, and a weight gradient that is added to another needs just that: no temporary, no second
pass. Transposed and strided views are passed on as they are. Without the symbol np.matmul takes over.

Where oneDNN is installed (onednn.py) and faster (_choice.py), it computes the matmul. Operands may then be
bfloat16, as bits (uint16); sums are made in float32 in any case.
"""

import warnings
from functools import cache
from typing import Any

import numpy as np

from shardrt.kernels import onednn
from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu import _choice
from shardrt.kernels.cpu._blas import described, gemm_of
from shardrt.kernels.cpu._threads import threads
from shardrt.kernels.cpu.cast import unpack

GRAM = 512  # rows
_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112


@cost(
    "a b out?accumulate -> out",
    flops=lambda a, b: 2 * a.size * b.shape[-1],
    sizes=lambda a, b: (*a.shape[-2:-1], b.shape[-1], a.shape[-1], *a.shape[:-2]),
)
def matmul(a: Array, b: Array, out: Array, *, accumulate: bool = False) -> None:
    """Set out = a @ b, plus out if `accumulate`: 2-D, transposed or strided as it comes; 3-D, batched.

    a and b may both be uint16, the bits of bfloat16, where they are 2-D and out is float32.
    """
    _product(a, b, None, out, accumulate)


@cost("a -> out", flops=lambda a: a.size * a.shape[-2], sizes=lambda a: (*a.shape[-2:-1], *a.shape[-2:]))
def gram(a: Array, out: Array) -> None:
    """Set out = a @ a.T, 2-D, transposed or strided as a comes; 3-D, of each matrix.

    Half the flops of a matmul up to GRAM rows: NumPy calls BLAS's syrk. With more, copying one triangle to
    the other costs as much.
    """
    if a.shape[-2] <= GRAM:
        np.matmul(a, np.swapaxes(a, -1, -2), out=out)
    else:
        matmul(a, np.swapaxes(a, -1, -2), out)


def affine(a: Array, b: Array, bias: Array, out: Array) -> None:
    """Compute out (m, n) = a @ b + bias (n,) in each row, for a and b as matmul takes them."""
    _product(a, b, bias, out, False)


def _product(a: Array, b: Array, bias: Array | None, out: Array, accumulate: bool) -> None:
    if a.ndim == 2 and _choice.open_to(a, b, out, onednn.library()):
        ways = {"blas": _by_blas, "onednn": _by_onednn}
        ways[_choice.choose(ways, a, b, bias, out, accumulate)](a, b, bias, out, accumulate)
    else:
        _by_blas(a, b, bias, out, accumulate)


def _by_onednn(a: Array, b: Array, bias: Array | None, out: Array, accumulate: bool) -> None:
    onednn.product(a, b, out, bias=bias, accumulate=accumulate, threads=threads())


def _by_blas(a: Array, b: Array, bias: Array | None, out: Array, accumulate: bool) -> None:
    if a.dtype == np.uint16:
        a, b = widened(a), widened(b)
    if bias is not None:
        out[...] = bias  # the product adds to it: one pass less than adding the bias after
        accumulate = True
    if a.ndim == 2:
        gemm = gemm_of(a.dtype.char)
        if gemm is not None and min(*a.shape, *b.shape) > 1:
            plain = _plain(out)
            if plain is not None and not plain[0]:
                _call(gemm, a, b, out, plain[1], accumulate)
                return
    if accumulate:
        out += np.matmul(a, b)
    else:
        np.matmul(a, b, out=out)


def widened(bits: Array) -> Array:
    """The float32 of an array in bfloat16, as it lies."""
    if bits.ndim == 2 and bits.strides[0] == bits.itemsize and bits.shape[0] > 1:
        return widened(bits.T).T
    numbers = np.empty(bits.shape, np.float32)
    unpack(np.ascontiguousarray(bits).reshape(-1), numbers.reshape(-1), "bfloat16")
    return numbers


@cache
def ignores_place() -> bool:
    """Whether a float32 matmul sums the same wherever its operands and its result lie.

    NumPy's OpenBLAS does. Tried once in a process; a warning says so where another BLAS does not.
    """
    numbers = np.random.default_rng(0)
    for m, k, n in ((48, 65, 33), (130, 300, 70)):
        a, b = numbers.random((m, k), np.float32), numbers.random((k, n), np.float32)
        for a_here, b_here in (
            (a, b),
            (_elsewhere(a), _elsewhere(b)),
            (_elsewhere(a.T).T, _elsewhere(b.T).T),
        ):
            as_it_lies, elsewhere = np.empty((m, n), np.float32), _elsewhere(np.empty((m, n), np.float32))
            _by_blas(a_here, b_here, None, as_it_lies, False)
            _by_blas(a_here.copy("K"), b_here.copy("K"), None, elsewhere, False)
            if not np.array_equal(as_it_lies, elsewhere):
                warnings.warn(
                    f"{described()} sums in another order at other memory alignments: gradients are not "
                    "split, and parts of a split weight are copied",
                    stacklevel=2,
                )
                return False
    return True


def _elsewhere(x: Array) -> Array:
    """A copy inside of a larger matrix: at another alignment, with gaps between its rows."""
    larger = np.empty((x.shape[0] + 1, x.shape[1] + 5), x.dtype)
    inside = larger[1:, 3:-2]
    inside[...] = x
    return inside


def _call(gemm: Any, a: Array, b: Array, out: Array, ldc: int, accumulate: bool) -> None:
    (m, k), n = a.shape, b.shape[1]
    order_a, order_b = _plain(a), _plain(b)
    if order_a is None:
        a = np.ascontiguousarray(a)
        order_a = _plain(a)
    if order_b is None:
        b = np.ascontiguousarray(b)
        order_b = _plain(b)
    gemm(
        _ROW_MAJOR,
        _TRANSPOSED if order_a[0] else _PLAIN,
        _TRANSPOSED if order_b[0] else _PLAIN,
        m,
        n,
        k,
        1.0,
        a.__array_interface__["data"][0],
        order_a[1],
        b.__array_interface__["data"][0],
        order_b[1],
        1.0 if accumulate else 0.0,
        out.__array_interface__["data"][0],
        ldc,
    )


def _plain(a: Array) -> tuple[bool, int] | None:
    """(transposed, leading dimension) of a matrix that BLAS can read where it lies, else None."""
    item = a.itemsize
    (rows, columns), (down, right) = a.shape, a.strides
    if right == item and down % item == 0 and down >= columns * item:
        return False, down // item
    if down == item and right % item == 0 and right >= rows * item:
        return True, right // item
    return None
