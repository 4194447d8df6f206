"""Whole states: saved on one mesh and restored on others, and gradients that are the same on any."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shardrt import nn, optim
from shardrt.checkpoint import CheckpointManager, full_state_dict, get_optimizer_state_dict
from shardrt.comm import DeviceMesh
from shardrt.nn.extents import take
from tests.lab.comparing import assert_equal
from tests.lab.world import first


def saved_or_restored(
    model: nn.Module, mesh: DeviceMesh, folder: Path, backward: Callable[[], Any] | None
) -> tuple[dict, dict]:
    """The whole state after `backward`, a step of AdamW and a save; None: after a restore."""
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    manager = CheckpointManager(folder, model, optimizer, mesh)
    if backward is None:
        assert manager.restore() == (1, {})
    else:
        backward()
        optimizer.step()
        manager.save(1)
    return full_state_dict(model), get_optimizer_state_dict(model, optimizer)


def assert_restored_anywhere(folder: Path, ranks_of: dict[Any, int], life: Callable[..., Any]) -> None:
    """What is saved on each mesh is restored on all. life(mesh, folder, saves) is `saved_or_restored`."""
    for number, (mesh, ranks) in enumerate(ranks_of.items()):
        expected = first(ranks, life, mesh, folder / str(number), True)
        for other, size in ranks_of.items():
            found = first(size, life, other, folder / str(number), False)
            assert_equal(found, expected, f"{mesh} {other}")


def give_gradients(model: nn.Module) -> None:
    """Gradients that are the same wherever they are, in the place of those that there are."""
    random = np.random.default_rng(7)
    for parameter in model.parameters():
        whole = random.normal(size=parameter.whole_shape).astype(np.float32)
        if not parameter.absent:
            parameter.grad.reshape(-1)[...] = take(parameter.extents, whole)
