"""Layer norm: rows kept by a warp, by a block, by nobody; against the CPU's in float64."""

import numpy as np
import pytest

from shardrt.kernels.cpu import layer_norm as cpu
from shardrt.kernels.cuda import _rows
from shardrt.kernels.cuda import layer_norm as cuda
from tests.cuda.numbers import ELEMENTS, assert_close, dtype_of, guarded, normal

EPS = 1e-5
SHAPES = [(1, 1), (3, 7), (9, 8), (5, 96), (11, 255), (3, 2056), (2, 2051)]
TALL = [(1, 8), (17, 40), (67, 24), (67, 5)]  # several blocks of rows, the last not full


def in_double(*arrays):
    return [array.astype(np.float64) for array in arrays]


def kept(element):
    """The type of mean, rstd and sums."""
    return dtype_of("float64" if element == "float64" else "float32")


def parameters(array, width, offset=0):
    return array(1 + normal(width, seed=1), offset), array(normal(width, seed=2), offset)


def exact_forward(x, weight, bias):
    y, mean, rstd = np.empty(x.shape), np.empty(len(x)), np.empty(len(x))
    cpu.forward(*in_double(x, weight, bias), y, mean, rstd, EPS)
    return y, mean, rstd


def exact_backward(dy, x, weight, mean, rstd):
    dx, dweight, dbias = np.empty(x.shape), np.empty(x.shape[1]), np.empty(x.shape[1])
    cpu.backward(*in_double(dy, x, weight, mean, rstd), dx, dweight, dbias, False)
    return dx, dweight, dbias


def statistics(array, x, weight, bias, element):
    return [array(values, dtype=kept(element)) for values in exact_forward(x, weight, bias)[1:]]


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0, 1])
def test_forward(emulated, element, shape, offset):
    with guarded(element) as array:
        x, (weight, bias) = array(2 + normal(*shape), offset), parameters(array, shape[1], offset)
        y = array(np.full(shape, np.nan), offset)
        mean, rstd = (array(np.full(shape[0], np.nan), dtype=kept(element)) for _ in range(2))
        cuda.forward(x, weight, bias, y, mean, rstd, EPS)
        expected = exact_forward(x, weight, bias)
        for found, exactly in zip((y, mean, rstd), expected, strict=True):
            assert_close(found, exactly, 2)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("width", [7, 40, 2056])
def test_without_bias(emulated, element, width):
    with guarded(element) as array:
        x, (weight, _) = array(normal(3, width)), parameters(array, width)
        y = array(np.full(x.shape, np.nan))
        mean, rstd = (array(np.zeros(3), dtype=kept(element)) for _ in range(2))
        cuda.forward(x, weight, None, y, mean, rstd, EPS)
        assert_close(y, exact_forward(x, weight, np.zeros(width))[0], 2)


@pytest.mark.parametrize("width", [8, 1000, 1001, 2048])
def test_a_large_mean_costs_no_precision_of_the_deviation(emulated, width):
    with guarded("float32") as array:
        x, (weight, bias) = array(1000 + normal(2, width)), parameters(array, width)
        y = array(np.full(x.shape, np.nan))
        mean, rstd = array(np.zeros(2)), array(np.zeros(2))
        cuda.forward(x, weight, bias, y, mean, rstd, EPS)
        assert_close(rstd, exact_forward(x, weight, bias)[2], 2)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("shape", SHAPES[1:] + TALL)
@pytest.mark.parametrize("offset", [0, 1])
def test_backward(emulated, element, shape, offset):
    with guarded(element) as array:
        dy, x = array(normal(*shape, seed=3), offset), array(normal(*shape), offset)
        weight, bias = parameters(array, shape[1], offset)
        mean, rstd = statistics(array, x, weight, bias, element)
        outs = [array(np.full(size, np.nan), offset) for size in (shape, shape[1], shape[1])]
        cuda.backward(dy, x, weight, mean, rstd, *outs, False)
        for found, exactly in zip(outs, exact_backward(dy, x, weight, mean, rstd), strict=True):
            assert_close(found, exactly, 2)


@pytest.mark.parametrize(
    ("element", "width", "offset", "form"),
    [
        ("bfloat16", 2048, 0, "1"),
        ("bfloat16", 2056, 0, "2"),
        ("bfloat16", 4096, 1, "any"),
        ("float32", 1024, 0, "1"),
        ("float32", 4096, 0, "2"),
        ("float32", 4100, 0, "any"),
        ("float64", 514, 0, "2"),
    ],
)
def test_backward_takes_the_form_for_its_width(emulated, element, width, offset, form):
    with guarded(element) as array:
        dy, x = array(normal(3, width, seed=3), offset), array(normal(3, width), offset)
        weight, bias = parameters(array, width, offset)
        mean, rstd = statistics(array, x, weight, bias, element)
        outs = [array(np.full(size, np.nan), offset) for size in ((3, width), width, width)]
        cuda.backward(dy, x, weight, mean, rstd, *outs, False)
        assert emulated.launches[0] == f"backward_{form}"
        for found, exactly in zip(outs, exact_backward(dy, x, weight, mean, rstd), strict=True):
            assert_close(found, exactly, 2)


