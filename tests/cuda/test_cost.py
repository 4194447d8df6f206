"""Kernels of the GPU read and write what those of the CPU declare, seen on the CPU.

The calls and what is asked of them are those of tests/kernels/test_cost.py.
"""

import pytest

from shardrt.kernels import cuda
from shardrt.kernels.costs import ON_GPU
from shardrt.kernels.cuda._cublaslt import _takes
from tests.kernels.calls import CASES, Arrays
from tests.kernels.test_cost import (
    assert_only_writes_change,
    assert_what_is_not_read_changes_no_result,
    of,
)

# Left out: one whose results have 16 bits there, and are rounded float32 on the CPU; most of attention.
LEFT = (
    "adamw.step-2",
    *(f"attention.{which}-{i}" for which in ("forward", "backward") for i in (0, 1, 3, 4)),
)
CALLS = [(f"{name}-{i}", name, case) for name in CASES for i, case in enumerate(CASES[name])]
SAME = [pytest.param(name, case, id=which) for which, name, case in CALLS if which not in LEFT]


@pytest.fixture
def with_epilogue(emulated, monkeypatch):
    def product_with_slope(a, b, inner, out, apart):
        fits = _takes(inner, inner, out)
        if fits:
            apart(out)
        return fits

    monkeypatch.setattr(emulated, "gemm_gelu_backward", product_with_slope)


@pytest.mark.parametrize("name, case", SAME)
def test_reads_and_writes_are_those_of_the_gpu(name, case, with_epilogue):
    arguments = case(Arrays())
    call = arguments, of(ON_GPU, name)(**arguments), of(cuda, name)
    assert_only_writes_change(*call)
    assert_what_is_not_read_changes_no_result(*call)
