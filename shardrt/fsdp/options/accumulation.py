"""Sums of gradients: no_sync defers their reduction to a later backward, a factor divides the ranks' sum."""

from collections.abc import Iterator
from contextlib import contextmanager

from shardrt.comm import objects
from shardrt.fsdp.setup import units_for
from shardrt.nn.module import Module


def set_gradient_divide_factor(module: Module, factor: float) -> None:
    """Divide the sum of the ranks' gradients by `factor` in all units of `module`.

    The default is the number of ranks. With 1, gradients are those of the sum of all ranks' losses, and the
    loss decides their weights. Once the model has been used, the call is collective and compares the factors;
    before that, the first use of the model compares them.

    Args:
        module: a sharded module.
        factor: a positive number, the same on every rank.

    Raises:
        ValueError: if `factor` is not positive or differs between ranks, or `module` has no unit.

    Example:
        >>> from shardrt import nn
        >>> from shardrt.fsdp import fully_shard, set_gradient_divide_factor
        >>> model = fully_shard(nn.Linear(8, 1))
        >>> set_gradient_divide_factor(model, 4096)  # tokens of all ranks, for a summed loss
    """
    if not factor > 0:
        raise ValueError(f"set_gradient_divide_factor: factor must be positive, got {factor}")
    found = units_for("set_gradient_divide_factor", module)
    for schedule in dict.fromkeys(unit.schedule for unit in found if unit.schedule is not None):
        if differing := objects.differing_ranks(schedule.control, float(factor)):
            raise ValueError(
                f"set_gradient_divide_factor: ranks {differing} passed another factor than rank 0 (rank "
                f"{schedule.mesh.rank}: {factor}); pass the same on every rank"
            )
    for unit in found:
        if unit.choices.micro_batches is not None and factor != 1:
            raise ValueError(
                f"set_gradient_divide_factor: factor {factor} would round each reduction; with "
                "set_world_invariant leave it at 1 and divide the loss of each micro-batch"
            )
        unit.choices.divide_factor = float(factor)


@contextmanager
def no_sync(module: Module) -> Iterator[None]:
    """Accumulate full gradients inside a with block, without reducing them.

    Use it for all micro-batches of a step but the last. The backward of the last one, outside the block,
    reduces the sum. This saves the traffic of the reductions. It costs memory for the full gradients of all
    units, instead of two slots. Without no_sync, each backward adds to the sharded gradients.

    Args:
        module: a sharded module.

    Raises:
        ValueError: if `module` has no unit.
        RuntimeError: with set_world_invariant.

    Example:
        >>> import numpy as np
        >>> from shardrt import nn
        >>> from shardrt.fsdp import fully_shard, no_sync
        >>> model = fully_shard(nn.Linear(8, 1))
        >>> x = np.ones((4, 8), np.float32)
        >>> with no_sync(model):
        ...     model(x).mean().backward()
        >>> model(x).mean().backward()  # reduces the sum of both gradients
    """
    before = [(unit.choices, unit.choices.reduces) for unit in units_for("no_sync", module)]
    if any(choices.micro_batches is not None for choices, _ in before):
        raise RuntimeError(
            "no_sync: with set_world_invariant each backward reduces its gradients; leave no_sync out"
        )
    for choices, _ in before:
        choices.reduces = False
    try:
        yield
    finally:
        for choices, reduces in before:
            choices.reduces = reduces
