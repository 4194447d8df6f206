"""AdamW on a flat shard: the CPU's update, inside the ranges and nowhere else."""

import numpy as np
import pytest

from shardrt.kernels.cpu import adamw as cpu
from shardrt.kernels.cuda import adamw as cuda
from tests.cuda.numbers import ELEMENTS, assert_close, dtype_of, guarded, normal

COUNT = 2500
WHOLE = ([0], [COUNT], [1e-2], [0.1])
RANGES = (
    [0, 3, 37, 600, 1111],
    [1, 20, 37, 1109, COUNT],
    [1e-2, 1e-1, 1.0, 3e-2, 1e-3],
    [0.1, 0.0, 1.0, 0.5, 0.0],
)
SETTINGS = (0.9, 0.95, 1e-8)


def state(seed=0):
    """param, grad, m, v."""
    m = 0.1 * normal(COUNT, seed=seed + 2)
    return normal(COUNT, seed=seed), normal(COUNT, seed=seed + 1), m, m * m + 0.01


def run_both(array, dtypes, ranges, steps=3, shift=0, scale=0.5):
    """(CUDA's arrays, the CPU's in float64) after an update; both started from the same numbers."""
    found = [array(values, shift, dtype_of(kind)) for values, kind in zip(state(), dtypes, strict=True)]
    expected = [values.astype(np.float64) for values in found]
    ranges = [np.array(numbers) for numbers in ranges]
    cuda.step(*found, *ranges, *SETTINGS, steps, scale)
    cpu.step(*expected, *ranges, *SETTINGS, steps, scale)
    return found, expected


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("ranges", [WHOLE, RANGES], ids=["whole", "ranges"])
@pytest.mark.parametrize("shift", [0, 1])
def test_step(emulated, element, ranges, shift):
    with guarded(element) as array:
        for found, expected in zip(*run_both(array, [element] * 4, ranges, shift=shift), strict=True):
            assert_close(found, expected)


@pytest.mark.parametrize("param", ["float32", "bfloat16"])
@pytest.mark.parametrize("grad", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shift", [0, 1])
def test_gradient_and_moments_of_other_types(emulated, param, grad, shift):
    with guarded("float32") as array:
        types = [param, grad, "float32", "float32"]
        for found, expected in zip(*run_both(array, types, RANGES, shift=shift), strict=True):
            assert_close(found, expected)


@pytest.mark.parametrize("shift", [0, 1])
def test_nothing_outside_of_the_ranges_changes(emulated, shift):
    with guarded("float32") as array:
        found, _ = run_both(array, ["float32"] * 4, RANGES, shift=shift)
        inside = np.zeros(COUNT, bool)
        for start, stop in zip(*RANGES[:2], strict=True):
            inside[start:stop] = True
        for now, before in zip(found, state(), strict=True):
            np.testing.assert_array_equal(now[~inside], before[~inside].astype(np.float32))


def test_the_first_step_is_the_sign_of_the_gradient(emulated):
    with guarded("float32") as array:
        param, m, v = (array(np.zeros(COUNT)) for _ in range(3))
        grad = array(normal(COUNT))
        cuda.step(param, grad, m, v, *map(np.array, ([0], [COUNT], [0.1], [0.0])), *SETTINGS, 1, 1.0)
        np.testing.assert_allclose(param, -0.1 * np.sign(grad), rtol=1e-3)


def test_an_update_in_parts_has_the_bits_of_one(emulated):
    """As after a cut by offload."""
    with guarded("float32") as array:
        whole, _ = run_both(array, ["float32"] * 4, WHOLE)
        parts = [array(values) for values in state()]
        for start, stop in ((0, 777), (777, 778), (778, COUNT)):
            piece = [np.array(x) for x in ([0], [stop - start], [1e-2], [0.1])]
            cuda.step(*(part[start:stop] for part in parts), *piece, *SETTINGS, 3, 0.5)
        for one, other in zip(whole, parts, strict=True):
            np.testing.assert_array_equal(one, other)
