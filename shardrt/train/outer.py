"""DiLoCo in a training run: its outer optimizer, its steps, and the checkpoints of each host.

All hosts are one job whose ranks meet in each step, or, with a hub, each host is a job of its own.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardrt import nn, optim
from shardrt.checkpoint import CheckpointError
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.objects import all_gather_object, broadcast_object
from shardrt.faults.watchdog import Limits, Watch
from shardrt.parallel import DiLoCo, HubExchange, HubLost, outer_bytes, strided_fragments
from shardrt.train.errors import DATA
from shardrt.train.recipe import Recipe
from shardrt.train.state import Job
from shardrt.train.tasks import Task
from shardrt.untrusted import say

_NEWS = 1.0  # seconds between two records that this rank waits for a hub that lives


def limits_of(recipe: Recipe) -> Limits:
    """The watchdog's limits. In one job, any message of a step may wait behind an exchange under way."""
    limits, chosen = recipe.watchdog.limits, recipe.diloco
    if chosen.hosts > 1 and not chosen.hub and chosen.fragment_sync_delay and limits.step:
        return replace(limits, step=max(limits.step, limits.outer))
    return limits


def outer_of(
    recipe: Recipe, mesh: DeviceMesh, task: Task, model: nn.Module, optimizer: optim.Optimizer, watch: Watch
) -> DiLoCo | None:
    """The outer optimizer of a run; None where all ranks train together. Collective.

    Raises:
        HubLost: if no hub answers.
    """
    chosen = recipe.diloco
    if chosen.hosts == 1:
        return None
    if chosen.hub:
        hosts = HubExchange(chosen.hub, chosen.host, chosen.hosts, mesh, news(watch))
    else:
        hosts = mesh["diloco"]
    return DiLoCo(
        optimizer,
        hosts,
        fragments_of(recipe, task.units(model)),
        sync_every=chosen.sync_every,
        warmup_steps=chosen.warmup_steps,
        warmup_every=chosen.warmup_every,
        lr=chosen.lr,
        momentum=chosen.momentum,
        nesterov=chosen.nesterov,
        fragment_sync_delay=chosen.fragment_sync_delay,
        fragment_update_alpha=chosen.fragment_update_alpha,
        should_quantize=chosen.should_quantize,
    )


def news(watch: Watch) -> Callable[[], None]:
    """A function that tells the watchdog, not too often, that this rank waits for a hub that lives."""
    last = 0.0

    def tell() -> None:
        nonlocal last
        if time.monotonic() - last >= _NEWS:
            last = time.monotonic()
            watch.recorder.mark(watch.recorder.phase)

    return tell


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
    """The outer work after step `done`. After the last step, every host has the outer parameters.

    A lost hub ends the job with one line.

    Raises:
        LeftBehind: if this host is rounds behind the others.
    """
    job.watch.phase("outer")
    with lost_hub():
        left_out = job.outer.step(done)
    if left_out:
        job.run.say(f"outer step {left_out} without this host: its steps since the one before are dropped")
    if done == job.recipe.steps:
        job.outer.take_outer()


def saves_weights(job: Job) -> bool:
    """Whether this rank takes part in saving the trained weights, which all hosts have alike."""
    return job.outer is None or bool(job.recipe.diloco.hub) or job.mesh.rank_of("diloco") == 0


def folder_of(recipe: Recipe, mesh: DeviceMesh, folder: Path) -> Path:
    """The folder of this host's checkpoints, in rank 0's `folder`; with a hub that one. Collective."""
    if recipe.diloco.hub:
        return folder
    root = broadcast_object(mesh.communicator("control"), str(folder))
    return Path(root) / f"host-{mesh.rank_of('diloco')}"


def together(job: Job, step: int, extra: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """(step, extra) to begin with on all hosts; each has restored its own newest. Collective."""
    if job.outer is None:
        return step, extra
    return (meet if job.recipe.diloco.hub else restored_alike)(job, step, extra)


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
    job.outer.resume(step, took_part=extra.get("took_part", True))
    return step, extra


def meet(job: Job, step: int, extra: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """(step, extra) to begin with, where hosts meet at a hub; this one has restored its newest checkpoint.

    Hosts that begin together take the newest step that all have, if they still have it. A host that
    comes to others catches up. Collective.
    """
    job.watch.phase("outer")
    job.run.say(f"waits for the other hosts at the hub {job.recipe.diloco.hub}")
    first, behind = job.outer.join(step)
    if behind:
        return catch_up(job), extra
    if first < step:
        store = job.checkpoints.store
        with suppress(CheckpointError):
            step, extra = job.checkpoints.restore(store.root / store.name(first))
    job.outer.resume(step, took_part=extra.get("took_part", True))
    return step, extra


@contextmanager
def lost_hub() -> Iterator[None]:
    """A block in which a lost hub ends the job with one line, on any rank: others may wait elsewhere."""
    try:
        yield
    except HubLost as error:
        say(f"error: {error}", file=sys.stderr)
        sys.exit(DATA)


def catch_up(job: Job) -> int:
    """Take the outer state of another host; gives the step to go on from. Collective."""
    job.watch.phase("outer")
    with lost_hub():
        step = job.outer.catch_up()
    job.run.say(f"caught up: goes on from step {step} with the outer parameters of the other hosts")
    return step


def saved(job: Job) -> dict[str, bool]:
    """The contents of a checkpoint next to the outer state. A lost hub ends the job with one line."""
    if job.outer is None:
        return {}
    with lost_hub():
        return {"took_part": job.outer.took_part}
