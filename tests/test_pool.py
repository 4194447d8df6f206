"""The CPU's pool of memory: what it keeps for the next step, and what it gives back to the system."""

import mmap

import numpy as np
import pytest

from shardrt.device import memory, pages
from shardrt.device.memory import SMALL, Pool, rounded
from shardrt.kernels.cpu import softmax

F = np.dtype(np.float32)


def mapped(pool):
    """Bytes that it has from the system."""
    return pool.held_bytes + sum(size * len(free) for size, free in pool._free.items())


def step(pool, rows):
    held = [pool.empty((rows, 1 << 10), F) for _ in range(4)]
    return [array.ctypes.data for array in held]


def test_the_same_sizes_get_the_same_memory():
    pool = Pool()
    first = {*step(pool, 100), *step(pool, 40)}
    assert all({*step(pool, 100), *step(pool, 40)} == first for _ in range(3))


def test_sizes_that_keep_changing_do_not_add_up():
    pool = Pool()
    for rows in [512, *range(100, 512, 9)]:
        step(pool, rows)
    assert mapped(pool) <= 2 * pool.peak_bytes == 2 * 4 * 512 * 4096
    assert mapped(pool) == pool._mapped


@pytest.mark.parametrize("name", ["float32", "float16", "int64", "bool", "bfloat16"])
def test_large_arrays_have_the_type_that_was_asked_for(name):
    """Above the size from which the pool lends, as below; bfloat16 is no type of NumPy's own."""
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)
    for shape in ((2, 3), (2, SMALL)):
        array = Pool().empty(shape, dtype)
        array[...] = 1
        assert array.dtype == dtype and array.shape == shape and (array == 1).all()


def test_free_memory_goes_before_there_is_said_to_be_none(monkeypatch):
    pool = Pool()
    step(pool, 100)
    kept = pool.empty((3, SMALL), F)
    tries = iter([MemoryError, None, MemoryError, MemoryError])
    region = Pool._region

    def sparse(self, size):
        if next(tries):
            raise MemoryError("no memory")
        return region(self, size)

    monkeypatch.setattr(Pool, "_region", sparse)
    held = pool.held_bytes
    other = pool.empty((5, SMALL), F)
    assert mapped(pool) == kept.nbytes + other.nbytes
    with pytest.raises(MemoryError):
        pool.empty((7, SMALL), F)
    assert pool.held_bytes == held + other.nbytes, "what failed is not counted"


@pytest.mark.parametrize("page", [1 << 12, 1 << 14, 1 << 16])
def test_no_page_of_the_system_has_parts_of_two_arrays(page, monkeypatch):
    """Pages of arm64 have up to 64 KiB, and what is dropped is dropped in whole pages."""
    monkeypatch.setattr(mmap, "PAGESIZE", page)
    pool = Pool()
    arrays = [pool.empty(nbytes, np.dtype(np.uint8)) for nbytes in (SMALL, SMALL + 1, 5 * SMALL, 99_999)]
    assert all(array.ctypes.data % page == 0 and rounded(array.nbytes) % page == 0 for array in arrays)


def test_a_system_without_huge_pages_gives_small_ones(monkeypatch):
    class Plain(mmap.mmap):
        def madvise(self, option, *where):
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(22, "Invalid argument")
            super().madvise(option, *where)

    monkeypatch.setattr(mmap, "mmap", Plain)
    assert pages.Mapping(pages.HUGE).size == pages.HUGE


def test_small_arrays_lie_so_far_apart_that_no_loop_takes_another_way():
    """With AVX2 a softmax of 5 columns had other last bits where its result lay next to its input."""
    pool = Pool()
    arrays = [pool.empty((2, 5), F) for _ in range(64)]
    starts = sorted(array.__array_interface__["data"][0] for array in arrays)
    assert min(np.diff(starts)) >= memory.APART
    x = np.random.default_rng(0).standard_normal((2, 5)).astype(np.float32)
    near, far = np.empty(4096, np.float32), np.empty((2, 5), np.float32)
    softmax.forward(x, far)
    near[:10].reshape(2, 5)[...] = x
    y = near[memory.APART // 4 :][:10].reshape(2, 5)
    softmax.forward(near[:10].reshape(2, 5), y)
    np.testing.assert_array_equal(y, far)
    assert pool.empty((0, 3), F).shape == (0, 3) and pool.empty((), F).shape == ()
