"""Contracts of layer norm, RMS norm and batch norm."""

import numpy as np

from tests.contracts import Call, Out, Wide, contract
from tests.cuda.numbers import normal

EPS = 1e-5
SHAPES = [(1, 1), (0, 8), (3, 7), (9, 8), (5, 96), (11, 255), (3, 2056), (2, 2051)]
TALL = [(1, 8), (17, 40), (67, 24), (67, 5)]  # several blocks of rows, the last not full


class Norm:
    """parameters and statistics: how many it has. RMS norm is layer norm with mean and bias 0."""

    def __init__(self, parameters):
        self.parameters = parameters

    def __call__(self, x, weight, bias=0.0):
        """y, then what is kept of a row: mean and rstd, or rstd."""
        mean = x.mean(1) if self.parameters == 2 else np.zeros(len(x))
        around = x - mean[:, None]
        rstd = 1 / np.sqrt((around**2).mean(1) + EPS)
        return around * rstd[:, None] * weight + bias, *(mean, rstd)[-self.parameters :]

    def gradients(self, dy, x, weight, *kept):
        """dx, then the parameters' gradients."""
        mean, rstd = (0.0, *kept)[-2:]
        normed = (x - np.reshape(mean, (-1, 1))) * rstd[:, None]
        down = dy * weight
        level = down.mean(1, keepdims=True) if self.parameters == 2 else 0.0
        dx = rstd[:, None] * (down - level - normed * (down * normed).mean(1, keepdims=True))
        return dx, *((dy * normed).sum(0), dy.sum(0))[: self.parameters]

    def weights(self, width):
        return tuple((n == 0) + normal(width, seed=n + 1) for n in range(self.parameters))

    def rows(self):
        return tuple(Out(wide=True) for _ in range(self.parameters))

    def given(self, shape):
        """What backward gets: dy, x, weight, what is kept."""
        x, weights = normal(*shape), self.weights(shape[1])
        return normal(*shape, seed=3), x, weights[0], *map(Wide, self(x, *weights)[1:])

    def backward(self, *shape, **more):
        """A call of backward that writes all gradients."""
        outs = (Out() for _ in range(1 + self.parameters))
        return Call((*self.given(shape), *outs, False), self.gradients, factor=2, **more)


NORMS = {"layer_norm": Norm(2), "rms_norm": Norm(1)}


@contract("layer_norm.forward", "rms_norm.forward")
def forward(kernel):
    norm = NORMS[kernel.partition(".")[0]]
    for shape in SHAPES:
        x, weights = 2 + normal(*shape), norm.weights(shape[1])
        yield Call((x, *weights, Out(), *norm.rows(), EPS), norm, factor=2)
    for width in (7, 40, 2056) if norm.parameters == 2 else ():
        args = normal(3, width), norm.weights(width)[0], None, Out(), *norm.rows(), EPS
        yield Call(args, norm, factor=2)
    for width in (8, 1000, 1001, 2048):  # a large mean costs no precision of the deviation
        x, weights = 1000 + normal(2, width), norm.weights(width)
        factors = 300, *[2] * norm.parameters
        yield Call((x, *weights, Out(), *norm.rows(), EPS), norm, factor=factors, elements=("float32",))
    for width in (7, 40, 2056):  # of a sum, as it is rounded
        x, added, weights = normal(5, width), normal(5, width, seed=1), norm.weights(width)
        args = x, *weights, Out(), *norm.rows(), EPS, added, Out()

        def of_a_sum(x, *rest, rounded):
            *weights, added = rest
            total = rounded(x + added)
            return *norm(total, *weights), total

        yield Call(args, of_a_sum, factor=2, rounds=True)


@contract("layer_norm.backward", "rms_norm.backward")
def backward(kernel):
    norm = NORMS[kernel.partition(".")[0]]
    count = norm.parameters
    for shape in SHAPES[1:] + TALL:
        yield norm.backward(*shape, over=0)
    for shape in ((0, 8), (67, 40), (67, 7), (19, 4096)):  # added up in float32
        sums = tuple(Out(normal(shape[1], seed=4 + n), wide=True) for n in range(count))

        def added(*arrays):
            given, before = arrays[:-count], arrays[-count:]
            return tuple(a + b for a, b in zip(norm.gradients(*given)[1:], before, strict=True))

        yield Call((*norm.given(shape), None, *sums, True), added, factor=2)
    for width in (40, 2048, 7):  # only one gradient is wanted
        for wanted in range(count + 1):
            outs = [Out() if n == wanted else None for n in range(count + 1)]
            yield Call(
                (*norm.given((9, width)), *outs, False),
                lambda *arrays, wanted=wanted: norm.gradients(*arrays)[wanted],
                factor=2,
            )
    for width in (7, 40, 2056):  # the sum has a gradient of its own
        outs, dtotal = tuple(Out() for _ in range(count)), normal(5, width, seed=2)

        def with_own(*arrays):
            dx, *sums = norm.gradients(*arrays[:-1])
            return dx + arrays[-1], *sums

        yield Call((*norm.given((5, width)), Out(), *outs, False, dtotal), with_own, factor=2)


PLANES = [(3, 5, 7), (1, 2, 300), (600, 3, 1)]  # batch, channels, pixels


def over_pixels(numbers):
    return numbers[:, None]


@contract("batch_norm.statistics")
def statistics():
    for shape in PLANES:
        yield Call(
            (2 + normal(*shape), Out(wide=True), Out(wide=True)),
            lambda x: (x.mean((0, 2)), x.var((0, 2)) * x.size / x.shape[1]),
            factor=4,
        )


def of_channels(shape):
    """x, mean, rstd, weight."""
    mean, rstd = 2 + normal(shape[1]), np.abs(normal(shape[1], seed=1)) + 0.5
    return 2 + normal(*shape), Wide(mean), Wide(rstd), Wide(normal(shape[1], seed=2))


@contract("batch_norm.forward")
def batch_forward():
    def value(x, mean, rstd, weight, bias):
        return (x - over_pixels(mean)) * over_pixels(rstd * weight) + over_pixels(bias)

    for shape in PLANES:
        yield Call((*of_channels(shape), Wide(normal(shape[1], seed=3)), Out()), value, factor=4)


@contract("batch_norm.backward_sums")
def backward_sums():
    def sums(dy, x, mean, rstd):
        return (dy * (x - over_pixels(mean)) * over_pixels(rstd)).sum((0, 2)), dy.sum((0, 2))

    for shape in PLANES:
        args = normal(*shape, seed=4), *of_channels(shape)[:3]
        yield Call((*args, Out(wide=True), Out(wide=True)), sums, factor=4)


@contract("batch_norm.backward_input")
def batch_backward():
    def gradient(dy, x, mean, rstd, weight, along, level):
        normed = (x - over_pixels(mean)) * over_pixels(rstd)
        return over_pixels(weight * rstd) * (dy - over_pixels(level) - normed * over_pixels(along))

    for shape in PLANES:
        means = (Wide(normal(shape[1], seed=seed)) for seed in (5, 6))
        yield Call((normal(*shape, seed=4), *of_channels(shape), *means, Out()), gradient, factor=4)
