"""kernels/shape tells the truth about kernels of the GPU as well: what they read and write, seen on the CPU.

The calls and what is asked of them are those of tests/kernels/test_shape.py.
"""

import pytest

from shardrt.kernels.cuda import _launch
from shardrt.kernels.cuda._cublaslt import _takes
from tests.kernels import test_shape

# Its results are of 16 bits there, and on the CPU rounded float32.
CALLS = [call for call in test_shape.CALLS if call.id != "adamw.step-2"]


@pytest.fixture
def on_the_gpu(emulated, monkeypatch):
    def of(name, cost):
        return test_shape.of("cuda", name)

    def product_with_slope(a, b, inner, out, apart):
        fits = _takes(inner, inner, out)
        if fits:
            apart(out)
        return fits

    monkeypatch.setattr(test_shape, "on_the_cpu", of)
    monkeypatch.setattr(_launch.backend(), "gemm_gelu_backward", product_with_slope)


@pytest.mark.parametrize("name, case", CALLS)
def test_only_what_is_in_writes_changes_and_nothing_but_reads_changes_a_result(name, case, on_the_gpu):
    test_shape.test_only_what_is_in_writes_changes(name, case)
    test_shape.test_what_is_not_in_reads_changes_no_result(name, case)
