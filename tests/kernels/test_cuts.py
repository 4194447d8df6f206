"""Elementwise kernels have the same bits wherever a range is cut: by shards, by threads.

A piece has other elements in vectors, and others behind them, than the whole.
"""

import numpy as np
import pytest

from shardrt.kernels.cpu import activation, adamw, lion, sgd

SIZE = 1003
CUTS = [0, 1, 2, 5, 9, 16, 30, 31, 64, 97, 130, 300, 501, 777, SIZE]


def numbers(seed):
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def updated(step, settings, cuts, *state, more=()):
    """What a step makes of copies of param, grad and state, in ranges between cuts."""
    param, grad, *state = (array.copy() for array in (numbers(0), numbers(1), *state))
    ranges = [(start, stop, *settings) for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]
    step(param, grad, *state, np.array(ranges, np.float64), *more)
    return [param, *state]


STEPS = {
    "adamw": (adamw.step, (0.999, 1e-2, 1.3, 0.9, 0.99, 1e-8), numbers(2), abs(numbers(3))),
    "adamw, low moments": (
        adamw.step,
        (0.999, 1e-2, 1.3, 0.9, 0.99, 1e-8),
        (numbers(2).view(np.uint32) >> 16).astype(np.uint16),
        abs(numbers(3)),
    ),
    "lion": (lion.step, (0.999, 1e-2, 0.9, 0.99), numbers(2)),
    "sgd": (sgd.step, (1e-2, 0.1, 0.9, 0.7), numbers(2)),
}


@pytest.mark.parametrize("name", STEPS)
def test_an_update_has_the_same_bits_in_all_ranges(name):
    step, settings, *state = STEPS[name]
    more = (0.9, True) if step is sgd.step else ()
    whole = updated(step, settings, [0, SIZE], *state, more=more)
    cut = updated(step, settings, CUTS, *state, more=more)
    for ours, theirs in zip(cut, whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["gelu_tanh", "gelu_erf", "silu"])
def test_an_activation_has_the_same_bits_in_all_pieces(name):
    def made(cuts):
        x, dy, y, dx = numbers(0), numbers(1), np.empty(SIZE, "f"), np.empty(SIZE, "f")
        for piece in map(slice, cuts[:-1], cuts[1:]):
            getattr(activation, f"{name}_forward")(x[piece], y[piece])
            getattr(activation, f"{name}_backward")(dy[piece], x[piece], dx[piece])
        return y, dx

    np.testing.assert_array_equal(made(CUTS), made([0, SIZE]))
