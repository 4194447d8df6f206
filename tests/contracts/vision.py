"""Contracts of convolution and pooling."""

import numpy as np

from tests.contracts import Call, Out, contract
from tests.cuda.numbers import normal

# x, weight, stride, padding, dilation, groups
CONVOLUTIONS = [
    ((3, 3, 9, 8), (5, 3, 3, 3), (2, 1), (1, 0), (1, 2), 1),
    ((2, 4, 5, 6), (6, 2, 1, 2), (1, 2), (0, 1), (1, 1), 2),
    ((2, 3, 7, 7), (6, 1, 3, 3), (2, 2), (1, 1), (1, 1), 3),
    ((1, 2, 3, 3), (2, 2, 1, 1), (2, 2), (0, 0), (1, 1), 1),  # pixels that no window sees
]
# x, window, stride, padding
POOLS = [
    ((2, 7, 6), (3, 3), (2, 2), (1, 1)),
    ((3, 5, 5), (2, 3), (1, 2), (1, 0)),
    ((1, 4, 9), (1, 2), (2, 4), (0, 0)),
]


def outputs(sizes, window, stride, padding, dilation=(1, 1)):
    """How many windows fit, down and across."""
    return tuple(
        (sizes[i] + 2 * padding[i] - dilation[i] * (window[i] - 1) - 1) // stride[i] + 1 for i in (0, 1)
    )


def output_shape(x, weight, stride, padding, dilation, groups):
    return x[0], weight[0], *outputs(x[2:], weight[2:], stride, padding, dilation)


def pixels(sizes, window, stride, padding, dilation=(1, 1)):
    """Indices of the padded pixels that windows see: two arrays that broadcast to (*window, *outputs)."""
    down, across = (
        dilation[i] * np.arange(window[i])[:, None] + stride[i] * np.arange(count)
        for i, count in enumerate(outputs(sizes, window, stride, padding, dilation))
    )
    return down[:, None, :, None], across[None, :, None, :]


def padded(x, padding, value=0.0):
    around = [(0, 0)] * (x.ndim - 2) + [(p, p) for p in padding]
    return np.pad(x, around, constant_values=value)


def onto_pixels(windows, sizes, padding, at):
    """The sum of what windows give to each pixel."""
    x = padded(np.zeros((*windows.shape[:-4], *sizes)), padding)
    np.add.at(x, (..., *at), windows)
    return x[..., padding[0] : padding[0] + sizes[0], padding[1] : padding[1] + sizes[1]]


def in_groups(array, groups, axis):
    shape = array.shape
    return array.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])


def convolution(case):
    """The truths of forward, backward_input and backward_weight."""
    x_shape, weight_shape, stride, padding, dilation, groups = case
    how = x_shape[2:], weight_shape[2:], stride, padding, dilation

    def windows(x):
        return in_groups(padded(x, padding)[(..., *pixels(*how))], groups, 1)

    def forward(x, weight, bias=None):
        y = np.einsum("ngcijhw,gocij->ngohw", windows(x), in_groups(weight, groups, 0))
        y = y.reshape(len(x), len(weight), *y.shape[3:])
        return y if bias is None else y + bias[:, None, None]

    def backward_input(dy, weight):
        given = np.einsum("ngohw,gocij->ngcijhw", in_groups(dy, groups, 1), in_groups(weight, groups, 0))
        given = given.reshape(len(dy), x_shape[1], *given.shape[3:])
        return onto_pixels(given, x_shape[2:], padding, pixels(*how))

    def backward_weight(x, dy, before=0.0):
        own = np.einsum("ngcijhw,ngohw->gocij", windows(x), in_groups(dy, groups, 1))
        return own.reshape(weight_shape) + before

    return forward, backward_input, backward_weight


def operands(case):
    """x, weight, bias, dy, geometry."""
    x, weight, *geometry = case
    shapes = x, weight, weight[:1], output_shape(*case)
    arrays = (normal(*shape, seed=i) for i, shape in enumerate(shapes))
    return *arrays, geometry


def forward(case):
    x, weight, bias, _, geometry = operands(case)
    for shift in (bias, None):
        yield Call((x, weight, shift, Out(), *geometry), convolution(case)[0], factor=3)


def backward_input(case):
    _, weight, _, dy, geometry = operands(case)
    yield Call((dy, weight, Out(), *geometry), convolution(case)[1], factor=3)


def backward_weight(case):
    x, weight, _, dy, geometry = operands(case)
    for begins in (None, normal(*weight.shape, seed=4)):
        for wide in (False, True):
            args = x, dy, Out(begins, wide), begins is not None, *geometry
            yield Call(args, convolution(case)[2], factor=3)


def backward_bias(case):
    *_, bias, dy, _ = operands(case)
    for begins in (None, bias):
        for wide in (False, True):
            yield Call((dy, Out(begins, wide), begins is not None), sum_of_planes)


def sum_of_planes(dy, before=0.0):
    return dy.sum((0, 2, 3)) + before


CALLS = {
    "conv2d.forward": forward,
    "conv2d.backward_input": backward_input,
    "conv2d.backward_weight": backward_weight,
    "conv2d.backward_bias": backward_bias,
}


@contract(*CALLS)
def convolutions(kernel):
    for case in CONVOLUTIONS:
        yield from CALLS[kernel](case)


def pools():
    """(x with equal numbers and nan, dy, geometry)."""
    for shape, *geometry in POOLS:
        x = np.round(normal(*shape))
        x.reshape(-1)[x.size // 2] = np.nan
        yield x, normal(shape[0], *outputs(shape[1:], *geometry)), geometry


def largest(x, window, stride, padding):
    """The largest of each window, nan if one is, and where in its plane the first such pixel is."""
    at = pixels(x.shape[1:], window, stride, padding)
    seen = padded(x, padding, -np.inf)[(..., *at)]
    seen = seen.reshape(len(x), -1, *seen.shape[3:])
    best = np.argmax(seen, 1)[:, None]  # the first, or the first nan
    places = (at[0] - padding[0]) * x.shape[2] + at[1] - padding[1]
    places = np.broadcast_to(places.reshape(1, -1, *places.shape[2:]), seen.shape)
    values, index = (np.take_along_axis(array, best, 1)[:, 0] for array in (seen, places))
    return values, index.astype(np.int32)


@contract("pool.max_forward")
def max_forward():
    for x, _, geometry in pools():
        yield Call((x, Out(), Out(), *geometry), lambda x, how=geometry: largest(x, *how))


@contract("pool.max_backward")
def max_backward():
    for x, dy, geometry in pools():

        def gradient(dy, index, shape=x.shape):
            dx = np.zeros((shape[0], shape[1] * shape[2]))
            np.add.at(dx, (np.arange(shape[0])[:, None, None], index), dy)
            return dx.reshape(shape)

        yield Call((dy, largest(x, *geometry)[1], Out(), *geometry), gradient)


@contract("pool.mean_forward")
def mean_forward():
    for x, _, geometry in pools():
        at = pixels(x.shape[1:], *geometry)
        yield Call(
            (x, Out(), *geometry),
            lambda x, at=at, padding=geometry[2]: padded(x, padding)[(..., *at)].mean((1, 2)),
        )


@contract("pool.mean_backward")
def mean_backward():
    for x, dy, geometry in pools():

        def gradient(dy, sizes=x.shape[1:], how=geometry):
            window, _, padding = how
            given = np.broadcast_to(dy[:, None, None] / np.prod(window), (len(dy), *window, *dy.shape[1:]))
            return onto_pixels(given, sizes, padding, pixels(sizes, *how))

        yield Call((dy, Out(), *geometry), gradient)
