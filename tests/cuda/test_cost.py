"""Kernels of the GPU read and write what those of the CPU declare, seen on the CPU.

The calls and what is asked of them are those of tests/kernels/test_cost.py.
"""

import pytest

from shardrt.kernels import cuda
from shardrt.kernels.costs import ON_GPU
from shardrt.kernels.cuda._cublaslt import _takes
from tests.kernels.test_cost import (
    NAMES,
    arguments_of,
    assert_only_writes_change,
    assert_what_is_not_read_changes_no_result,
    calls,
    of,
)

# Left out: AdamW's with results that have 16 bits there, and are rounded float32 on the CPU.
LEFT = ("adamw.step-3",)
CALLS = [(f"{name}-{i}", name, call) for name in NAMES for i, call in enumerate(calls(name, 4000))]
SAME = [pytest.param(name, call, id=which) for which, name, call in CALLS if which not in LEFT]


@pytest.fixture
def with_epilogue(emulated, monkeypatch):
    def product_with_slope(a, b, inner, out, apart):
        fits = _takes(inner, inner, out)
        if fits:
            apart(out)
        return fits

    monkeypatch.setattr(emulated, "gemm_gelu_backward", product_with_slope)


@pytest.mark.parametrize("name, call", SAME)
def test_reads_and_writes_are_those_of_the_gpu(name, call, with_epilogue):
    arguments = arguments_of(name, call)
    both = arguments, of(ON_GPU, name)(**arguments), of(cuda, name)
    assert_only_writes_change(*both)
    assert_what_is_not_read_changes_no_result(*both)
