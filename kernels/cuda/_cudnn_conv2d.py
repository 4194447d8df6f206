"""Convolution by cuDNN: float16 and bfloat16, on tensor cores, and float32.

Arrays are described as they lie, pixels last (NCHW), which cuDNN may turn in its workspace. The number of
groups is in the shapes: channels of x over channels of weight. Sums are float32, and the same bits come out
every time.
"""

from typing import Any

import numpy as np

from shardrt.kernels.cuda._cudnn import CuDNN
from shardrt.kernels.cuda._launch import Array, vectors
from shardrt.kernels.cuda.reduce import sum_into

Pair = tuple[int, int]

_ELEMENTS = ("float16", "bfloat16", "float32")
_LARGEST = 2**31 - 1  # elements of an array, which some of cuDNN's kernels count in 32 bits
# Plans that sum in another order each time, in 16 bits, or not products of what was given.
_NEVER = ("NONDETERMINISTIC", "REDUCED_PRECISION_REDUCTION", "DOWN_CONVERT_INPUTS", "FFT", "WINOGRAD")
_NEVER_IN_FLOAT32 = (*_NEVER, "TENSOR_CORE")  # TF32: products of 11 bits


class CuDNNConv2d:
    """Convolution, and its gradients by x and by weight.

    Each does nothing and gives False if cuDNN can't. geometry: stride, padding, dilation, (vertical,
    horizontal) each.
    """

    def __init__(self, cudnn: CuDNN) -> None:
        self._cudnn = cudnn

    def forward(self, x: Array, weight: Array, y: Array, *geometry: Pair) -> bool:
        """As conv2d.forward without bias."""
        return self._run("conv_fprop", ("image", "weight"), (x, weight, y), geometry)

    def backward_input(self, dy: Array, weight: Array, dx: Array, *geometry: Pair) -> bool:
        """As conv2d.backward_input."""
        return self._run("conv_dgrad", ("loss", "filter"), (dy, weight, dx), geometry)

    def backward_weight(self, x: Array, dy: Array, dweight: Array, accumulate: bool, *geometry: Pair) -> bool:
        """As conv2d.backward_weight.

        The frontend can't add to what is there: the sum is then made beside it, in float32. Where cuDNN has
        no plan that writes float32 from 16 bits, it is rounded to 16 bits before it is added.
        """
        if not _suits(x, dy):
            return False
        exact = [np.dtype(np.float32)] if accumulate or dweight.dtype != x.dtype else []
        for kind in dict.fromkeys([*exact, x.dtype]):
            there = not accumulate and dweight.dtype == kind and vectors(dweight)
            out = dweight if there else self._cudnn.empty(dweight.shape, kind)
            if self._run("conv_wgrad", ("image", "loss"), (x, dy, out), geometry, quiet=kind != x.dtype):
                if not there:
                    sum_into(dweight.reshape(-1), [out.reshape(-1)], 1.0, accumulate)
                return True
        return False

    def _run(
        self,
        node: str,
        names: tuple[str, str],
        arrays: tuple[Array, Array, Array],
        geometry: tuple[Pair, ...],
        quiet: bool = False,
    ) -> bool:
        """The frontend's node of that name. names: its parameters for the first two arrays."""
        first, second, out = arrays
        if not _suits(first, second) or not _suits(out):
            return False
        stride, padding, dilation = map(list, geometry)

        def describe(graph: Any) -> None:
            tensors = self._cudnn.input(graph, 1, first), self._cudnn.input(graph, 2, second)
            inputs = dict(zip(names, tensors, strict=True))
            made = getattr(graph, node)(**inputs, stride=stride, padding=padding, dilation=dilation)
            self._cudnn.output(made, 3, out)

        what = f"{node} of {names[0]} {first.shape} and {names[1]} {second.shape} of {first.dtype.name}"
        return self._cudnn.run(
            (node, *geometry),
            arrays,
            describe,
            never=_NEVER_IN_FLOAT32 if first.dtype == np.float32 else _NEVER,
            refused="" if quiet else f"conv2d: cuDNN refuses {what}",
        )


def _suits(*arrays: Array) -> bool:
    """Whether cuDNN is made for these: of one type that it has, not too large, aligned to 16 bytes.

    It does not know a stride of 0, which an axis of length 1 may have.
    """
    one_type = arrays[0].dtype.name in _ELEMENTS and all(x.dtype == arrays[0].dtype for x in arrays)
    sound = one_type and all(0 < x.size <= _LARGEST and min(x.strides) > 0 for x in arrays)
    return sound and vectors(*arrays)
