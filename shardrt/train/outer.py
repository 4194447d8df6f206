"""DiLoCo in a training run: its outer optimizer, its steps, and the checkpoints of each host."""

from pathlib import Path
from typing import Any

from shardrt import nn, optim
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.objects import all_gather_object, broadcast_object
from shardrt.parallel import DiLoCo, outer_bytes, strided_fragments
from shardrt.train.recipe import Recipe
from shardrt.train.state import Job
from shardrt.train.tasks import Task


def outer_of(
    recipe: Recipe, mesh: DeviceMesh, task: Task, model: nn.Module, optimizer: optim.Optimizer
) -> DiLoCo | None:
    """The outer optimizer of a run; None where all ranks train together. Collective."""
    chosen = recipe.diloco
    if chosen.hosts == 1:
        return None
    return DiLoCo(
        optimizer,
        mesh["diloco"],
        fragments_of(recipe, task.units(model)),
        sync_every=chosen.sync_every,
        lr=chosen.lr,
        momentum=chosen.momentum,
        nesterov=chosen.nesterov,
        fragment_sync_delay=chosen.fragment_sync_delay,
        fragment_update_alpha=chosen.fragment_update_alpha,
        should_quantize=chosen.should_quantize,
    )


def fragments_of(recipe: Recipe, blocks: list[nn.Module]) -> list[list[nn.Module]] | None:
    """The blocks of each fragment; None for one fragment. Blocks that are one unit stay together.

    Raises:
        ValueError: in the words of the command line, for more fragments than units.
    """
    count, size = recipe.diloco.fragments, recipe.fsdp.blocks
    if recipe.diloco.hosts == 1 or count == 1:
        return None
    units = [blocks[first : first + size] for first in range(0, len(blocks), size)]
    if count > len(units):
        raise ValueError(f"diloco.fragments must be at most the {len(units)} units of blocks, got {count}")
    return [[block for unit in part for block in unit] for part in strided_fragments(units, count)]


def planned(recipe: Recipe, shard: int) -> dict[str, int]:
    """The category that DiLoCo adds to a memory plan; `shard`: bytes of this rank's trained shards."""
    chosen = recipe.diloco
    if chosen.hosts == 1:
        return {}
    return {"outer state": outer_bytes(shard, chosen.hosts, chosen.fragments, chosen.should_quantize)}


def step(job: Job, done: int) -> None:
    """The outer work after step `done`. After the last step, every host has the outer parameters."""
    job.outer.step(done)
    if done == job.recipe.steps:
        job.outer.take_outer()


def folder_of(mesh: DeviceMesh, folder: Path) -> Path:
    """The folder of this host's checkpoints, in rank 0's `folder`. Collective."""
    root = broadcast_object(mesh.communicator("control"), str(folder))
    return Path(root) / f"host-{mesh.rank_of('diloco')}"


def restored_alike(job: Job, step: int, extra: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """(step, extra) of the newest checkpoint that all hosts have; each has restored its own newest.

    Collective.

    Raises:
        CheckpointError: if a host has no checkpoint of that step.
    """
    newest = min(all_gather_object(job.mesh.communicator("control"), step))
    if step > newest:
        store = job.checkpoints.store
        step, extra = job.checkpoints.restore(store.root / store.name(newest))
    job.outer.resume(step)
    return step, extra
