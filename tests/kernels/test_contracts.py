"""Kernels of the CPU give what tests/contracts says, in float32 and float64."""

import pytest

from shardrt.kernels import cpu
from tests.contracts import check
from tests.contracts.all import CONTRACTS


@pytest.mark.parametrize("element", ["float32", "float64"])
@pytest.mark.parametrize("kernel", CONTRACTS)
def test_kernel(kernel, element):
    check(cpu, kernel, element)
