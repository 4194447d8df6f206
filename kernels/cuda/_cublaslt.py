"""Matmuls by cublasLt, bound by ctypes.

CuPy does not wrap cublasLt, and its own cuBLAS calls refuse a stream that is being captured.
A matmul is described once per shape, layout and alignment (_cublaslt_plan.py). Its algorithm
is measured, and kept on disk (_algorithms.py); with deterministic algorithms it is the first one.
"""

import ctypes

from shardrt.kernels import determinism
from shardrt.kernels.cuda._algorithms import APART, Chooser, Kept
from shardrt.kernels.cuda._cublaslt_plan import (
    BIAS,
    ELEMENTS,
    GELU,
    GELU_BIAS,
    PLAIN,
    SLOPE,
    SUMS,
    Library,
    Matrix,
    NoSuchProduct,
    Plan,
    What,
    alignment,
)
from shardrt.kernels.cuda._launch import Apart, Array, Stage, address

VARIED = 4096  # plans that are kept of products whose sizes change from call to call; a few kB each
_MULTIPLE = 8  # of the leading dimension of what goes into GELU


class CublasLt:
    """The library, and a plan for every kind of matmul met so far; for all threads of the process."""

    def __init__(self, library: ctypes.CDLL, stage: Stage) -> None:
        self._library = Library(library)
        self._stage = stage
        self._plans: dict[tuple, Plan | None] = {}  # None: there is no such product
        self._varied: dict[tuple, Plan | None] = {}  # those of sizes that come and go, VARIED at most
        self._chooser = Chooser(Kept(lambda: (stage.gpu, self._library.version)))

    def gemm(
        self,
        a: Array,
        b: Array,
        out: Array,
        *,
        accumulate: bool,
        bias: Array | None = None,
        varied: bool = False,
    ) -> None:
        """Compute out = a b (+ bias along the last axis) (+ out); 2-D, or 3-D as a batch.

        a and b may be transposed or strided, the last axis of out is dense. Sums are made in float32, or
        float64; out and bias may have a type of their own. varied: by the first candidate, which is not
        measured next to others. Raises ValueError for strides it can't read.
        """
        kind = PLAIN if bias is None else BIAS
        if not self._multiply(kind, a, b, out, accumulate, bias, None, None, varied):
            raise NoSuchProduct("cublasLt: none of the algorithms that it proposed can compute this matmul")

    def gemm_gelu(
        self, a: Array, b: Array, bias: Array | None, inner: Array, out: Array, apart: Apart
    ) -> bool:
        """Set inner = a b (+ bias along the last axis), out = GELU of it, the tanh form; 2-D and dense.

        False, with nothing done, where cublasLt has no such product, or apart(out), which does the same with
        other products and kernels, took less time when both were measured. So for the next two.
        """
        kind = GELU if bias is None else GELU_BIAS
        if not _takes(inner, inner, out, bias):
            return False
        return self._multiply(kind, a, b, out, False, bias, inner, apart)

    def gemm_gelu_backward(self, a: Array, b: Array, inner: Array, out: Array, apart: Apart) -> bool:
        """Compute out = a b times GELU's slope at `inner`, of the shape and type of out; 2-D and dense."""
        return _takes(inner, inner, out) and self._multiply(SLOPE, a, b, out, False, None, inner, apart)

    def gemm_sums(
        self, a: Array, b: Array, out: Array, sums: Array, *, accumulate: bool, apart: Apart
    ) -> bool:
        """Compute out = a b (+ out), and sums = a summed over its last axis; 2-D, the first axis of a dense.

        sums: of the type of out. They are written in any case.
        """
        return _takes(None, sums) and self._multiply(SUMS, a, b, out, accumulate, sums, None, apart)

    def gemm_float8(
        self,
        a: Array,
        b: Array,
        out: Array,
        kinds: tuple[str, str],
        scales: tuple[Array, Array],
        *,
        accumulate: bool,
        bias: Array | None,
        fast: bool,
    ) -> None:
        """Set out = a b (+ bias along the last axis) (+ out), a and b scaled; 2-D, from Hopper on.

        a, b: uint8, the bits of `kinds`, dense along the inner dimension; all sizes are multiples of 16. out:
        float32, bfloat16 or float16; bias of its type, bfloat16 for float32. scales: float32, on the GPU,
        read when the product runs. fast: sums do not go over into float32 every few products. Raises
        NoSuchProduct for what cublasLt does not compute.
        """
        kind, float8 = PLAIN if bias is None else BIAS, (*kinds, *scales, fast)
        if not self._multiply(kind, a, b, out, accumulate, bias, None, None, float8=float8):
            raise NoSuchProduct("cublasLt: none of its algorithms can compute this float8 matmul")

    def _multiply(
        self,
        kind: int,
        a: Array,
        b: Array,
        out: Array,
        accumulate: bool,
        vector: Array | None,
        matrix: Array | None,
        apart: Apart | None,
        varied: bool = False,
        float8: tuple | None = None,
    ) -> bool:
        """False, with nothing done, if it is better done apart, or cublasLt can't do it.

        float8: the types of a and b, their scales, and whether sums are fast.
        """
        at_a, at_b, at_out = address(a), address(b), address(out)
        at_vector = 0 if vector is None else address(vector)
        at_matrix = 0 if matrix is None else address(matrix)
        key = (
            *(kind, accumulate, a.dtype.num, b.dtype.num, out.dtype.num),
            *(a.shape, a.strides, b.shape, b.strides, out.shape, out.strides),
            # what of the addresses a plan depends on: the lowest bit that is set, if it is below 16, or 256
            *(at_a & -at_a & 15, at_b & -at_b & 15, at_out & -at_out & 15),
            *(at_vector & -at_vector & 255, at_matrix & -at_matrix & 255),
            None if vector is None else vector.dtype.num,
        )
        places = at_b, at_a, at_out, at_vector, at_matrix
        if float8 is not None:
            first, second, of_a, of_b, fast = float8
            key = (*key, first, second, fast)
            places = (*places, address(of_b), address(of_a))
        plans = self._varied if varied else self._plans
        try:
            plan = plans[key]
        except KeyError:
            plan = self._plan(key, (a, b, out, vector, matrix), places, optional=apart is not None)
            if len(plans) >= VARIED and varied:
                plans.clear()  # threads that run one of them hold it
            plan = plans.setdefault(key, plan)  # of two threads that make it, one's
        if plan is None:
            return False
        if varied or determinism.are_deterministic_algorithms_enabled():
            return plan.run_first(self._stage, places)
        if plan.choice is None:
            self._choose(plan, places, out, apart)
        if plan.choice is APART:
            return False
        return plan.run_chosen(self._stage, places)

    def _plan(self, key: tuple, operands: tuple, places: tuple[int, ...], *, optional: bool) -> Plan | None:
        """None where cublasLt has no such product and it is optional; else it raises NoSuchProduct."""
        a, b, out, vector, matrix = operands
        of_a, of_b, fast = key[-3:] if len(places) > 5 else (None, None, None)
        first, second, result = Matrix.of(b, of_b), Matrix.of(a, of_a), Matrix.of(out)
        if first is None or second is None or result is None or result.transposed:
            strides = (a.strides, b.strides, out.strides)
            raise ValueError(
                "gemm: a and b must have a contiguous axis, out a contiguous last axis; got strides "
                f"{strides}"
            )
        kind, accumulate = key[:2]
        batch = out.shape[0] if out.ndim == 3 else 1
        beside = None if vector is None else (ELEMENTS[vector.dtype.name], alignment(places[3]))
        inner = None if matrix is None else (matrix.shape[-1], alignment(places[4]))
        what = What(kind, first, second, result, batch, accumulate, beside, inner, fast)
        try:
            plan = Plan(self._library, what, places)
        except NoSuchProduct:
            if not optional:
                raise
            plan = None
        return plan

    def _choose(self, plan: Plan, places: tuple[int, ...], out: Array, apart: Apart | None) -> None:
        """Settle what computes such products; not yet if that can't be measured now.

        They write `out` itself, which is written again afterwards, except where they would add to it.
        """
        target = self._stage.empty(out.shape, out.dtype) if plan.what.accumulate else out
        twin, result = Matrix.of(target), plan.what.result
        if twin.leading != result.leading or twin.alignment < result.alignment:
            plan.settle(plan.candidates[0])  # not to be measured on anything but a twin of out
            return
        there = (*places[:2], address(target), *places[3:])
        choice = self._chooser.choose(
            plan,
            lambda algorithm: plan.run(self._stage, algorithm, there),
            None if apart is None else lambda: apart(target),
            self._stage.seconds,
        )
        if choice is not None:
            plan.settle(choice)


def _takes(inner: Array | None, *arrays: Array | None) -> bool:
    """Whether epilogues take what goes into GELU, if that is there, and arrays at these addresses."""
    if inner is not None and inner.shape[-1] % _MULTIPLE:
        return False
    return not any(address(array) % 16 for array in arrays if array is not None)
