"""Batch norm and pooling of images. Memory-bound."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from bench.kernels import plain
from bench.kernels.case import Case, Maker, gradient, needs, shape_of, value
from shardrt import device as devices
from shardrt.kernels.costs import ON_GPU as costs


def batch_norm(make: Maker) -> Iterator[Case]:
    """By the statistics of the batch, which forward makes first."""
    module, shape = make.kernels.batch_norm, (*make.sizes.planes, make.sizes.side, make.sizes.side)
    x, dy, y = make.numbers(*shape), make.numbers(*shape, seed=1), make.blank(*shape)
    weight, bias = make.numbers(shape[1], seed=2), make.numbers(shape[1], seed=3)
    mean, squares, dweight, dbias = (make.exact(shape[1]) for _ in range(4))
    planes, upper, out = (array.reshape(*shape[:2], -1) for array in (x, dy, y))
    count = x.size // shape[1]

    def deviation():
        return 1 / np.sqrt(squares / count + plain.EPS)

    def forward():
        module.statistics(planes, mean, squares)
        module.forward(planes, mean, deviation(), weight, bias, out)

    def backward():
        rstd = deviation()
        module.backward_sums(upper, planes, mean, rstd, dweight, dbias)
        module.backward_input(upper, planes, mean, rstd, weight, dweight / count, dbias / count, out)

    def function(torch, x, weight, bias):
        return torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True, eps=plain.EPS)

    cost, rest = costs.batch_norm, (mean, mean, weight, dweight, dbias, out)
    first = cost.statistics(planes, mean, squares), cost.forward(planes, mean, mean, weight, bias, out)
    second = cost.backward_sums(upper, planes, mean, mean, dweight, dbias)
    back = second, cost.backward_input(upper, planes, *rest)
    yield Case(
        *("batch_norm", "forward", shape_of(*shape), *needs(*first), forward),
        results=(y,),
        inputs=(x, weight, bias),
        plain=plain.batch_norm,
        peer=value(function),
    )
    forward()
    yield Case(
        *("batch_norm", "backward", shape_of(*shape), *needs(*back), backward),
        results=(y, dweight, dbias),
        inputs=(dy, x, weight, bias),
        plain=plain.batch_norm_backward,
        peer=gradient(function),
    )


def max_pool(make: Maker) -> Iterator[Case]:
    """Of ResNet: 3 x 3, stride 2."""
    return _pool(make, "max")


def mean_pool(make: Maker) -> Iterator[Case]:
    return _pool(make, "mean")


def _pool(make: Maker, kind: str) -> Iterator[Case]:
    module, shape = make.kernels.pool, (*make.sizes.planes, make.sizes.side, make.sizes.side)
    how = {"window": 3, "stride": 2, "padding": 1}
    small = *shape[:2], *((shape[2] - 1) // 2 + 1,) * 2
    x, dy, y, dx = make.numbers(*shape), make.numbers(*small, seed=1), make.blank(*small), make.blank(*shape)
    index = devices.current().empty(small, np.int32)
    *arrays, where = (array.reshape(-1, *array.shape[2:]) for array in (x, dy, y, dx, index))
    window = [(number, number) for number in how.values()]
    found = [where] if kind == "max" else []
    given, back = (arrays[0], arrays[2], *found, *window), (arrays[1], *found, arrays[3], *window)

    def of(kernels, which, arguments):
        return getattr(kernels, f"{kind}_{which}")(*arguments)

    def forward():
        of(module, "forward", given)

    def backward():
        of(module, "backward", back)

    def function(torch, x):
        pool = getattr(torch.nn.functional, "max_pool2d" if kind == "max" else "avg_pool2d")
        return pool(x, *how.values())

    text = f"{shape_of(*shape)}, 3 x 3, stride 2"
    yield Case(
        *(f"{kind}_pool", "forward", text, *needs(of(costs.pool, "forward", given)), forward),
        results=(y,),
        inputs=(x,),
        plain=partial(getattr(plain, f"{kind}_pool"), **how),
        peer=value(function),
    )
    forward()
    yield Case(
        *(f"{kind}_pool", "backward", text, *needs(of(costs.pool, "backward", back)), backward),
        results=(dx,),
        inputs=(dy, x),
        plain=partial(getattr(plain, f"{kind}_pool_backward"), **how),
        peer=gradient(function),
    )


OPS = {function.__name__: function for function in (batch_norm, max_pool, mean_pool)}
