"""Context parallelism: sequences that lie on the ranks of an axis, each of which has two chunks of every one.

Only attention looks at other positions; all else acts on each by itself and does not know. Ranks of the axis
have all parameters alike, and gradients of other positions: so to fully_shard they are ranks of the data.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardrt import device
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.mesh_layout import union, without
from shardrt.fsdp.setup import units_below
from shardrt.functional.context import ROLE, context_attention, own_chunks, positions_of
from shardrt.nn.module import Module, WrapperOrder
from shardrt.nn.moe import Router
from shardrt.nn.storage import LocalStorage
from shardrt.parallel.axis import Axis, batch_of, recorded
from shardrt.parallel.conversion import check_whole
from shardrt.parallel.styles import Style, check_alone
from shardrt.tensor import Tensor

Array = Any


class SequencePart(NamedTuple):
    """A rank's slice of some sequences: (batch, time / ranks) each, positions (time / ranks,).

    Attributes:
        starts: where the document of each token begins in the whole sequence, on the device; or None.
    """

    tokens: Array
    targets: Array
    positions: np.ndarray
    starts: Array


def shard_sequence(
    tokens: Array, targets: Array = None, *, mesh: DeviceMesh, starts: Array = None
) -> SequencePart:
    """This rank's slice of sequences that all ranks of the one axis of `mesh`, as mesh["cp"], have alike.

    Of 2 n chunks of time, rank r of n has r and 2n - 1 - r: with causal attention, equal work.

    Args:
        tokens, targets: (batch, time), arrays of the host or the device.
        starts: F.document_starts of the whole sequences.

    Raises:
        ValueError: for a time that is no multiple of 2 n, shapes that differ, a mesh of several axes.
    """
    if len(mesh.shape) > 1:
        raise ValueError(f'shard_sequence: mesh must have one axis, as mesh["cp"]; got {mesh!r}')
    for name, given in (("targets", targets), ("starts", starts)):
        if given is not None and given.shape != tokens.shape:
            raise ValueError(
                f"shard_sequence: {name} must be {tokens.shape}, the shape of tokens, got {given.shape}"
            )
    if tokens.ndim != 2:
        raise ValueError(f"shard_sequence: tokens must be (batch, time), got {tokens.shape}")
    positions = positions_of(tokens.shape[1], mesh.rank, mesh.size)
    parts = [None if x is None else _taken(x, positions) for x in (tokens, targets, starts)]
    return SequencePart(parts[0], parts[1], positions, parts[2])


def _taken(x: Array, positions: np.ndarray) -> Array:
    return x[:, device.of(x).asarray(positions)]


def context_plan(model: Module) -> dict[str, Style]:
    """The plan for a model: every module in it that ContextParallel fits. TypeError if there is none."""
    style = ContextParallel()
    plan = {path: style for path, module in model.named_modules() if style.fits(module)}
    if not plan:
        raise TypeError(
            f"context_plan: a {type(model).__name__} has no causal attention, so its sequences can't be split"
        )
    return plan


class Context:
    """Used by an attention module, as its `context`: where a sequence lies, and how it attends there."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def in_parts(self, positions: Array | None) -> bool:
        """Whether a call with these positions is for slices of sequences; without them it is for the whole.

        Raises:
            ValueError: for positions of another part than this rank's, and where gradients of the whole are
                wanted, which would count once for each rank.
        """
        if positions is not None:
            self._check(positions)
        elif recorded():
            raise ValueError(
                f"ContextParallel: ranks of {self.mesh!r} train on parts of sequences: call the model with "
                "what shard_sequence gives, positions too"
            )
        return positions is not None

    def _check(self, positions: Array) -> None:
        """Attention takes its keys and its mask from the rank, not from the positions: they must agree."""
        rank, ranks = self.mesh.rank, self.mesh.size
        count = len(positions)
        own = None if count % 2 else positions_of(count * ranks, rank, ranks)
        if not np.array_equal(positions, own):
            first, last = (f"chunk {number}" for number in own_chunks(rank, ranks))
            got = np.array2string(np.asarray(positions), threshold=6)
            raise ValueError(
                f"positions: rank {rank} of {ranks} has {first} and {last} of {2 * ranks} equal ones, "
                f"got {count} positions {got}: call the model with what shard_sequence gives"
            )

    def attend(
        self, qkv: Tensor, heads: int, kv_heads: int, starts: Array, window: int | None = None
    ) -> Tensor:
        """As F.self_attention of the whole sequences, of which this is a part."""
        return context_attention(qkv, heads, self.mesh, kv_heads=kv_heads, starts=starts, window=window)


