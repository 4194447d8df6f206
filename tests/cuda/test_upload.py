"""Numbers on their way to the GPU: what waits to be copied is not written over, what has been copied is."""

import numpy as np
import pytest

from shardrt.device.upload import Uploads

cupy = pytest.importorskip("cupy")


@pytest.fixture
def uploads(gpu):
    """To the GPU emulator, where nothing is copied before somebody waits. `made`: sizes of its memory."""

    def pinned(nbytes):
        made.made.append(nbytes)
        return gpu.pinned(nbytes, np.uint8)

    made = Uploads(cupy, pinned, gpu.copy)
    made.made = []
    return made


def test_what_waits_is_kept_and_what_was_copied_is_used_again(gpu, uploads):
    values, targets = np.zeros((3, 2)), [gpu.zeros((3, 2), np.float64) for _ in range(5)]
    for turn in range(2):
        for number, target in enumerate(targets):
            values[:] = 10 * turn + number  # the host goes on at once
            uploads.send(target, values)
        gpu.wait_here()
        for number, target in enumerate(targets):
            assert (gpu.to_numpy(target) == 10 * turn + number).all()
    assert uploads.made == [4096] * 5


def test_a_piece_that_is_too_small_is_replaced_and_not_kept_beside(gpu, uploads):
    for count in (1, 1000, 1, 1000):
        target = gpu.zeros((count,), np.float64)
        uploads.send(target, np.arange(count) + 0.5)
        gpu.wait_here()
        np.testing.assert_array_equal(gpu.to_numpy(target), np.arange(count) + 0.5)
    assert uploads.made == [4096, 8192]
