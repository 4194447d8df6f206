"""A storage for tests of optimizers: a few parameters in one flat array, placed on host or device at will."""

import time

import numpy as np

from shardrt import device, nn, optim
from shardrt.nn.extents import contiguous
from shardrt.nn.storage import Offloaded, Storage

SIZES = (370, 1500, 2603, 991, 40)  # no multiple of anything
UNOWNED = 3  # the parameter that no optimizer gets


class HostStorage(Storage):
    """Parameters of SIZES. `reduce` gives it a gradient as backward does: in another stream, late."""

    def __init__(self, placement=None, sizes=SIZES, dtype=np.float32, seed=0, delay=0.0):
        self.offloaded = placement or Offloaded()
        self.delay = delay
        self._dtype = np.dtype(dtype)
        self._stops = np.cumsum(sizes)
        self._files = 0
        here = device.current()
        self._stream = here.new_stream("reduce")
        self.gradient_ready = here.new_event()
        self._has_gradient = False
        self._shard = self._array("shard", self.offloaded.parameters)
        self._gradient = self._array("gradient", self.offloaded.gradients)
        self._shard[:] = np.random.default_rng(seed).normal(size=self._shard.size)
        self.parameters = [nn.Parameter((size,), nn.init.Zeros(), dtype=dtype) for size in sizes]
        for index, parameter in enumerate(self.parameters):
            parameter.storage = self
            parameter._attribute = f"p{index}"

    def groups(self):
        """Two groups with settings of their own, whose parameters alternate in memory."""
        owned = [p for index, p in enumerate(self.parameters) if index != UNOWNED]
        return [{"params": owned[::2], "lr": 0.03, "weight_decay": 0.2}, {"params": owned[1::2]}]

    def reduce(self, values):
        """The gradient becomes, or grows by, `values`, some time from now."""
        self._stream.submit(self._reduce, values, self._has_gradient, label="reduce")
        self._stream.record(self.gradient_ready)
        self._has_gradient = True
        if self.on_gradient is not None:
            self.on_gradient()

    def _reduce(self, values, accumulate):
        time.sleep(self.delay)
        self._gradient[:] = self._gradient + values if accumulate else values

    def _array(self, name, on_host, dtype=None):
        count, dtype = int(self._stops[-1]), dtype or self._dtype
        if not on_host or self.offloaded.directory is None:
            return np.zeros(count, dtype)
        return np.memmap(self.offloaded.directory / name, dtype, "w+", shape=(count,))

    def new_state(self, name, dtype=None):
        return self._array(name, self.offloaded.optimizer_state, dtype)

    def modified(self, copy_too=False):
        pass

    @property
    def shard(self):
        return self._shard

    @property
    def gradient(self):
        return self._gradient if self._has_gradient else None

    def range_of(self, parameter):
        stop = int(self._stops[[p is parameter for p in self.parameters].index(True)])
        return stop - parameter.size, stop

    def extents_of(self, parameter):
        return contiguous(0, parameter.size)

    def zero_grad(self):
        self.applied = False
        self._has_gradient = False

    def full(self, parameter):
        raise NotImplementedError

    edge = gradient_target = full


class SlowAdamW(optim.AdamW):
    """Every call of its kernel takes UPDATE seconds longer."""

    UPDATE = 0.02

    def update(self, kernels, update):
        time.sleep(self.UPDATE)
        super().update(kernels, update)


def gradients(steps, sizes=SIZES, seed=1):
    """Gradients of all sizes, one array per step."""
    random, count = np.random.default_rng(seed), sum(sizes)
    return [
        (10.0 ** random.uniform(-3, 1) * random.normal(size=count)).astype(np.float32) for _ in range(steps)
    ]


def snapshot(storage, optimizer):
    """Copies of everything that an update writes, on whichever side it lives."""
    return {"shard": np.array(storage.shard)} | {
        name: np.array(array) for piece in optimizer.slices for name, array in piece.state.items()
    }


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name].view(np.uint8), values.view(np.uint8)), name