@pytest.mark.parametrize("element", ["bfloat16", "float16"])
@pytest.mark.parametrize("width", [40, 7])
def test_gradients_of_16_bits_are_added_in_float32(emulated, element, width):
    with guarded(element) as array:
        dy, x = array(normal(67, width, seed=3)), array(normal(67, width))
        weight, bias = parameters(array, width)
        mean, rstd = statistics(array, x, weight, bias, element)
        before = [normal(width, seed=seed).astype(np.float32) for seed in (4, 5)]
        found = [array(values, dtype=np.float32) for values in before]
        cuda.backward(dy, x, weight, mean, rstd, None, *found, True)
        expected = exact_backward(dy, x, weight, mean, rstd)[1:]
        for sums, start, exactly in zip(found, before, expected, strict=True):
            assert_close(sums, start.astype(np.float64) + exactly, 2)


@pytest.mark.parametrize("width", [40, 2048, 7])
@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_is_wanted_is_made(emulated, width, wanted):
    with guarded("float32") as array:
        dy, x = array(normal(9, width, seed=3)), array(normal(9, width))
        weight, bias = parameters(array, width)
        mean, rstd = statistics(array, x, weight, bias, "float32")
        shapes = (9, width), (width,), (width,)
        outs = [array(np.full(s, np.nan)) if w else None for s, w in zip(shapes, wanted, strict=True)]
        cuda.backward(dy, x, weight, mean, rstd, *outs, False)
        for found, exactly in zip(outs, exact_backward(dy, x, weight, mean, rstd), strict=True):
            if found is not None:
                assert_close(found, exactly, 2)


@pytest.mark.parametrize("width", [40, 2048, 7])
def test_the_gradient_may_be_written_over_that_of_the_output(emulated, width):
    with guarded("float32") as array:
        dy, x = array(normal(9, width, seed=3)), array(normal(9, width))
        weight, bias = parameters(array, width)
        mean, rstd = statistics(array, x, weight, bias, "float32")
        expected = exact_backward(dy, x, weight, mean, rstd)
        outs = [dy, array(np.full(width, np.nan)), array(np.full(width, np.nan))]
        cuda.backward(dy, x, weight, mean, rstd, *outs, False)
        for found, exactly in zip(outs, expected, strict=True):
            assert_close(found, exactly, 2)


@pytest.mark.parametrize("width", [8, 5])
def test_blocks_may_have_any_number_of_rows(emulated, width, monkeypatch):
    monkeypatch.setattr(_rows, "_BLOCKS", 4)  # of 25 rows, though some are loaded at once
    with guarded("float32") as array:
        dy, x = array(normal(97, width, seed=3)), array(normal(97, width))
        weight, bias = parameters(array, width)
        mean, rstd = statistics(array, x, weight, bias, "float32")
        outs = [array(np.full(size, np.nan)) for size in (x.shape, width, width)]
        cuda.backward(dy, x, weight, mean, rstd, *outs, False)
        for found, exactly in zip(outs, exact_backward(dy, x, weight, mean, rstd), strict=True):
            assert_close(found, exactly, 2)


def test_sums_do_not_depend_on_the_gpu(emulated):
    with guarded("float32") as array:
        dy, x = array(normal(67, 24, seed=3)), array(normal(67, 24))
        weight, bias = parameters(array, 24)
        mean, rstd = statistics(array, x, weight, bias, "float32")
        found = []
        for emulated.multiprocessors in (2, 132):
            outs = [array(np.full(24, np.nan)) for _ in range(2)]
            cuda.backward(dy, x, weight, mean, rstd, None, *outs, False)
            found.append(np.stack(outs))
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("accumulate", [False, True])
def test_no_rows_give_no_gradient(emulated, accumulate):
    none, weight, row = np.empty((0, 8), np.float32), np.ones(8, np.float32), np.empty(0, np.float32)
    dweight, dbias = np.full(8, 3, np.float32), np.full(8, 3, np.float32)
    cuda.forward(none, weight, weight, none, row, row, EPS)
    cuda.backward(none, none, weight, row, row, none, dweight, dbias, accumulate)
    np.testing.assert_array_equal(dweight, 3.0 * accumulate)
    np.testing.assert_array_equal(dbias, 3.0 * accumulate)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(("width", "offset"), [(7, 0), (40, 0), (40, 1), (2056, 0)])
def test_of_a_sum(emulated, element, width, offset):
    with guarded(element) as array:
        x, added, dtotal, dy = (array(normal(5, width, seed=seed), offset) for seed in range(4))
        weight, bias = parameters(array, width, offset)
        total, y, dx = (array(np.full(x.shape, np.nan), offset) for _ in range(3))
        mean, rstd = (array(np.zeros(5), dtype=kept(element)) for _ in range(2))
        cuda.forward(x, weight, bias, y, mean, rstd, EPS, added, total)
        assert_close(total, x.astype(np.float64) + added.astype(np.float64))
        for found, exactly in zip((y, mean, rstd), exact_forward(total, weight, bias), strict=True):
            assert_close(found, exactly, 2)
        sums = [array(np.full(width, np.nan)) for _ in range(2)]
        cuda.backward(dy, total, weight, mean, rstd, dx, *sums, False, dtotal)
        own, *expected = exact_backward(dy, total, weight, mean, rstd)
        assert_close(dx, own + dtotal.astype(np.float64), 2)
        for found, exactly in zip(sums, expected, strict=True):
            assert_close(found, exactly, 2)
