"""Axis: the ranks over which modules are split, and how activations go from one kind to another there.

The kinds are those of functional/collective.py. Between modules an activation is the same on all ranks (I),
or with sequence parallelism each rank's slice of the time (V), which is the axis before the last.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardrt import autograd, random
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.mesh_layout import MeshLayout
from shardrt.comm.protocol import Communicator
from shardrt.comm.single import SingleCommunicator
from shardrt.device import Stream
from shardrt.functional import collective
from shardrt.nn.extents import Extents
from shardrt.nn.module import Module
from shardrt.nn.parameter_placement import SHARD, ParameterPlacement
from shardrt.tensor import Tensor

TIME = -2


def recorded() -> bool:
    """Whether the running op has a backward. The first run of recomputed ops has one, though unrecorded."""
    runs_twice = autograd.in_first_run() is not None or autograd.in_second_run() is not None
    return runs_twice or autograd.is_grad_enabled()


class Batch:
    """Which part of the batch this rank has. Called, the block of activations: a model's `batch_block`."""

    def __init__(self, root: DeviceMesh) -> None:
        self.root = root
        self.same: MeshLayout = ()  # the axes of the root mesh whose ranks have the same slice of the batch
        self.chunks: tuple[tuple[int, ...], int] = (0,), 1  # of that part's time, which it has, of how many

    @property
    def part(self) -> int:
        """This rank's number along the other axes."""
        return self.root.index_except(self.same)

    def __call__(self) -> random.Block:
        return random.Block(self.part, *self.chunks) if recorded() else random.Block(self.part)


def batch_of(model: Module, root: DeviceMesh) -> Batch:
    """The batch block of a model, made at the first call."""
    if not isinstance(model._block, Batch):
        model.set_batch_block(Batch(root))
    return model._block


class Axis:
    """mesh: of one axis. sequence: whether activations between modules are split along time, for backward."""

    def __init__(self, mesh: DeviceMesh, sequence: bool, batch: Batch) -> None:
        self.mesh = mesh
        self.sequence = sequence
        self.batch = batch
        self._decided: bool | None = None  # whether they are in the call of the model that runs

    @property
    def in_parts(self) -> bool:
        """Whether activations between modules are split now. Without a backward they are few, and whole.

        So evaluation and generation take any number of positions. What the outermost call began with holds
        for all of it, also for what it runs without recording.
        """
        return self.sequence and recorded() if self._decided is None else self._decided

    @contextmanager
    def decided(self) -> Iterator[None]:
        """Let `in_parts` stay what it is inside a with block."""
        before, self._decided = self._decided, self.in_parts
        try:
            yield
        finally:
            self._decided = before

    @property
    def rank(self) -> int:
        """This rank's number on the axis."""
        return self.mesh.rank

    @property
    def size(self) -> int:
        """How many ranks there are on it."""
        return self.mesh.size

    @property
    def communicator(self) -> Communicator:
        """The process group of activations and their gradients."""
        return self.mesh.communicator("tensor")

    def block(self) -> random.Block:
        """Which block this rank has of an activation between modules, which may be split along time."""
        return self.batch().cut(self.rank, self.size) if self.in_parts else self.batch()

    def cut(
        self,
        whole: tuple[int, ...],
        shape: tuple[int, ...],
        parts: tuple[Extents, ...],
        words: Any = None,
    ) -> ParameterPlacement:
        """The share of a parameter of which each rank has a part of its own."""
        return ParameterPlacement(SHARD, self.mesh, whole, shape, parts, words=words)

    def enter(self, x: Tensor, again: bool = False) -> Tensor:
        """An activation for each rank to use in its own way: I or V -> R.

        Args:
            again: as in collective.gather.
        """
        if self.in_parts:
            return collective.gather(x, self.communicator, TIME, self._beside(), again=again)
        return collective.copy_to(x, self.communicator, self._beside())

    def _beside(self) -> Stream | None:
        """The stream in which gradients are summed while a matmul for a weight runs; None: no such stream.

        Not where a call keeps the thread that makes it, as on the CPU: the stream would be a thread, which
        takes the core that the matmul wants (3 to 19 % more of its time;
        docs/explanation/tensor_parallel.md).
        """
        if self.communicator.keeps_host:
            return None
        return self.mesh.stream("tensor")

    def leave(self, x: Tensor) -> Tensor:
        """The sum of the ranks' partial results: P -> I or V."""
        if self.in_parts:
            self.part_of_time(x.shape[TIME])
            return collective.reduce_scatter_to(x, self.communicator, TIME)
        return collective.reduce_from(x, self.communicator)

    def part_of_time(self, positions: int) -> slice:
        """This rank's slice of so many positions.

        Raises:
            ValueError: where they can't be split.
        """
        each, rest = divmod(positions, self.size)
        if rest:
            raise ValueError(
                f"SequenceParallel: {positions} positions must be divisible by the {self.size} ranks"
            )
        return slice(self.rank * each, (self.rank + 1) * each)


class Alone:
    """Replaces an axis where one rank has everything: nothing is split, and no rank sends anything."""

    rank, size = 0, 1

    def __init__(self, sequence: bool) -> None:
        self.sequence = sequence  # whether activations would be split along time
        self.communicator = SingleCommunicator()

    def enter(self, x: Tensor) -> Tensor:
        """As of an axis."""
        return x

    leave = enter
