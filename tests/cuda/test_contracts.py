"""CUDA's kernels give what tests/contracts says, in the emulator or, by tests/gpu, on a GPU."""

import pytest

from shardrt.kernels import cuda
from tests.contracts import check
from tests.contracts.all import CONTRACTS
from tests.cuda.numbers import ELEMENTS

# Where float16 shows what bfloat16 does not: numbers that overflow, and casts. Else they have the same code.
HALF = ("activation", "elementwise", "philox", "reduce", "softmax", "swiglu")
CASES = [(kernel, element) for element in ELEMENTS for kernel in CONTRACTS]
REST = [case for case in CASES if case[1] == "float16" and case[0].partition(".")[0] not in HALF]


@pytest.mark.parametrize(
    "kernel, element", [pytest.param(*case, marks=pytest.mark.rest if case in REST else ()) for case in CASES]
)
def test_kernel(emulated, kernel, element):
    check(cuda, kernel, element)


@pytest.mark.parametrize("kernel", ["conv2d.forward", "conv2d.backward_input", "conv2d.backward_weight"])
def test_convolution_of_one_image_at_a_time(emulated, monkeypatch, kernel):
    monkeypatch.setattr(cuda.conv2d, "_PATCHES", 1)
    for element in ("float32", "bfloat16"):
        check(cuda, kernel, element)


def test_sums_of_many_parts_go_in_chunks(emulated, monkeypatch):
    monkeypatch.setattr(cuda.reduce, "_CHUNK", 64)
    check(cuda, "reduce.sum_into", "float32")
