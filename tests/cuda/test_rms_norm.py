"""RMS norm: rows kept by a warp, by a block, by nobody; against the CPU's in float64."""

import numpy as np
import pytest

from shardrt.kernels.cpu import rms_norm as cpu
from shardrt.kernels.cuda import rms_norm as cuda
from tests.cuda.numbers import ELEMENTS, assert_close, dtype_of, guarded, normal

EPS = 1e-6
SHAPES = [(1, 1), (3, 7), (9, 8), (5, 96), (11, 255), (3, 2056), (2, 2051)]
TALL = [(1, 8), (17, 40), (67, 24), (67, 5)]  # several blocks of rows, the last not full


def in_double(*arrays):
    return [array.astype(np.float64) for array in arrays]


def kept(element):
    """The type of rstd and sums."""
    return dtype_of("float64" if element == "float64" else "float32")


def exact_forward(x, weight):
    y, rstd = np.empty(x.shape), np.empty(len(x))
    cpu.forward(*in_double(x, weight), y, rstd, EPS)
    return y, rstd


def exact_backward(dy, x, weight, rstd):
    dx, dweight = np.empty(x.shape), np.empty(x.shape[1])
    cpu.backward(*in_double(dy, x, weight, rstd), dx, dweight, False)
    return dx, dweight


def inputs(array, element, shape, offset=0):
    """dy, x, weight and rstd."""
    dy, x = array(normal(*shape, seed=3), offset), array(normal(*shape), offset)
    weight = array(1 + normal(shape[1], seed=1), offset)
    return dy, x, weight, array(exact_forward(x, weight)[1], dtype=kept(element))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0, 1])
def test_forward(emulated, element, shape, offset):
    with guarded(element) as array:
        _, x, weight, _ = inputs(array, element, shape, offset)
        y, rstd = array(np.full(shape, np.nan), offset), array(np.full(shape[0], np.nan), dtype=kept(element))
        cuda.forward(x, weight, y, rstd, EPS)
        for found, exactly in zip((y, rstd), exact_forward(x, weight), strict=True):
            assert_close(found, exactly, 2)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("shape", SHAPES[1:] + TALL)
@pytest.mark.parametrize("offset", [0, 1])
def test_backward(emulated, element, shape, offset):
    with guarded(element) as array:
        given = inputs(array, element, shape, offset)
        outs = [array(np.full(size, np.nan), offset) for size in (shape, shape[1])]
        cuda.backward(*given, *outs, False)
        for found, exactly in zip(outs, exact_backward(*given), strict=True):
            assert_close(found, exactly, 2)


@pytest.mark.parametrize("element", ["bfloat16", "float16"])
@pytest.mark.parametrize("width", [40, 7, 4096])
def test_gradients_of_16_bits_are_added_in_float32(emulated, element, width):
    with guarded(element) as array:
        given = inputs(array, element, (19, width))
        before = normal(width, seed=4).astype(np.float32)
        dweight = array(before, dtype=np.float32)
        cuda.backward(*given, None, dweight, True)
        assert_close(dweight, before.astype(np.float64) + exact_backward(*given)[1], 2)


@pytest.mark.parametrize("width", [40, 2048, 7])
def test_the_gradient_may_be_written_over_that_of_the_output(emulated, width):
    with guarded("float32") as array:
        given = inputs(array, "float32", (9, width))
        expected = exact_backward(*given)
        dweight = array(np.full(width, np.nan))
        cuda.backward(*given, given[0], dweight, False)
        for found, exactly in zip((given[0], dweight), expected, strict=True):
            assert_close(found, exactly, 2)


@pytest.mark.parametrize("width", [40, 2048, 7])
def test_without_the_gradient_of_the_weight(emulated, width):
    with guarded("float32") as array:
        given = inputs(array, "float32", (9, width))
        dx = array(np.full((9, width), np.nan))
        cuda.backward(*given, dx, None, False)
        assert_close(dx, exact_backward(*given)[0], 2)
        assert len(emulated.launches) == 1


@pytest.mark.parametrize("accumulate", [False, True])
def test_no_rows_give_no_gradient(emulated, accumulate):
    none, weight, row = np.empty((0, 8), np.float32), np.ones(8, np.float32), np.empty(0, np.float32)
    dweight = np.full(8, 3, np.float32)
    cuda.forward(none, weight, none, row, EPS)
    cuda.backward(none, none, weight, row, none, dweight, accumulate)
    np.testing.assert_array_equal(dweight, 3.0 * accumulate)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(("width", "offset"), [(7, 0), (40, 0), (40, 1), (2056, 0)])
def test_of_a_sum(emulated, element, width, offset):
    with guarded(element) as array:
        x, added, dtotal, dy = (array(normal(5, width, seed=seed), offset) for seed in range(4))
        weight = array(1 + normal(width, seed=1), offset)
        total, y, dx = (array(np.full(x.shape, np.nan), offset) for _ in range(3))
        rstd = array(np.zeros(5), dtype=kept(element))
        cuda.forward(x, weight, y, rstd, EPS, added, total)
        assert_close(total, x.astype(np.float64) + added.astype(np.float64))
        for found, exactly in zip((y, rstd), exact_forward(total, weight), strict=True):
            assert_close(found, exactly, 2)
        sums = [array(np.full(width, np.nan))]
        cuda.backward(dy, total, weight, rstd, dx, *sums, False, dtotal)
        own, *expected = exact_backward(dy, total, weight, rstd)
        assert_close(dx, own + dtotal.astype(np.float64), 2)
        for found, exactly in zip(sums, expected, strict=True):
            assert_close(found, exactly, 2)
