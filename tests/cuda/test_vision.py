"""Convolution, batch norm and pooling: the CPU's numbers in float64, for every element type and geometry."""

from math import prod

import numpy as np
import pytest

from shardrt.kernels.cpu import batch_norm as cpu_batch_norm
from shardrt.kernels.cpu import conv2d as cpu_conv2d
from shardrt.kernels.cpu import pool as cpu_pool
from shardrt.kernels.cuda import batch_norm, conv2d, pool
from tests.cuda.numbers import ELEMENTS, assert_close, guarded, normal

# x, weight, stride, padding, dilation, groups
CONVOLUTIONS = [
    ((3, 3, 9, 8), (5, 3, 3, 3), (2, 1), (1, 0), (1, 2), 1),
    ((2, 4, 5, 6), (6, 2, 1, 2), (1, 2), (0, 1), (1, 1), 2),
    ((2, 3, 7, 7), (6, 1, 3, 3), (2, 2), (1, 1), (1, 1), 3),
    ((1, 2, 3, 3), (2, 2, 1, 1), (2, 2), (0, 0), (1, 1), 1),  # pixels that no window sees
]


def output_shape(x, weight, stride, padding, dilation, groups):
    sizes = [
        (x[2 + i] + 2 * padding[i] - dilation[i] * (weight[2 + i] - 1) - 1) // stride[i] + 1 for i in (0, 1)
    ]
    return (x[0], weight[0], *sizes)


def run(kernels, numbers, geometry, empty):
    x, weight, bias, dy, dweight, dbias = numbers
    y, dx = empty(dy.shape), empty(x.shape)
    kernels.forward(x, weight, bias, y, *geometry)
    kernels.backward_input(dy, weight, dx, *geometry)
    kernels.backward_weight(x, dy, dweight, True, *geometry)
    kernels.backward_bias(dy, dbias, True)
    return y, dx, dweight, dbias


@pytest.mark.parametrize("element", ELEMENTS)
def test_convolution(emulated, element, monkeypatch):
    for case in CONVOLUTIONS:
        x, weight, *geometry = case
        shapes = x, weight, weight[:1], output_shape(*case), weight, weight[:1]
        for patches in (1 << 26, 1):  # all images at once, and one at a time
            monkeypatch.setattr(conv2d, "_PATCHES", patches)
            with guarded(element) as array:
                numbers = [array(normal(*shape, seed=i), i % 2) for i, shape in enumerate(shapes)]
                exact = run(
                    cpu_conv2d,
                    [n.astype(np.float64) for n in numbers],
                    geometry,
                    lambda s: np.full(s, np.nan),
                )
                found = run(conv2d, numbers, geometry, lambda s: array(np.full(s, np.nan)))
                for one, other in zip(found, exact, strict=True):
                    # In 16 bits the sums over patches pass through memory once more.
                    assert_close(one, other, 2 + patches % 2)


@pytest.mark.parametrize("element", ["float16", "bfloat16"])
def test_gradients_of_weights_may_be_float32(emulated, element):
    x, weight, *geometry = CONVOLUTIONS[0]
    with guarded(element) as array:
        numbers = array(normal(*x)), array(normal(*output_shape(*CONVOLUTIONS[0])))
        dweight, dbias = (array(np.zeros(shape), 0, np.float32) for shape in (weight, weight[:1]))
        expected = np.zeros(weight)
        conv2d.backward_weight(*numbers, dweight, False, *geometry)
        cpu_conv2d.backward_weight(*(n.astype(np.float64) for n in numbers), expected, False, *geometry)
        assert_close(dweight, expected)
        conv2d.backward_bias(numbers[1], dbias, False)
        assert_close(dbias, numbers[1].astype(np.float64).sum((0, 2, 3)))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 2, 300), (600, 3, 1)], ids=str)
def test_batch_norm(emulated, element, shape):
    def everything(kernels, x, dy, weight, bias, empty):
        channels = shape[1]
        mean, squares, dweight, dbias = (empty(channels, True) for _ in range(4))
        y, dx = empty(shape, False), empty(shape, False)
        kernels.statistics(x, mean, squares)
        rstd = 1 / np.sqrt(squares / (x.size // channels) + 1e-5)
        rstd = rstd.astype(mean.dtype)
        kernels.forward(x, mean, rstd, weight, bias, y)
        kernels.backward_sums(dy, x, mean, rstd, dweight, dbias)
        means = [(total / (x.size // channels)).astype(mean.dtype) for total in (dweight, dbias)]
        kernels.backward_input(dy, x, mean, rstd, weight, *means, dx)
        return mean, squares, y, dweight, dbias, dx

    with guarded(element) as array:
        kind = np.float64 if element == "float64" else np.float32
        x, dy = array(normal(*shape) + 2, 1), array(normal(*shape, seed=1))
        weight, bias = (array(normal(shape[1], seed=i), 0, kind) for i in (2, 3))
        numbers = [n.astype(np.float64) for n in (x, dy, weight, bias)]
        exact = everything(cpu_batch_norm, *numbers, lambda s, _: np.full(s, np.nan))
        found = everything(
            batch_norm,
            x,
            dy,
            weight,
            bias,
            lambda s, sums: array(np.full(s, np.nan), 0, kind if sums else None),
        )
        for one, other in zip(found, exact, strict=True):
            assert_close(one, other, 4)


@pytest.mark.parametrize("element", ELEMENTS)
def test_pooling(emulated, element):
    cases = [
        ((2, 7, 6), (3, 3), (2, 2), (1, 1)),
        ((3, 5, 5), (2, 3), (1, 2), (1, 0)),
        ((1, 4, 9), (1, 2), (2, 4), (0, 0)),
    ]
    for x_shape, *geometry in cases:
        window, stride, padding = geometry
        sizes = [(x_shape[1 + i] + 2 * padding[i] - window[i]) // stride[i] + 1 for i in (0, 1)]
        shape = (x_shape[0], *sizes)
        with guarded(element) as array:
            x, dy = array(np.round(normal(*x_shape))), array(normal(*shape))
            x.reshape(-1)[prod(x_shape) // 2] = np.nan
            y, dx = array(np.full(shape, 7)), array(np.full(x_shape, 7))
            index = array(np.full(shape, -1), 0, np.int32)
            exact_y, exact_dx, exact_index = np.empty(shape), np.empty(x_shape), np.empty(shape, np.int32)
            pool.max_forward(x, y, index, *geometry)
            pool.max_backward(dy, index, dx, *geometry)
            cpu_pool.max_forward(x.astype(np.float64), exact_y, exact_index, *geometry)
            cpu_pool.max_backward(dy.astype(np.float64), exact_index, exact_dx, *geometry)
            np.testing.assert_array_equal(index, exact_index)
            assert_close(y, exact_y)
            assert_close(dx, exact_dx)
            pool.mean_forward(x, y, *geometry)
            pool.mean_backward(dy, dx, *geometry)
            cpu_pool.mean_forward(x.astype(np.float64), exact_y, *geometry)
            cpu_pool.mean_backward(dy.astype(np.float64), exact_dx, *geometry)
            assert_close(y, exact_y)
            assert_close(dx, exact_dx)
