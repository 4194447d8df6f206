"""FixedTree: adds gradients in the same order for every number of ranks (set_world_invariant).

With M micro-batches on W ranks, both powers of two, rank r has micro-batches r, W + r, 2 W + r and so on. A
reduction adds the gradients of W neighbouring micro-batches by a binary tree (kernels/cpu/reduce.py). The
reductions of a step are added like a binary counter counts, with one array for each bit that is 1. Together
this is one binary tree with M leaves, for every W. With four reductions the arrays hold: 0; 01; 01, 2; 0123.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardrt import autograd, dtypes, random
from shardrt.comm.mesh_layout import size_of, without
from shardrt.fsdp.observers import ScheduleObserver
from shardrt.fsdp.policy import Choices
from shardrt.fsdp.process_groups import ProcessGroups
from shardrt.fsdp.schedule import Schedule
from shardrt.fsdp.setup import units_for
from shardrt.fsdp.sharded_gradient import ShardedGradient
from shardrt.fsdp.streams import Streams
from shardrt.fsdp.unit import Unit, root_of
from shardrt.kernels.determinism import use_deterministic_algorithms
from shardrt.nn.module import Module
from shardrt.nn.moe import Router
from shardrt.nn.storage import LocalStorage
from shardrt.nn.vision import BatchNorm2d


def set_world_invariant(module: Module, micro_batches: int) -> None:
    """Make training bitwise identical on 1, 2, 4, ... ranks. Call it on the outermost module.

    A step has M / W backwards: rank r of W ranks has micro-batch j W + r as its j-th. Then come the optimizer
    step and zero_grad. One tree adds the gradients of all M micro-batches for every W. The divide factor is
    1, so divide the loss of each micro-batch by M, or by the tokens of the step. Dropout masks depend on the
    micro-batch, and gradient norms do not depend on W. If sequences are split over ranks, W counts groups of
    such ranks, and results depend on the size of a group.

    It costs log2(M / W) - 1 more sharded gradients and a reduction for each micro-batch.
    docs/explanation/determinism.md lists what else must be equal. On a GPU, the process computes by
    deterministic algorithms from now on (shardrt.use_deterministic_algorithms).

    Args:
        module: the outermost module, after fully_shard and before its first use.
        micro_batches: M, the micro-batches of a step on all ranks together; a power of two, as is W.

    Raises:
        ValueError: for numbers that don't fit, a `module` without a unit, batch norm (its statistics depend
            on the samples of a rank), and a parameter that two pipeline stages share. When the model is
            built: for gradients on the host, trained parameters that are ignored, nn.balance_over, experts on
            ranks that are no neighbours or with 16-bit gradients, and a mesh without reduction="tree" on
            NCCL.
        RuntimeError: if the model is built already.

    Example:
        >>> from shardrt import nn
        >>> from shardrt.fsdp import fully_shard, set_world_invariant
        >>> model = fully_shard(nn.Linear(8, 2))
        >>> set_world_invariant(model, micro_batches=8)
    """
    normed = next((path for path, part in module.named_modules() if isinstance(part, BatchNorm2d)), None)
    if normed is not None:
        raise ValueError(
            f"set_world_invariant: the statistics of batch norm ({normed}) depend on the number of ranks; "
            "use another norm"
        )
    tied = next((p.name for p in module.parameters() if p.pipeline is not None and p.pipeline.tied), None)
    if tied is not None:
        raise ValueError(
            f"set_world_invariant: {tied!r} is on two stages, and the tree of micro-batches does not add the "
            "gradients of both; untie it"
        )
    for unit in units_for("set_world_invariant", module):
        size = unit.data_ranks // sharing_of(module)
        for name, value in (("micro_batches", micro_batches), ("the number of ranks", size)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"set_world_invariant: {name} must be a power of two, got {value}")
        if micro_batches < size:
            raise ValueError(
                f"set_world_invariant: micro_batches must be at least {size}, the number of ranks, got "
                f"{micro_batches}"
            )
        if unit.schedule is not None:
            raise RuntimeError(
                "set_world_invariant: call it before the optimizer is made and the model is used"
            )
        unit.choices.micro_batches, unit.choices.divide_factor = micro_batches // size, 1.0
        for group in unit.groups:
            group.sharded_gradient = FixedTree(unit.choices)
        if MicroBatchCount not in unit.observers:
            unit.observers.append(MicroBatchCount)
    use_deterministic_algorithms(True)


@dataclass(frozen=True)
class ReductionSlot:
    """The target of a reduction: array `index`, which is then added to the array before, `merges` times.

    Attributes:
        accumulate: the reduction is added to the array's values.
    """

    index: int
    accumulate: bool
    merges: int


def slot_of(number: int) -> ReductionSlot:
    """The target of reduction `number` of a step, counted from 0."""
    set_bits = number.bit_count()
    if number % 2 == 0:
        return ReductionSlot(set_bits, False, 0)
    trailing = (number ^ (number + 1)).bit_length() - 1  # ones at the end of `number`: the carry's length
    return ReductionSlot(set_bits - 1, True, trailing - 1)


def arrays_for(reductions: int) -> int:
    """Number of arrays that adding up `reductions`, a power of two, needs."""
    return max(1, reductions.bit_length() - 1)


class FixedTree(ShardedGradient):
    """A sharded gradient that adds the reductions of a step, whose number is known, by the tree."""

    fixed_tree = True

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self._choices = choices

    def like_new(self) -> "FixedTree":
        return FixedTree(self._choices)

    @property
    def partial_sums(self) -> int:
        return arrays_for(self._choices.micro_batches) - 1

    @property
    def complete(self) -> bool:
        return self.reductions == self._choices.micro_batches

    def refuse_incomplete(self) -> None:
        if self.reductions and not self.complete:
            raise RuntimeError(
                f"unit {self.label}: with set_world_invariant its gradients are complete after "
                f"{self._choices.micro_batches} backwards; so far there were {self.reductions}"
            )

    def _goes_to(self) -> tuple[int, bool]:
        goes = slot_of(self.reductions)
        return goes.index, goes.accumulate

    def _carry(self, streams: Streams) -> None:
        """Add the newest partial sum to the one before, as often as the binary counter carries."""
        goes = slot_of(self.reductions)
        for low in range(goes.index, goes.index - goes.merges, -1):
            add = streams.device.kernels.reduce.sum_into
            streams.reduce.submit(add, self.arrays[low - 1], [self.arrays[low]], 1.0, True)


class MicroBatchCount(ScheduleObserver):
    """Makes dropout masks depend on the number of the micro-batch in the step, not on the rank."""

    def __init__(self, schedule: Schedule) -> None:
        self._units = schedule.units
        self._mesh = schedule.root_unit.settings.mesh
        self._begun = False  # a micro-batch has begun, and its backward has not ended
        self._before = 0  # micro-batches that were complete when this step of a pipeline began
        self._calls = 0  # calls of the model with random numbers before the first micro-batch of the step

    def recording_begins(self) -> None:
        if not self._begun or random.turn() is not None:
            self._begin()
            self._begun = True

    def backward_ends(self) -> None:
        if self._begun:
            self._begun = False
            random.end_micro_batch()

    def _begin(self) -> None:
        groups = [group for unit in self._units for group in unit.groups if group.trainable]
        done = {group.sharded_gradient.reductions for group in groups} or {0}
        done_before, each = max(done), root_of(self._units).choices.micro_batches
        block = root_of(self._units).modules[0].batch_block
        size, rank = self._mesh.size, self._mesh.rank
        if block is not None:  # ranks with parts of the same sequences have the same micro-batch
            size, rank = size // block.together, block.part
        if random.turn() is not None:  # in a pipeline, several forwards precede the first backward
            self._before = done_before if random.turn() == 0 else self._before
            done_before = self._before + random.turn()
        if len(done) > 1 or done_before >= each:
            more = f"this would be one more than {each}" if len(done) == 1 else "it was called for some only"
            raise RuntimeError(
                f"set_world_invariant: a step has {each} backwards of {size} micro-batches, then "
                f"zero_grad of all parameters; {more}"
            )
        if done_before == 0:
            self._calls = random.calls()
        random.begin_micro_batch(done_before * size + rank, self._calls)


def check_world_invariant(units: list[Unit]) -> None:
    """Raise ValueError unless one tree adds all trained gradients of the model, or no unit uses a tree."""
    first = root_of(units)
    for u in units:
        if micro_batches_of(u) != micro_batches_of(first):
            raise ValueError(
                f"set_world_invariant: unit {u.label} has micro_batches {micro_batches_of(u)}, {first.label} "
                f"{micro_batches_of(first)}; call it on the outermost module, after fully_shard"
            )
        if micro_batches_of(u) is not None and u.settings.offloaded.gradients:
            raise ValueError(
                f"set_world_invariant: unit {u.label} has its gradients on the host, where they are not "
                "added by a tree; use CPUOffloadPolicy(gradients=False)"
            )
        summed = next((p for p in u.parameters if p.placement and p.placement.partial), None)
        if micro_batches_of(u) is not None and summed is not None:
            lora = summed.name.rpartition(".")[2] in ("lora_a", "lora_b")
            remedy = "with SequenceParallel call set_tensor_invariant, and leave TokenParallel out"
            raise ValueError(
                f"set_world_invariant: the gradient of {summed.name!r} is summed over "
                f"{summed.placement.mesh!r} too, not by the tree of micro-batches; "
                f"{'leave adapters out' if lora else remedy}"
            )
        if micro_batches_of(u) is not None:
            _check_experts(u, first)
        trained = {group.key.dtype for group in u.groups if group.trainable}
        if micro_batches_of(u) is not None and trained - {"float32"}:
            raise ValueError(f"set_world_invariant: trained parameters of unit {u.label} must be float32")
    parameters = [p for module in first.modules for p in module.parameters() if p.requires_grad]
    alone = [p for p in parameters if isinstance(p.storage, LocalStorage)]
    if micro_batches_of(first) is not None and alone:
        raise ValueError(
            f"set_world_invariant: parameter {alone[0].name!r} is ignored, so its gradient is not reduced; "
            "freeze it, or shard it"
        )


def _check_experts(unit: Unit, first: Unit) -> None:
    """Raise ValueError unless the ranks of experts add neighbouring leaves of the tree, in float32."""
    for group in unit.groups:
        apart = [
            p.placement.mesh.ranks
            for p in group.parameters
            if p.placement is not None and p.placement.own_data
        ]
        places = np.searchsorted(first.settings.mesh.ranks.ravel(), apart[0].ravel()) if apart else ()
        if (np.diff(places) != 1).any():
            raise ValueError(
                f"set_world_invariant: the ranks with experts of unit {unit.label} must be adjacent among "
                "those of the data; use an axis of mesh.fold"
            )
        if apart and group.key.reduce in dtypes.LOW:
            raise ValueError(
                f"set_world_invariant: gradients of the experts of unit {unit.label} are added before they "
                'are rounded to 16 bits; use MixedPrecisionPolicy(reduce_dtype="float32")'
            )
    data, alone = first.settings.mesh.axes, sharing_of(first.modules[0])
    for router in (m for top in unit.modules for m in top.modules() if isinstance(m, Router)):
        along = () if router.balance_mesh is None else router.balance_mesh.axes
        if size_of(along) > size_of(without(along, data)) * alone:
            raise ValueError(
                "set_world_invariant: nn.balance_over makes a balance loss of the micro-batches that all "
                "ranks compute at one time; leave nn.balance_over out"
            )


def sharing_of(module: Module) -> int:
    """Number of data ranks that have parts of the same samples."""
    with autograd.enable_grad():
        block = module.batch_block
    return 1 if block is None else block.together


def check_sums(units: list[Unit], used: Iterable[ProcessGroups]) -> None:
    """Raise ValueError unless all communicators that reduce gradients add by a tree."""
    first = root_of(units)
    reducers = [made for ranks in used for made in (ranks.reduce, ranks.replicate) if made]
    if micro_batches_of(first) is not None and any(made.reduction != "tree" for made in reducers):
        raise ValueError(
            "set_world_invariant: NCCL adds in an order that depends on the number of ranks; make the mesh "
            "by init_device_mesh(..., reduction='tree')"
        )


def micro_batches_of(unit: Unit) -> int | None:
    """Micro-batches of a step over all ranks; None without set_world_invariant."""
    per_rank = unit.choices.micro_batches
    return None if per_rank is None else per_rank * unit.data_ranks
