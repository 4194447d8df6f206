"""Gradients against central differences in float64, along one random direction or element by element.

An output is turned into one number by a fixed random weight for each of its elements. Inputs that are Tensors
keep their strides; those that require a gradient are checked, one after the other.
"""

import numpy as np

from shardrt import Tensor, no_grad

STEP = 1e-5
TOLERANCE = 1e-6  # relative to the largest number that is compared


def leaf(array):
    """A float64 Tensor with the strides of `array` whose gradient is checked."""
    return Tensor(np.asarray(array, np.float64), requires_grad=True)


def normal(*shape, seed=0):
    """Standard normal numbers, others for every shape and seed."""
    return np.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape))


def contiguous(array):
    return np.array(array, order="C")


def transposed(array):
    """The same values, with the axes in memory the other way round."""
    return np.array(array, order="F")


def sliced(array):
    """The same values, as every second element of a larger array in the last axis, rows in reverse order."""
    if array.ndim == 0:
        return array.copy()
    larger = np.full((*array.shape[:-1], 2 * array.shape[-1]), np.nan)
    view = larger[::-1, ..., ::2] if array.ndim > 1 else larger[::2]
    view[...] = array
    return view


LAYOUTS = [contiguous, transposed, sliced]


def check_gradients(function, *inputs):
    """Every element of every gradient, and along random directions: `function(*inputs)` gives tensors."""
    weights, gradients = _analytic(function, inputs)
    for position, (x, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        if gradient is None:
            continue
        assert gradient.shape == x.shape and gradient.dtype == np.float64
        expected = np.zeros(x.shape)
        for index in np.ndindex(x.shape):
            expected[index] = _slope(function, inputs, weights, x, _unit(x.shape, index))
        _compare(gradient, expected, f"gradient of input {position}, shape {x.shape}")


def check_direction(function, *inputs, seed=0):
    """Each gradient along one random direction: cheap enough for inputs that are not tiny."""
    weights, gradients = _analytic(function, inputs)
    random = np.random.default_rng(seed)
    for position, (x, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        if gradient is None:
            continue
        direction = random.standard_normal(x.shape)
        expected = _slope(function, inputs, weights, x, direction)
        scale = np.abs(gradient * direction).sum()
        _compare((gradient * direction).sum(), expected, f"input {position} along a direction", scale)


def _analytic(function, inputs):
    """(weights of the outputs, gradient or None per input)."""
    for x in inputs:
        x.grad = None
    outputs = _outputs(function(*inputs))
    random = np.random.default_rng(1)
    weights = [np.asarray(random.standard_normal(y.shape)) for y in outputs]
    terms = [(y * w).sum() for y, w in zip(outputs, weights, strict=True)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    total.backward()
    return weights, [x.grad if x.requires_grad else None for x in inputs]


def _slope(function, inputs, weights, x, direction):
    """The derivative of the weighted outputs as x moves along `direction`."""
    start = x.data.copy()
    values = []
    for sign in (1, -1):
        x.data[...] = start + sign * STEP * direction
        with no_grad():
            outputs = _outputs(function(*inputs))
        values.append(sum(float((np.asarray(y) * w).sum()) for y, w in zip(outputs, weights, strict=True)))
    x.data[...] = start
    return (values[0] - values[1]) / (2 * STEP)


def _compare(actual, expected, what, scale=None):
    scale = max(1e-2, np.abs(expected).max(initial=0) if scale is None else scale)
    error = np.abs(actual - expected).max(initial=0) / scale
    assert error < TOLERANCE, f"{what}: {error:.1e} off, relative; got {actual}, expected {expected}"


def _outputs(result):
    return result if isinstance(result, tuple) else (result,)


def _unit(shape, index):
    direction = np.zeros(shape)
    direction[index] = 1
    return direction
