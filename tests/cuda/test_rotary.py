"""Rotary embedding: against the CPU's in float64, with vectors and without, in place."""

import numpy as np
import pytest

from shardrt.kernels.cpu import rotary as cpu
from shardrt.kernels.cuda import rotary as cuda
from tests.cuda.numbers import ELEMENTS, assert_close, dtype_of, guarded, normal

# sequences, time, half a head, heads that turn, width of the rest
CASES = [(2, 3, 16, 3, 64), (1, 5, 3, 2, 7), (2, 2, 8, 1, 0), (1, 1, 64, 5, 128), (3, 2, 4, 0, 9)]


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("function", ["forward", "backward"])
def test_it_is_the_rotation(emulated, element, case, offset, function):
    sequences, time, half, heads, rest = case
    exact = dtype_of("float64" if element == "float64" else "float32")
    angles = normal(time, half)
    with guarded(element) as array:
        cos, sin = (array(values, dtype=exact) for values in (np.cos(angles), np.sin(angles)))
        x = array(normal(sequences * time, 2 * half * heads + rest), offset)
        y = array(np.full(x.shape, np.nan), offset)
        getattr(cuda, function)(x, cos, sin, y, heads)
        expected = np.empty(x.shape)
        getattr(cpu, function)(*(a.astype(np.float64) for a in (x, cos, sin)), expected, heads)
        assert_close(y, expected)
        getattr(cuda, function)(x, cos, sin, x, heads)
        np.testing.assert_array_equal(x, y)
