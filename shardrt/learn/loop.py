"""Exercise: turn a training loop of one rank into FULL_SHARD."""

import weakref
from types import ModuleType

import numpy as np

from shardrt import device
from shardrt.comm import init_device_mesh, thread
from shardrt.learn.checking import Hint, compile_sums, equal, function

TITLE = "Shard a training loop"
LEVEL = "medium"
TEACHES = "where FULL_SHARD gathers, releases and reduces"
TAKEAWAY = (
    "FULL_SHARD is the loop of one rank with a gather before each use and a reduce-scatter after each gradient. "
    "The rest of an FSDP runtime hides the time of these calls and reuses their buffers."
)

START = '''"""Exercise 5: shard a training loop.

one_rank below trains a net of linear layers, with ReLU in between, on one rank. Write the same step for one of
N ranks that each hold 1/N of every layer:

    shards[i]                     this rank's part of layer i, 1-D; change it in place
    shapes[i]                     the shape of layer i
    x, target                     this rank's rows of the batch
    rows                          the rows of all ranks together
    ranks.all_gather(shard)       the whole layer, 1-D, a new array on every rank
    ranks.reduce_scatter(whole)   this rank's part of the sum over ranks, 1-D

Follow FULL_SHARD: gather a layer for its forward, forget it, and gather it again for its backward. At most two
whole layers may exist at once: the one in use and the one that arrives. Do not keep them in a list.
"""

import numpy as np


def one_rank(layers, x, target, rows, rate):
    inputs = []
    for layer in layers:
        inputs.append(x)
        x = np.maximum(x @ layer, 0) if layer is not layers[-1] else x @ layer
    dy = 2 * (x - target) / rows  # of the squared error, averaged over all rows
    for i in reversed(range(len(layers))):
        gradient = inputs[i].T @ dy
        dy = dy @ layers[i].T * (inputs[i] > 0)
        layers[i] -= rate * gradient


def step(ranks, shards, shapes, x, target, rows, rate):
    """One step of the rank that calls."""
    raise NotImplementedError
'''

_SHAPES = ((4, 6), (6, 12), (12, 6), (6, 2))
_ROWS, _RATE, _STEPS = 12, 0.05, 3


class _Ranks:
    """The collectives, and the most whole layers that were alive when another one was gathered."""

    def __init__(self) -> None:
        self._communicator = init_device_mesh("cpu").communicator("control")
        self._stream = device.current().current_stream
        self._wholes: list[weakref.ref] = []
        self.gathers = self.reductions = self.most = 0

    def all_gather(self, shard):
        self.gathers += 1
        self._wholes = [whole for whole in self._wholes if whole() is not None]
        self.most = max(self.most, len(self._wholes) + 1)
        size, rank = self._communicator.size, self._communicator.rank
        whole = np.empty(size * shard.size, np.float32)
        np.split(whole, size)[rank][:] = shard
        self._communicator.all_gather(whole, stream=self._stream)
        self._wholes.append(weakref.ref(whole))
        return whole

    def reduce_scatter(self, whole):
        self.reductions += 1
        whole = np.ascontiguousarray(whole, np.float32).reshape(-1)
        part = np.empty(whole.size // self._communicator.size, np.float32)
        self._communicator.reduce_scatter(part, whole, stream=self._stream)
        return part


prepare = compile_sums


def check(answer: ModuleType) -> str:
    """Three steps on 1 to 3 ranks, compared with one rank."""
    step = function(answer, "step")
    random = np.random.default_rng(0)
    initial = [random.normal(size=shape).astype(np.float32) for shape in _SHAPES]
    x = random.normal(size=(_ROWS, 4)).astype(np.float32)
    target = np.sin(x[:, :2])
    started: dict = {}
    exec(START, started)
    expected = [layer.copy() for layer in initial]
    for _ in range(_STEPS):
        started["one_rank"](expected, x, target, _ROWS, _RATE)
    for size in (1, 2, 3):

        def on_rank(size=size):
            ranks, rank = _Ranks(), init_device_mesh("cpu").rank
            shards = [np.split(layer.reshape(-1), size)[rank].copy() for layer in initial]
            own = slice(rank, None, size)
            for _ in range(_STEPS):
                step(ranks, shards, list(_SHAPES), x[own].copy(), target[own].copy(), _ROWS, _RATE)
            return ranks, shards

        _check(thread.run(size, on_rank), initial, expected, size)
    return "the weights after three steps on 1, 2 and 3 ranks, the number of collectives, and the whole layers alive."


def _check(results: list, initial: list, expected: list, size: int) -> None:
    ranks, layers = results[0][0], len(expected)
    found = [np.concatenate([shards[i] for _, shards in results]) for i in range(layers)]
    reductions, gathers = ranks.reductions / _STEPS, ranks.gathers / _STEPS
    if all(np.array_equal(array, layer.reshape(-1)) for array, layer in zip(found, initial, strict=True)):
        raise Hint("The shards do not change. Update shards[i] in place, as in shards[i] -= ...")
    if reductions != layers:
        raise Hint(
            f"A step has {layers} gradients and {reductions:g} reduce-scatters. A rank's own gradient is that of "
            "its own rows: the ranks' gradients must be added."
        )
    if ranks.most > 2:
        raise Hint(
            f"{ranks.most} whole layers exist at once. Keep none from forward to backward: gather it again, and let "
            "the name of the old one go."
        )
    if gathers != 2 * layers:
        raise Hint(
            f"FULL_SHARD gathers each layer twice a step, {2 * layers} gathers in all. Yours: {gathers:g}."
        )
    for i, layer in enumerate(expected):
        if not equal(found[i], layer.reshape(-1), "step", 1e-4):
            divided = "Divide by nothing: `rows` counts those of all ranks already. " if size > 1 else ""
            raise Hint(
                f"On {size} ranks layer {i} differs from one rank. {divided}Gather a layer for its backward before "
                "its update, and add gradients by reduce_scatter alone."
            )
