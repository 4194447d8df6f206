"""What set_world_invariant asks of a model: every gradient by one tree over the micro-batches (tree.py)."""

from collections.abc import Iterable

import numpy as np

from shardrt import autograd, dtypes
from shardrt.comm.digits import size_of, without
from shardrt.fsdp.process_groups import ProcessGroups
from shardrt.fsdp.unit import Unit
from shardrt.nn.module import Module
from shardrt.nn.moe import Router
from shardrt.nn.storage import LocalStorage


def check_world_invariant(units: list[Unit]) -> None:
    """All units add up by one tree, or none does; with a tree, every gradient belongs to a unit."""
    first = units[0]
    for u in units:
        if u.micro_batches != first.micro_batches:
            raise ValueError(
                f"set_world_invariant: unit {u.label} has micro_batches {u.micro_batches}, {first.label} "
                f"{first.micro_batches}; call it on the outermost module, after fully_shard"
            )
        if u.micro_batches is not None and u.settings.placement.gradients:
            raise ValueError(
                f"set_world_invariant: unit {u.label} has its gradients on the host, where they are not "
                "added up by a tree; give CPUOffloadPolicy(gradients=False)"
            )
        if u.micro_batches is not None and any(p.share and p.share.partial for p in u.parameters):
            raise ValueError(
                f"set_world_invariant: gradients of unit {u.label} are summed over another axis as well, and "
                "not by the tree of micro-batches; leave adapters and TokenParallel out, and with "
                "SequenceParallel call set_tensor_invariant"
            )
        if u.micro_batches is not None:
            _check_experts(u, first)
        trained = {group.key.dtype for group in u.groups if group.trainable}
        if u.micro_batches is not None and trained - {"float32"}:
            raise ValueError(f"set_world_invariant: trained parameters of unit {u.label} must be float32")
    parameters = [p for module in first.modules for p in module.parameters() if p.requires_grad]
    alone = [p for p in parameters if isinstance(p.storage, LocalStorage)]
    if first.micro_batches is not None and alone:
        raise ValueError(
            f"set_world_invariant: parameter {alone[0].name!r} is ignored, so its gradient is each rank's "
            "own; freeze it, or let it be sharded"
        )


def _check_experts(unit: Unit, first: Unit) -> None:
    """With a tree of micro-batches, their ranks add up what is the beginning of it."""
    for group in unit.groups:
        apart = [p.share.mesh.ranks for p in group.parameters if p.share is not None and p.share.own_data]
        places = np.searchsorted(first.settings.mesh.ranks.ravel(), apart[0].ravel()) if apart else ()
        if (np.diff(places) != 1).any():
            raise ValueError(
                f"set_world_invariant: ranks with experts of unit {unit.label} are no neighbours among those "
                "of the data; take an axis of mesh.fold"
            )
        if apart and group.key.reduce in dtypes.LOW:
            raise ValueError(
                f"set_world_invariant: gradients of the experts of unit {unit.label} are added before they "
                'are rounded to 16 bits; give MixedPrecisionPolicy(reduce_dtype="float32")'
            )
    data, alone = first.settings.mesh.axes, sharing_of(first.modules[0])
    for router in (m for top in unit.modules for m in top.modules() if isinstance(m, Router)):
        along = () if router.balance_mesh is None else router.balance_mesh.axes
        if size_of(along) > size_of(without(along, data)) * alone:
            raise ValueError(
                "set_world_invariant: nn.balance_over makes a balance loss of the micro-batches that all "
                "ranks have at one time; leave it out"
            )


def sharing_of(module: Module) -> int:
    """How many ranks of the data have parts of the same samples."""
    with autograd.enable_grad():
        block = module.batch_block
    return 1 if block is None else block.together


def check_sums(first: Unit, used: Iterable[ProcessGroups]) -> None:
    """Sums that are part of one tree must be made by it."""
    reducers = [made for ranks in used for made in (ranks.reduce, ranks.copies) if made]
    if first.micro_batches is not None and any(made.reduction != "tree" for made in reducers):
        raise ValueError(
            "set_world_invariant: NCCL adds in an order that depends on the number of ranks; make the mesh "
            "by init_device_mesh(..., reduction='tree')"
        )