class Summing:
    """Around the whole model: its gradients are of a slice of each sequence, until ranks add them up.

    Raises:
        ValueError: where no unit adds them up.
        RuntimeError: where the model is not the whole any more.
    """

    layer, every_entry = WrapperOrder.MODEL, False

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._checked = mesh, False

    def __deepcopy__(self, memo: dict) -> "Summing":
        raise TypeError(f"copy.deepcopy: the model's sequences lie on {self._mesh!r}, so it can't be copied")

    def run(self, module: Module, forward: Callable, /, *args: Any, **kwargs: Any) -> Any:
        check_whole(module)
        if not self._checked and recorded() and device.current() is self._mesh.device:
            self._check(module)
            self._checked = True
        return forward(*args, **kwargs)

    def _check(self, module: Module) -> None:
        take = 'fully_shard(..., mesh=mesh.flat("dp_shard", "cp"))'
        for unit in units_below(module):
            apart = [
                p.placement.axes for p in unit.parameters if p.placement is not None and p.placement.own_data
            ]
            summed = union(unit.settings.mesh.axes, *apart)
            if without(self._mesh.axes, summed):
                raise ValueError(
                    f"ContextParallel: gradients of unit {unit.label} are summed over {unit.settings.mesh!r} "
                    f"alone, not over {self._mesh!r}, along which sequences lie: {take}"
                )
        for parameter in module.parameters():
            storage = parameter.storage
            if parameter.requires_grad and isinstance(storage, LocalStorage) and not storage.ignored:
                raise ValueError(
                    f"ContextParallel: the gradient of {parameter.name!r} is not summed over "
                    f"{self._mesh!r}: {take}"
                )


@dataclass(frozen=True)
class ContextParallel(Style):
    """A module with causal attention, whose sequences lie on the ranks of the axis: GPT's and Llama's here.

    In a separate plan, on a separate axis. Such a module has a class attribute `context`, None, which
    becomes a Context: where `context.in_parts(positions)`, it asks `context.attend` in place of
    F.self_attention (models/attend.py).
    """

    modules = ()

    @property
    def wanted(self) -> str:
        return "modules with causal attention, which have a `context`"

    def fits(self, module: Module) -> bool:
        return hasattr(type(module), "context")

    def apply(self, module: Module, axis: Axis) -> None:
        if module.context is not None:
            raise ValueError(
                f"ContextParallel: {module.name!r} already has sequences on {module.context.mesh!r}"
            )
        module.context = Context(axis.mesh)


def lay_out_sequences(model: Module, mesh: DeviceMesh, modules: Iterable[tuple[Module, Style]]) -> None:
    """parallelize_module for a plan of this style.

    Raises:
        ValueError: for other styles next to it.
    """
    check_alone(ContextParallel, modules, "on an axis of its own")
    for role in (ROLE, "control"):
        mesh.communicator(role)
    batch = batch_of(model, mesh.root)
    axis = Axis(mesh, False, batch)
    for module, style in modules:
        style.apply(module, axis)
    batch.same += mesh.axes
    batch.chunks = own_chunks(mesh.rank, mesh.size), 2 * mesh.size
    for module in model.modules():
        if isinstance(module, Router):
            module.balance_along(mesh)
    model.wrap_forward(Summing(mesh))
