"""Arrays for tests of kernels/cuda: random, of every type, with guards around; and how close is close."""

from contextlib import contextmanager

import ml_dtypes
import numpy as np

ELEMENTS = ["float32", "float64", "float16", "bfloat16"]
TOLERANCE = {"float32": 1e-6, "float64": 1e-13, "float16": 1e-3, "bfloat16": 8e-3}  # of the norm
GUARD = 64  # elements before and after


def dtype_of(element):
    return np.dtype(ml_dtypes.bfloat16) if element == "bfloat16" else np.dtype(element)


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).normal(size=shape)


def in_double(*arrays):
    return [array.astype(np.float64) for array in arrays]


@contextmanager
def guarded(element):
    """A function that makes arrays of a type with poison around them; at the end the poison must be there.

    array(values, offset=0, dtype=None): `offset` elements beyond a multiple of 16 bytes.
    """
    made = []

    def array(values, offset=0, dtype=None):
        values = np.asarray(values)
        kind = dtype_of(element) if dtype is None else np.dtype(dtype)
        room = values.size * kind.itemsize
        memory = np.full(room + 2 * GUARD * 16 + 16, 0xFF, np.uint8)
        start = -memory.ctypes.data % 16 + GUARD * 16 + offset * kind.itemsize
        inside = memory[start : start + room]
        made.append((memory, start, start + room))
        result = inside.view(kind).reshape(values.shape)
        result[...] = values.astype(kind)
        return result

    yield array
    for memory, start, stop in made:
        assert (memory[:start] == 0xFF).all() and (memory[stop:] == 0xFF).all(), "written outside of an array"


def assert_close(found, expected, factor=1.0):
    """Equal up to rounding in the type of `found`, relative to the norm; infinities and nan as expected."""
    assert found.shape == np.shape(expected)
    tolerance = factor * TOLERANCE[found.dtype.name]
    found, expected = found.astype(np.float64), np.asarray(expected, np.float64)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(found[~finite], expected[~finite])
    difference = np.linalg.norm(found[finite] - expected[finite])
    norm = np.linalg.norm(expected[finite])
    assert difference <= tolerance * max(norm, 1e-30), f"off by {difference / max(norm, 1e-30):.1e}"
