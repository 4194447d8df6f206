"""FSDP from scratch, with NumPy and threads alone: python examples/microfsdp.py [STRATEGY] [RANKS]

A rank is a thread, and a stream is a pool of one thread that runs its work in order. Weights are bitwise
identical to those that shardrt trains (tests/test_examples.py), which has these parts in shardrt/fsdp.
"""

import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

# 1. Collectives. Every rank of a group calls the same collectives in the same order.


class Group:
    """Some ranks that exchange arrays. Two streams must not share a group: their calls would mix."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.arrays: list[np.ndarray] = [np.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=60)  # for when a rank has raised

    def exchange(self, rank: int, array: np.ndarray, use):
        """use(the arrays of all ranks). No rank goes on before all ranks have used them."""
        self.arrays[rank] = array
        self.barrier.wait()
        result = use(self.arrays)
        self.barrier.wait()
        return result

    def all_gather(self, rank: int, shard: np.ndarray) -> np.ndarray:
        """The shards of all ranks, one after the other."""
        return self.exchange(rank, shard, np.concatenate)

    def reduce_scatter(self, rank: int, full: np.ndarray) -> np.ndarray:
        """This rank's shard of the sum of all ranks' arrays."""
        return self.exchange(
            rank, full, lambda fulls: tree_sum([np.split(f, self.size)[rank] for f in fulls])
        )


def tree_sum(parts: list[np.ndarray]) -> np.ndarray:
    """(0 + 1) + (2 + 3): bitwise identical to sums within groups of 2, then over the groups."""
    while len(parts) > 1:
        pairs = [left + right for left, right in zip(parts[::2], parts[1::2])]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0].copy()


# 2. Layers. A layer owns no arrays: it gets its parameters when it runs.


class Layer:
    """y = relu(x @ weight + bias); the last layer leaves relu out."""

    def __init__(self, inputs: int, outputs: int, relu: bool) -> None:
        self.shapes = ((inputs, outputs), (outputs,))
        self.relu = relu

    def forward(self, parameters, x):
        """(y, what backward needs)."""
        weight, bias = parameters
        y = x @ weight + bias
        return (np.maximum(y, 0) if self.relu else y), (x, y)

    def backward(self, parameters, saved, dy):
        """(gradient of x, gradients of the parameters)."""
        (weight, _), (x, y) = parameters, saved
        if self.relu:
            dy = dy * (y > 0)
        return dy @ weight.T, (x.T @ dy, dy.sum(axis=0))


# 3. Strategies: all of them run the schedule below, and differ in three facts.


class Rules(NamedTuple):
    shard_over: str  # "all" ranks, the ranks of one "node", or "none": every rank has everything
    keep_after_forward: bool  # the gathered parameters stay until backward
    keep_after_backward: bool  # the gathered parameters stay until the optimizer step


STRATEGIES = {
    "NO_SHARD": Rules("none", True, True),  # as DDP
    "SHARD_OPT": Rules("all", True, True),  # as ZeRO-1
    "SHARD_GRAD_OP": Rules("all", True, False),  # as ZeRO-2
    "FULL_SHARD": Rules("all", False, False),  # as ZeRO-3
    "HYBRID_SHARD": Rules("node", False, False),  # ZeRO-3 in each node, copies on the other nodes
    "HYBRID_SHARD_GRAD_OP": Rules("node", True, False),
}


class ProcessGroups(NamedTuple):
    gather: Group  # ranks that together have all shards of a unit
    reduce: Group  # the same ranks, for the reduce stream
    replicate: Group  # ranks that have the same shard
    shard_rank: int
    replica_rank: int


def process_groups(strategy: str, ranks: int) -> list[ProcessGroups]:
    """The groups of every rank. A node has two ranks."""
    shards = {"all": ranks, "node": 2, "none": 1}[STRATEGIES[strategy].shard_over]
    if ranks % shards:
        raise ValueError(f"{strategy} needs an even number of ranks, got {ranks}")
    nodes = [(Group(shards), Group(shards)) for _ in range(ranks // shards)]
    copies = [Group(ranks // shards) for _ in range(shards)]
    return [
        ProcessGroups(*nodes[rank // shards], copies[rank % shards], rank % shards, rank // shards)
        for rank in range(ranks)
    ]


# 4. A unit: the parameters of one layer in one flat buffer, which is cut into equal shards.


class Unit:
    """One layer, and this rank's shard of its parameters."""

    def __init__(self, layer: Layer, initial: list[np.ndarray], groups: ProcessGroups) -> None:
        self.layer, self.groups = layer, groups
        self.sizes = [values.size for values in initial]
        self.shard_size = -(-sum(self.sizes) // groups.gather.size)  # rounded up: the buffer ends in padding
        self.shard = np.split(self.flat(initial), groups.gather.size)[groups.shard_rank].copy()
        self.gathered: Future | None = None  # the flat buffer of all parameters, or the gather under way
        self.reduced: Future | None = None  # the gradient of the shard, or the reduction under way

    def flat(self, arrays) -> np.ndarray:
        """One 1-D array of all values, with padding at the end."""
        padding = np.zeros(self.shard_size * self.groups.gather.size - sum(self.sizes), np.float32)
        return np.concatenate([*(array.ravel() for array in arrays), padding])

    def views(self) -> list[np.ndarray]:
        """The parameters in the gathered buffer. Waits for the gather."""
        pieces = np.split(self.gathered.result(), np.cumsum(self.sizes))
        return [piece.reshape(shape) for piece, shape in zip(pieces, self.layer.shapes)]

    def issue_gather(self, stream: ThreadPoolExecutor) -> None:
        """Begin the all-gather unless the parameters are there or under way."""
        if self.gathered is None:
            self.gathered = stream.submit(self.groups.gather.all_gather, self.groups.shard_rank, self.shard)

    def release(self) -> None:
        """Drop the gathered parameters; the shard stays."""
        self.gathered = None

    def issue_reduce(self, gradients, stream: ThreadPoolExecutor) -> None:
        """Begin the reduction of this rank's full gradients to the gradient of the shard."""
        self.reduced = stream.submit(self._reduce, self.flat(gradients))

    def _reduce(self, full: np.ndarray) -> np.ndarray:
        groups = self.groups
        mine = groups.reduce.reduce_scatter(groups.shard_rank, full)
        total = groups.replicate.exchange(groups.replica_rank, mine, tree_sum)  # an all-reduce
        return total * np.float32(1 / (groups.reduce.size * groups.replicate.size))  # mean over ranks


# 5. The schedule: what FSDP is. A unit is gathered just before it is used, and the next one meanwhile.


class FSDP:
    """The units of a model on one rank, with a stream for gathers and one for reductions."""

    def __init__(self, layers, initial, strategy: str, groups: ProcessGroups, prefetch: int = 1) -> None:
        self.units = [Unit(layer, arrays, groups) for layer, arrays in zip(layers, initial)]
        self.rules = STRATEGIES[strategy]
        self.prefetch = prefetch
        self.gather_stream, self.reduce_stream = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def gather(self, upcoming: list[Unit]) -> list[np.ndarray]:
        """The parameters of the first unit. Begins the gathers of the next ones, too."""
        for unit in upcoming[: 1 + self.prefetch]:
            unit.issue_gather(self.gather_stream)
        return upcoming[0].views()

    def forward(self, x: np.ndarray) -> np.ndarray:
        """The model's output. Keeps what backward needs."""
        self.saved = []
        for i, unit in enumerate(self.units):
            x, saved = unit.layer.forward(self.gather(self.units[i:]), x)
            self.saved.append(saved)
            if not (self.rules.keep_after_forward or unit is self.units[-1]):  # backward begins with the last
                unit.release()
        return x

    def backward(self, dy: np.ndarray) -> None:
        """Compute all gradients, and begin to reduce each unit's as soon as they are complete."""
        for i in reversed(range(len(self.units))):
            unit = self.units[i]
            dy, gradients = unit.layer.backward(self.gather(self.units[i::-1]), self.saved[i], dy)
            unit.issue_reduce(gradients, self.reduce_stream)
            if not self.rules.keep_after_backward:
                unit.release()

    def step(self, lr: float) -> None:
        """SGD on this rank's shards. Gathered parameters are old after it."""
        for unit in self.units:
            unit.shard -= np.float32(lr) * unit.reduced.result()
            unit.release()

    def parameters(self) -> list[list[np.ndarray]]:
        """Copies of all parameters. Every rank must call it."""
        return [[view.copy() for view in self.gather([unit])] for unit in self.units]


# 6. Training: each rank has its rows of the batch, and the mean of squared errors as loss.

LAYERS = [Layer(8, 32, True), Layer(32, 32, True), Layer(32, 32, True), Layer(32, 1, False)]


def initial_values() -> list[list[np.ndarray]]:
    """The same values on every rank: a weight and a bias for each layer."""
    draw = np.random.default_rng(0).standard_normal
    return [
        [(draw(shape) / np.sqrt(shape[0])).astype(np.float32) for shape in layer.shapes] for layer in LAYERS
    ]


def batch(step: int, rows: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (rows, 8) and targets (rows, 1): the same on every rank."""
    x = np.random.default_rng(step).standard_normal((rows, 8)).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True))


def train(model: FSDP, rank: int, ranks: int, steps: int, lr: float, report=None):
    """Train on this rank's rows of each batch; gives the parameters in the end."""
    for step in range(steps):
        x, target = (np.split(array, ranks)[rank] for array in batch(step))
        error = model.forward(x) - target
        if report and rank == 0:
            report(step, float((error**2).mean()))
        model.backward(error * np.float32(2 / error.size))
        model.step(lr)
    return model.parameters()


def run(strategy: str = "FULL_SHARD", ranks: int = 2, steps: int = 30, lr: float = 0.05, report=None):
    """Train on `ranks` threads; gives each rank's parameters, which are equal."""
    groups = process_groups(strategy, ranks)
    models = [FSDP(LAYERS, initial_values(), strategy, each) for each in groups]
    with ThreadPoolExecutor(ranks) as threads:
        jobs = [threads.submit(train, models[rank], rank, ranks, steps, lr, report) for rank in range(ranks)]
    return [job.result() for job in jobs]


if __name__ == "__main__":
    name, count, *_ = [*sys.argv[1:], *["FULL_SHARD", "2"][len(sys.argv) - 1 :]]
    run(name, int(count), report=lambda step, loss: step % 10 or print(f"step {step:3}  loss {loss:.4f}"))
