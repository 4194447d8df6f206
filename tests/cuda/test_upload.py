"""Numbers on their way to the GPU: what waits to be copied is not written over, what has been copied is."""

from types import SimpleNamespace

import numpy as np

from shardrt.device.upload import Uploads


class LateGPU:
    """Copies are made when `run` is called, and events reached then."""

    def __init__(self):
        self.queue, self.made = [], []
        self.cuda = SimpleNamespace(Event=lambda disable_timing: LateEvent(), get_current_stream=lambda: self)

    def pinned(self, nbytes):
        self.made.append(nbytes)
        return np.zeros(nbytes, np.uint8)

    def copy(self, target, source):
        self.queue.append(lambda: np.copyto(target, source.reshape(target.shape)))

    def run(self):
        while self.queue:
            self.queue.pop(0)()


class LateEvent:
    done = True

    def record(self, gpu):
        self.done = False
        gpu.queue.append(lambda: setattr(self, "done", True))


def test_what_waits_is_kept_and_what_was_copied_is_used_again():
    gpu = LateGPU()
    uploads = Uploads(gpu, gpu.pinned, gpu.copy)
    values, targets = np.zeros((3, 2)), [np.zeros((3, 2)) for _ in range(5)]
    for turn in range(2):
        for number, target in enumerate(targets):
            values[:] = 10 * turn + number  # the host goes on at once
            uploads.send(target, values)
        gpu.run()
        for number, target in enumerate(targets):
            assert (target == 10 * turn + number).all()
    assert gpu.made == [4096] * 5


def test_a_piece_that_is_too_small_is_replaced_and_not_kept_beside():
    gpu = LateGPU()
    uploads = Uploads(gpu, gpu.pinned, gpu.copy)
    for count in (1, 1000, 1, 1000):
        target = np.zeros(count)
        uploads.send(target, np.arange(count) + 0.5)
        gpu.run()
        np.testing.assert_array_equal(target, np.arange(count) + 0.5)
    assert gpu.made == [4096, 8192]
