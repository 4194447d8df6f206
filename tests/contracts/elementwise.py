"""Contracts of activations, of softmax, of rotary embedding and of the runtime's own passes."""

from math import erf, pi, sqrt

import numpy as np

from tests.contracts import Call, Double, Out, Wide, contract
from tests.cuda.numbers import normal

COUNTS = [0, 1, 3, 17, 256, 4099]
FAR = [np.array([-6e4, -200.0, -0.0, 1.0, np.nan]), np.array([200.0, 6e4])]  # exponentials overflow
NARROW = ("float32", "float16")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def bell(x):
    """The normal distribution's function."""
    return 0.5 * (1 + np.vectorize(erf, [float])(x / sqrt(2)))


def bend(x):
    """What GELU by tanh multiplies x with."""
    return 0.5 * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))


def gelu_slope(x):
    return bend(x) + 2 * x * bend(x) * (1 - bend(x)) * sqrt(2 / pi) * (1 + 3 * 0.044715 * x**2)


ACTIVATIONS = {  # values and slopes
    "gelu_tanh": (lambda x: x * bend(x), gelu_slope),
    "gelu_erf": (lambda x: x * bell(x), lambda x: bell(x) + x * np.exp(-x * x / 2) / sqrt(2 * pi)),
    "silu": (lambda x: x * sigmoid(x), lambda x: sigmoid(x) * (1 + x * (1 - sigmoid(x)))),
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0) * 1.0),
}


def with_zero(count):
    x = 3 * normal(count)
    x[1:2] = 0
    return x


@contract(*(f"activation.{name}_forward" for name in ACTIVATIONS))
def activation_forward(kernel):
    value = ACTIVATIONS[kernel.removeprefix("activation.").removesuffix("_forward")][0]
    for count in COUNTS:
        yield Call((with_zero(count), Out()), value)
    for far in FAR:
        yield Call((far, Out()), value, elements=NARROW)


@contract(*(f"activation.{name}_backward" for name in ACTIVATIONS))
def activation_backward(kernel):
    slope = ACTIVATIONS[kernel.removeprefix("activation.").removesuffix("_backward")][1]
    for count in COUNTS:
        args = normal(count, seed=1), with_zero(count), Out()
        yield Call(args, lambda dy, x: dy * slope(x), over=0)
    for far in FAR:
        yield Call((np.ones(far.size), far, Out()), lambda dy, x: slope(x), elements=NARROW)


@contract("activation.erf_forward")
def erf_forward():
    for count in COUNTS:
        yield Call((3 * normal(count), Out()), np.vectorize(erf, [float]))


SWIGLU = [(0, 4), (1, 1), (3, 17), (2, 64), (2, 4104)]  # rows, width


@contract("swiglu.forward")
def swiglu_forward():
    def value(x):
        gate, x = np.split(x, 2, 1)
        return gate * sigmoid(gate) * x

    for rows, width in SWIGLU:
        yield Call((3 * normal(rows, 2 * width), Out()), value)
    for far in FAR:
        yield Call((np.append(far, np.ones(far.size))[None], Out()), value, elements=NARROW)


@contract("swiglu.backward")
def swiglu_backward():
    def gradient(dy, x):
        gate, x = np.split(x, 2, 1)
        slope = ACTIVATIONS["silu"][1](gate)
        return np.concatenate([dy * x * slope, dy * gate * sigmoid(gate)], 1)

    for rows, width in SWIGLU:
        args = normal(rows, width, seed=1), 3 * normal(rows, 2 * width), Out()
        yield Call(args, gradient, over=1)


@contract("rotary.forward", "rotary.backward")
def rotary(kernel):
    """Pairs turn as complex numbers, back in backward; the rest stays."""

    def turned(x, cos, sin, heads):
        time, half = cos.shape
        pairs = x[:, : 2 * half * heads].reshape(len(x) // time, time, heads, 2, half)
        by = (cos - 1j * sin if kernel == "rotary.backward" else cos + 1j * sin)[:, None]
        turned = (pairs[..., 0, :] + 1j * pairs[..., 1, :]) * by
        pairs = np.stack([turned.real, turned.imag], 3).reshape(len(x), 2 * half * heads)
        return np.concatenate([pairs, x[:, 2 * half * heads :]], 1)

    # sequences, time, half a head, heads that turn, width of the rest
    for sequences, time, half, heads, rest in [
        *((2, 3, 16, 3, 64), (1, 5, 3, 2, 7), (2, 2, 8, 1, 0)),
        *((1, 1, 64, 5, 128), (3, 2, 4, 0, 9)),
    ]:
        angles = normal(time, half)
        x = normal(sequences * time, 2 * half * heads + rest)
        args = x, Wide(np.cos(angles)), Wide(np.sin(angles)), Out(), heads
        yield Call(args, lambda *arrays, heads=heads: turned(*arrays, heads), over=0)


SOFTMAX = [(0, 5), (1, 1), (3, 7), (5, 8), (9, 96), (2, 255), (3, 2048), (2, 2056), (3, 2051)]


def softmax(x):
    powers = np.exp(x - x.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


@contract("softmax.forward")
def softmax_forward():
    for shape in SOFTMAX:
        yield Call((4 * normal(*shape), Out()), softmax)
    for width in (8, 2052, 17):
        extreme = normal(3, width)
        extreme[0] += 1e4
        extreme[1] -= 1e4
        extreme[2, :-1] = -np.inf
        yield Call((extreme, Out()), softmax, elements=("float32",))


@contract("softmax.backward")
def softmax_backward():
    for shape in SOFTMAX:
        args = normal(*shape, seed=1), softmax(4 * normal(*shape)), Out()
        yield Call(args, lambda dy, y: y * (dy - (dy * y).sum(1, keepdims=True)), over=0)


@contract("elementwise.add")
def add():
    for count in COUNTS:
        yield Call((normal(count), normal(count, seed=1), Out()), np.add)


def in_float32(op, *numbers):
    """Rounded once to float32, from which what has 16 bits is rounded."""
    with np.errstate(all="ignore"):
        return op(*(np.asarray(x, np.float32) for x in numbers)).astype(np.float64)


def scaled(factor, values, how):
    """Calls that scale a number's elements, to the bit. how: (what stands for the factor, more of a Call)."""
    arg, more = how
    for elements in (("float64",), ("float32", "float16", "bfloat16")):

        def truth(x, *place, wide=elements[0] == "float64"):
            return x * factor if wide else in_float32(np.multiply, x, factor)

        yield Call((Out(values), arg), truth, exact=True, elements=elements, **more)


@contract("elementwise.scale_")
def scale():
    for count in COUNTS:
        yield from scaled(0.3, normal(count), (0.3, {}))


@contract("elementwise.scale_by_")
def scale_by():
    for factor in (0.3, np.nan, 1.0):
        yield from scaled(factor, normal(4099), (Double(np.array(factor)), {}))


@contract("elementwise.unscale_")
def unscale():
    def was_finite(found, x):
        return found == np.isfinite(x).all()

    yield from scaled(0.25, np.zeros(0), (0.25, {"gives": was_finite}))
    yield from scaled(0.25, normal(4099), (0.25, {"gives": was_finite}))
    for bad in (np.nan, np.inf, -np.inf):
        for place in (7, 4098):  # in a vector, and behind the last
            values = normal(4099)
            values[place] = bad
            yield from scaled(0.25, values, (0.25, {"gives": was_finite}))


@contract("elementwise.clamp_")
def clamp():
    values = normal(1003)
    values[7] = np.nan
    yield Call((Out(values), 0.5), lambda x: np.clip(x, -0.5, 0.5))
