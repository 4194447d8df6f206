"""CUDA's kernels give what tests/contracts says, in the emulator or, by tests/gpu, on a GPU."""

import pytest

from shardrt.kernels import cuda
from tests.contracts import check
from tests.contracts.all import CONTRACTS
from tests.cuda.numbers import ELEMENTS


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("kernel", CONTRACTS)
def test_kernel(emulated, kernel, element):
    check(cuda, kernel, element)


@pytest.mark.parametrize("kernel", ["conv2d.forward", "conv2d.backward_input", "conv2d.backward_weight"])
def test_convolution_of_one_image_at_a_time(emulated, monkeypatch, kernel):
    monkeypatch.setattr(cuda.conv2d, "_PATCHES", 1)
    for element in ELEMENTS:
        check(cuda, kernel, element)


def test_sums_of_many_parts_go_in_chunks(emulated, monkeypatch):
    monkeypatch.setattr(cuda.reduce, "_CHUNK", 64)
    check(cuda, "reduce.sum_into", "float32")
