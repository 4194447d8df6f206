"""Lion on a flat shard: the CPU's update, inside the ranges and nowhere else."""

import numpy as np
import pytest

from shardrt.kernels.cpu import lion as cpu
from shardrt.kernels.cuda import lion as cuda
from tests.cuda.numbers import ELEMENTS, assert_close, dtype_of, guarded, normal

COUNT = 9000
WHOLE = np.array([[0, COUNT, 0.999, 1e-2, 0.9, 0.99]])
# One of one element, one that begins and ends anywhere, an empty one, two that touch within sixteen bytes,
# and one over several tiles.
RANGES = np.array(
    [
        [0, 1, 0.999, 1e-2, 0.9, 0.99],
        [3, 20, 1.0, 1e-1, 0.8, 0.5],
        [37, 37, 0.0, 1.0, 0.0, 0.0],
        [600, 1109, 0.985, 3e-2, 0.0, 0.9],
        [1109, COUNT, 0.5, 2e-3, 0.95, 0.98],
    ]
)


def run_both(array, dtypes, ranges, shift=0):
    """(CUDA's arrays, the CPU's in float64) after an update; both started from the same numbers."""
    values = [normal(COUNT, seed=seed) for seed in range(3)]  # param, grad, m
    found = [array(v, shift, dtype_of(kind)) for v, kind in zip(values, dtypes, strict=True)]
    expected = [v.astype(np.float64) for v in found]
    cuda.step(*found, ranges)
    cpu.step(*expected, ranges)
    return found, expected


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("ranges", [WHOLE, RANGES], ids=["whole", "ranges"])
@pytest.mark.parametrize("shift", [0, 1])
def test_step(emulated, element, ranges, shift):
    with guarded(element) as array:
        for found, expected in zip(*run_both(array, [element] * 3, ranges, shift), strict=True):
            assert_close(found, expected)


@pytest.mark.parametrize(("param", "grad"), [("float32", "bfloat16"), ("bfloat16", "float16")])
def test_gradient_and_momentum_of_other_types(emulated, param, grad):
    with guarded("float32") as array:
        for found, expected in zip(*run_both(array, [param, grad, "float32"], RANGES), strict=True):
            assert_close(found, expected)


def test_the_direction_is_a_sign_with_0_of_0_and_nan_of_nan(emulated):
    values = np.array([1e-30, -1e-30, 0.0, -0.0, np.nan, np.inf, -np.inf])
    for kernel in (cpu, cuda):
        with guarded("float32") as array:
            param, grad, m = array(np.ones(7)), array(values), array(np.zeros(7))
            kernel.step(param, grad, m, np.array([[0, 7, 1.0, 0.5, 0.0, 1.0]]))
            np.testing.assert_array_equal(param, [0.5, 1.5, 1.0, 1.0, np.nan, 0.5, 1.5])


def test_both_paths_have_the_same_bits_in_one_launch(emulated):
    with guarded("float32") as array:
        aligned, _ = run_both(array, ["float32"] * 3, RANGES)
        assert emulated.launches == ["lion"]
        others, _ = run_both(array, ["float32"] * 3, RANGES, shift=1)
        for one, other in zip(aligned, others, strict=True):
            np.testing.assert_array_equal(one, other)
