"""Gradient descent on a flat shard: the CPU's update, inside the ranges and nowhere else."""

import numpy as np
import pytest

from shardrt.kernels.cpu import sgd as cpu
from shardrt.kernels.cuda import sgd as cuda
from tests.cuda.numbers import ELEMENTS, assert_close, dtype_of, guarded, normal

COUNT = 9000
NUMBERS = np.array([[1e-2, 0.1], [1e-1, 0.0], [1.0, 1.0], [3e-2, 0.5]])
WHOLE = np.array([[0, COUNT]])
RANGES = np.array([[0, 1], [3, 20], [37, 37], [600, COUNT]])
# momentum, dampening, Nesterov's, the first step
RULES = [(0.9, 0.0, False, False), (0.9, 0.3, False, False), (0.9, 0.0, True, False), (0.9, 0.3, True, True)]


def ranges_of(places, rule):
    """The table and the settings of a kernel's call, where `places` are starts and stops."""
    momentum, dampening, nesterov, first = rule
    moving = (0, 1) if first else (momentum, 1 - dampening)
    own = np.column_stack([NUMBERS[: len(places)], np.tile(moving, (len(places), 1))])
    return np.column_stack([places, own]).astype(np.float64), momentum, nesterov


def run_both(array, dtypes, ranges, rule, shift=0):
    """(CUDA's arrays, the CPU's in float64) after an update; `dtypes` of param, grad and perhaps momentum."""
    values = [normal(COUNT, seed=seed) for seed in range(len(dtypes))]
    found = [array(v, shift, dtype_of(kind)) for v, kind in zip(values, dtypes, strict=True)]
    expected = [v.astype(np.float64) for v in found]
    none = [None] * (3 - len(dtypes))
    cuda.step(*found, *none, *ranges_of(ranges, rule))
    cpu.step(*expected, *none, *ranges_of(ranges, rule))
    return found, expected


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("ranges", [WHOLE, RANGES], ids=["whole", "ranges"])
@pytest.mark.parametrize("shift", [0, 1])
def test_without_momentum(emulated, element, ranges, shift):
    with guarded(element) as array:
        for found, expected in zip(*run_both(array, [element] * 2, ranges, RULES[0], shift), strict=True):
            assert_close(found, expected)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shift", [0, 1])
def test_with_momentum(emulated, element, rule, shift):
    with guarded(element) as array:
        for found, expected in zip(*run_both(array, [element] * 3, RANGES, rule, shift), strict=True):
            assert_close(found, expected)


@pytest.mark.parametrize(("param", "grad"), [("float32", "bfloat16"), ("bfloat16", "float16")])
def test_gradient_and_momentum_of_other_types(emulated, param, grad):
    with guarded("float32") as array:
        for found, expected in zip(*run_both(array, [param, grad, "float32"], RANGES, RULES[1]), strict=True):
            assert_close(found, expected)


def test_the_first_step_reads_no_momentum(emulated):
    with guarded("float32") as array:
        param, grad, momentum = array(normal(130)), array(normal(130)), array(np.full(130, np.nan))
        cuda.step(param, grad, momentum, np.array([[0, 130, 0.1, 0.0, 0.0, 1.0]]), 0.9, False)
        np.testing.assert_array_equal(momentum, grad)
        assert np.isfinite(param).all()


def test_both_paths_have_the_same_bits_in_one_launch(emulated):
    with guarded("float32") as array:
        aligned, _ = run_both(array, ["float32"] * 3, RANGES, RULES[2])
        assert emulated.launches == ["descend_with_momentum"]
        others, _ = run_both(array, ["float32"] * 3, RANGES, RULES[2], shift=1)
        for one, other in zip(aligned, others, strict=True):
            np.testing.assert_array_equal(one, other)
