"""What may be changed of units after fully_shard: how gradients are divided, summed, reduced, missed.

Each call holds for all units of a module; what is changed lies in their `Choices` (policy.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from shardrt.comm import talk
from shardrt.fsdp.setup import units_for
from shardrt.fsdp.tree_checks import sharing_of
from shardrt.kernels.determinism import use_deterministic_algorithms
from shardrt.nn.module import Module
from shardrt.nn.vision import BatchNorm2d


def set_gradient_divide_factor(module: Module, factor: float) -> None:
    """Divide the sum of the ranks' gradients by `factor` in all units of `module` (default: the world size).

    1 leaves the weighting to the loss: gradients are then those of the sum of all ranks' losses. The same on
    every rank: the call is collective once the model has been used; before that, its first use compares.
    Raises ValueError if `factor` is not positive or differs between ranks, or `module` has no unit.
    """
    if not factor > 0:
        raise ValueError(f"set_gradient_divide_factor: factor must be positive, got {factor}")
    found = units_for("set_gradient_divide_factor", module)
    for schedule in dict.fromkeys(unit.schedule for unit in found if unit.schedule is not None):
        if differing := talk.agree(schedule.control, float(factor)):
            raise ValueError(
                f"set_gradient_divide_factor: ranks {differing} give another factor than rank 0 (rank "
                f"{schedule.mesh.rank}: {factor})"
            )
    for unit in found:
        if unit.choices.micro_batches is not None and factor != 1:
            raise ValueError(
                f"set_gradient_divide_factor: factor {factor} would round each reduction; with "
                "set_world_invariant it is 1, and the loss of a micro-batch is divided instead"
            )
        unit.choices.divide_factor = float(factor)


def set_find_unused_parameters(module: Module, find: bool = True) -> None:
    """Let a parameter that no rank used since zero_grad have no gradient, in all units of `module`.

    Otherwise such a parameter has the gradient 0 if anything of its unit was used, so AdamW decays and moves
    it. With it, its `grad` is None and optimizers leave it alone, as in PyTorch; if any rank used it, it has
    a gradient on every rank. Costs no collective: each reduction carries a number for each parameter. Full
    gradients are copied once more, into a buffer as long as the largest unit's, and who asks for a gradient,
    as an optimizer does, waits until it is reduced. Counts from the next forward on; call it on every rank.

    Raises ValueError if `module` has no unit, RuntimeError while there are gradients: call zero_grad before.
    """
    found = units_for("set_find_unused_parameters", module)
    if any(
        group.sum.reductions or group.open_gradient is not None for unit in found for group in unit.groups
    ):
        raise RuntimeError("set_find_unused_parameters: there are gradients; call zero_grad before")
    for unit in found:
        unit.choices.find_unused = find


def set_world_invariant(module: Module, micro_batches: int) -> None:
    """Train to the same bits on 1, 2, 4, ... ranks. Call it on the outermost module, after fully_shard.

    micro_batches: M, those of a step on all ranks together; a power of two, as is the number of ranks W
    (where sequences lie on several ranks, of groups of them: the bits depend on how many that are).
    A step is M / W times forward and backward, rank r of W having micro-batch j W + r as its j-th, then the
    update and zero_grad. The gradients of the M micro-batches are added by one tree, whatever W is, so divide
    the loss of each by M, or by the tokens of the step; the divide factor is 1. Dropout masks are those of
    the micro-batch, norms are exact. docs/determinism.md says what else must be the same, and what it costs:
    log2(M / W) - 1 more sharded gradients, and a reduction of each micro-batch. On a GPU the process computes
    by deterministic algorithms from now on (shardrt.use_deterministic_algorithms).

    Raises ValueError for numbers that don't fit, `module` without a unit, and batch norm, whose statistics
    depend on which samples one rank, or all ranks at one time, have. When the units are built, it is raised
    for gradients on the host, trained parameters that are ignored, nn.balance_over, experts on several ranks
    that are no neighbours or send gradients of 16 bits, and NCCL's own sums: the mesh must have
    reduction="tree". RuntimeError if they are built already.
    """
    normed = next((path for path, part in module.named_modules() if isinstance(part, BatchNorm2d)), None)
    if normed is not None:
        raise ValueError(
            f"set_world_invariant: the statistics of batch norm ({normed}) depend on the number of ranks"
        )
    tied = next((p.name for p in module.parameters() if p.place is not None and p.place.tied), None)
    if tied is not None:
        raise ValueError(
            f"set_world_invariant: {tied!r} is on two stages, whose gradients are not added by the tree of "
            "micro-batches; untie it"
        )
    for unit in units_for("set_world_invariant", module):
        size = unit.data_ranks // sharing_of(module)
        for name, value in (("micro_batches", micro_batches), ("the number of ranks", size)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"set_world_invariant: {name} must be a power of two, got {value}")
        if micro_batches < size:
            raise ValueError(
                f"set_world_invariant: micro_batches {micro_batches} are too few for {size} ranks"
            )
        if unit.schedule is not None:
            raise RuntimeError(
                "set_world_invariant: call it before the optimizer is made and the model is used"
            )
        unit.choices.micro_batches, unit.choices.divide_factor = micro_batches // size, 1.0
    use_deterministic_algorithms(True)


@contextmanager
def no_sync(module: Module) -> Iterator[None]:
    """Backward inside the with block leaves its gradients where they are, unreduced; later ones add to them.

    For all micro-batches of a step but the last, whose backward outside the block reduces the sum. Saves
    the traffic of the reductions; costs memory for the full gradients of all units instead of two slots.
    Without it, each backward adds to the sharded gradients. Raises ValueError if `module` has no unit,
    RuntimeError with set_world_invariant.
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
