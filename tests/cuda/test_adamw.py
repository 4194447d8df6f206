"""AdamW on a flat shard: the CPU's update, inside the ranges and nowhere else."""

import numpy as np
import pytest

from shardrt.kernels.cpu import adamw as cpu
from shardrt.kernels.cpu import cast as cpu_cast
from shardrt.kernels.cuda import adamw as cuda
from tests.cuda.numbers import ELEMENTS, assert_close, dtype_of, guarded, normal

COUNT = 13000
CORRECTION = 1 / np.sqrt(1 - 0.95**3)
SETTINGS = (0.9, 0.95, 1e-8)
WHOLE = np.array([[0, COUNT, 0.999, 1e-2, CORRECTION, *SETTINGS]])
# One of one element, one that begins and ends anywhere, an empty one, two that touch within sixteen bytes,
# one that ends where a block's tile does, and one over several tiles.
RANGES = np.array(
    [
        [0, 1, 0.999, 1e-2, CORRECTION, *SETTINGS],
        [3, 20, 1.0, 1e-1, CORRECTION, 0.8, 0.9, 1e-3],
        [37, 37, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0],
        [600, 1109, 0.985, 3e-2, 2.0, 0.0, 0.5, 1e-8],
        [1109, 4096, 1.0, 1e-3, CORRECTION, *SETTINGS],
        [4097, COUNT, 0.5, 2e-3, 3.0, 0.95, 0.99, 1e-6],
    ]
)


def state(seed=0):
    """param, grad, m, v."""
    m = 0.1 * normal(COUNT, seed=seed + 2)
    return normal(COUNT, seed=seed), normal(COUNT, seed=seed + 1), m, m * m + 0.01


def run_both(array, dtypes, ranges, shift=0):
    """(CUDA's arrays, the CPU's in float64) after an update; both started from the same numbers."""
    found = [array(values, shift, dtype_of(kind)) for values, kind in zip(state(), dtypes, strict=True)]
    expected = [values.astype(np.float64) for values in found]
    cuda.step(*found, ranges)
    cpu.step(*expected, ranges)
    return found, expected


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("ranges", [WHOLE, RANGES], ids=["whole", "ranges"])
@pytest.mark.parametrize("shift", [0, 1])
def test_step(emulated, element, ranges, shift):
    with guarded(element) as array:
        for found, expected in zip(*run_both(array, [element] * 4, ranges, shift=shift), strict=True):
            assert_close(found, expected)


@pytest.mark.parametrize(
    ("param", "grad"), [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("shift", [0, 1])
def test_gradient_and_moments_of_other_types(emulated, param, grad, shift):
    with guarded("float32") as array:
        types = [param, grad, "float32", "float32"]
        for found, expected in zip(*run_both(array, types, RANGES, shift=shift), strict=True):
            assert_close(found, expected)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("shift", [0, 1])
def test_the_new_weights_are_written_rounded_as_a_cast_would(emulated, kind, shift):
    """By both; outside of the ranges nothing is written."""
    with guarded("float32") as array:
        on_cuda, on_cpu = ([array(values, shift) for values in state()] for _ in range(2))
        low = array(np.zeros(COUNT), shift, dtype_of(kind))
        cuda.step(*on_cuda, RANGES, low, kind)
        widened = np.zeros(COUNT, np.float32)
        cpu.step(*on_cpu, RANGES, widened, kind)
    inside = np.zeros(COUNT, bool)
    for start, stop in RANGES[:, :2].astype(int):
        inside[start:stop] = True
    for param, found in ((on_cuda[0], low.astype(np.float32)), (on_cpu[0], widened)):
        expected = np.empty(COUNT, np.float32)
        cpu_cast.round_to(param, expected, kind)
        np.testing.assert_array_equal(found[inside], expected[inside])
        assert not found[~inside].any()


@pytest.mark.parametrize("shift", [0, 1])
def test_a_first_moment_in_bfloat16_is_kept_as_on_the_cpu(emulated, shift):
    both = []
    for step in (cuda.step, cpu.step):
        with guarded("float32") as array:
            param, grad, m, v = (array(values, shift) for values in state())
            bits = np.empty(COUNT + shift, np.uint16)[shift:]
            cpu_cast.pack(np.ascontiguousarray(m), bits, "bfloat16")
            step(param, grad, bits, v, RANGES)
        both.append((param, v, (bits.astype(np.uint32) << 16).view(np.float32)))
    for found, expected in zip(both[0][:2], both[1][:2], strict=True):
        assert_close(found, expected.astype(np.float64))
    np.testing.assert_allclose(both[0][2], both[1][2], rtol=2**-7)  # a sum that ends elsewhere may round on


@pytest.mark.parametrize("shift", [0, 1])
def test_nothing_outside_of_the_ranges_changes(emulated, shift):
    with guarded("float32") as array:
        found, _ = run_both(array, ["float32"] * 4, RANGES, shift=shift)
        inside = np.zeros(COUNT, bool)
        for start, stop in RANGES[:, :2].astype(int):
            inside[start:stop] = True
        for now, before in zip(found, state(), strict=True):
            np.testing.assert_array_equal(now[~inside], before[~inside].astype(np.float32))


def test_the_first_step_is_the_sign_of_the_gradient(emulated):
    with guarded("float32") as array:
        param, m, v = (array(np.zeros(COUNT)) for _ in range(3))
        grad = array(normal(COUNT))
        ranges = np.array([[0, COUNT, 1.0, 0.1 / (1 - 0.9), 1 / np.sqrt(1 - 0.95), *SETTINGS]])
        cuda.step(param, grad, m, v, ranges)
        np.testing.assert_allclose(param, -0.1 * np.sign(grad), rtol=1e-3)


def test_an_update_in_parts_has_the_bits_of_one(emulated):
    """As after a cut by offload."""
    with guarded("float32") as array:
        whole, _ = run_both(array, ["float32"] * 4, WHOLE)
        parts = [array(values) for values in state()]
        for start, stop in ((0, 777), (777, 778), (778, COUNT)):
            piece = np.array([[0, stop - start, *WHOLE[0, 2:]]])
            cuda.step(*(part[start:stop] for part in parts), piece)
        for one, other in zip(whole, parts, strict=True):
            np.testing.assert_array_equal(one, other)


def test_one_launch_for_all_ranges_and_none_for_none(emulated):
    with guarded("float32") as array:
        found, _ = run_both(array, ["float32"] * 4, RANGES)
        assert emulated.launches == ["adamw"]
        cuda.step(*found, RANGES[:0])
        assert emulated.launches == ["adamw"]


@pytest.mark.parametrize("element", ELEMENTS)
def test_a_range_has_the_same_bits_whatever_the_others_and_however_it_lies(emulated, element):
    """Alone or among others; on the path of vectors or, one element further, on the other."""
    with guarded(element) as array:
        together, _ = run_both(array, [element] * 4, RANGES)
        alone = [array(values, 1) for values in state()]
        for row in RANGES:
            cuda.step(*alone, row[None])
        for one, other in zip(together, alone, strict=True):
            np.testing.assert_array_equal(one, other)
