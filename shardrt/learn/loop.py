"""Exercise: turn a training loop of one rank into FULL_SHARD."""

import weakref
from types import ModuleType

import numpy as np

from shardrt import device
from shardrt.comm import init_device_mesh, thread
from shardrt.learn.checking import compile_sums, equal, function, need, started

TITLE = "Shard a training loop"
LEVEL = "medium"
TEACHES = "where FULL_SHARD gathers, releases and reduces"
TAKEAWAY = (
    "FULL_SHARD is the loop of one rank with a gather before each use and a reduce-scatter after each "
    "gradient. The rest of an FSDP runtime hides the time of these calls and reuses their buffers."
)

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
    one_rank = started("loop")["one_rank"]
    expected = [layer.copy() for layer in initial]
    for _ in range(_STEPS):
        one_rank(expected, x, target, _ROWS, _RATE)
    for size in (1, 2, 3):

        def on_rank(size=size):
            ranks, rank = _Ranks(), init_device_mesh("cpu").rank
            shards = [np.split(layer.reshape(-1), size)[rank].copy() for layer in initial]
            own = slice(rank, None, size)
            for _ in range(_STEPS):
                step(ranks, shards, list(_SHAPES), x[own].copy(), target[own].copy(), _ROWS, _RATE)
            return ranks, shards

        _check(thread.run(size, on_rank), initial, expected, size)
    return "three steps on 1, 2 and 3 ranks: weights, collectives, and whole layers that exist at once."


def _check(results: list, initial: list, expected: list, size: int) -> None:
    ranks, layers = results[0][0], len(expected)
    found = [np.concatenate([shards[i] for _, shards in results]).reshape(_SHAPES[i]) for i in range(layers)]
    moved = any(not np.array_equal(*pair) for pair in zip(found, initial, strict=True))
    need(moved, "The shards do not change. Update shards[i] in place, as in shards[i] -= ...")
    reductions, gathers = ranks.reductions / _STEPS, ranks.gathers / _STEPS
    need(
        reductions == layers,
        f"A step has {layers} gradients and {reductions:g} reduce-scatters. A rank's own gradient is that of "
        "its own rows: the ranks' gradients must be added.",
    )
    need(
        ranks.most <= 2,
        f"{ranks.most} whole layers exist at once. Keep none from forward to backward: gather it again, and "
        "let the name of the old one go.",
    )
    need(
        gathers == 2 * layers,
        f"FULL_SHARD gathers each layer twice a step, {2 * layers} gathers in all. Yours: {gathers:g}.",
    )
    divided = "Divide by nothing: `rows` counts those of all ranks already. " if size > 1 else ""
    for i, layer in enumerate(expected):
        need(
            equal(found[i], layer, "step", 1e-4),
            f"On {size} ranks layer {i} differs from one rank. {divided}Gather a layer for its backward "
            "before its update, and add gradients by reduce_scatter alone.",
        )
