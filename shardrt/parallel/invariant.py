"""set_tensor_invariant: results are bitwise identical on any number of ranks that split the modules.

Where ranks could split a sum, it is made in parts on any number of them (functional/in_parts.py): outputs of
RowwiseParallel, the gradient of ColwiseParallel's input, the head of a VocabParallel, and gradients of
parameters that SequenceParallel leaves whole.
"""

from collections.abc import Mapping, Sequence

from shardrt.comm import objects
from shardrt.kernels.determinism import use_deterministic_algorithms
from shardrt.nn.lora import adapted_layers
from shardrt.nn.module import Module
from shardrt.nn.placement import placement_of
from shardrt.nn.storage import LocalStorage
from shardrt.parallel.axis import Alone, Axis
from shardrt.parallel.styles import Style
from shardrt.parallel.tensor import chosen_by, in_sequence


def set_tensor_invariant(model: Module, parts: int = 4, *, plan: Mapping[str, Style] | None = None) -> None:
    """Compute bitwise identical results on 1, 2, ..., `parts` ranks along the axis of parallelize_module.

    Call it on the outermost module, after parallelize_module and before the model is used; on one rank it
    takes a `plan` where parallelize_module was not called. Every matmul with a weight that the plan splits is
    then made in `parts` parts, by the same calls on any number of ranks, and sums over parts are added as
    neighbours, (0 + 1) + (2 + 3). docs/explanation/determinism.md says what else must be the same, and what
    it costs. On
    a GPU the process computes by deterministic algorithms from now on (shardrt.use_deterministic_algorithms).

    RuntimeError with SequenceParallel after pipeline_stages or fully_shard.

    Raises:
        ValueError: for parts that are no power of two, are fewer than the ranks, or do not divide what is
            cut; for a number of ranks that is none; without a plan, or with a second one; for adapters and
            NCCL's own sums; where ranks differ; as parallelize_module for what is wrong with a plan.
    """
    axis, chosen = _styles(model, plan)
    for name, value in (("parts", parts), ("the number of ranks", axis.size)):
        if value < 1 or value & (value - 1):
            raise ValueError(f"set_tensor_invariant: {name} must be a power of two, got {value}")
    if parts < axis.size:
        raise ValueError(
            f"set_tensor_invariant: parts must be at least {axis.size}, the number of ranks, got {parts}"
        )
    _check(model, axis, chosen)
    if axis.size > 1 and (differing := objects.differing_ranks(axis.mesh.communicator("control"), parts)):
        raise ValueError(
            f"set_tensor_invariant: ranks {differing} passed other parts than rank 0; pass the same on "
            "every rank"
        )
    for module, style in chosen:
        style.put_in_parts(module, axis, parts)
    use_deterministic_algorithms(True)


def _styles(
    model: Module, plan: Mapping[str, Style] | None
) -> tuple[Axis | Alone, Sequence[tuple[Module, Style]]]:
    """The axis along which the model is split, or could be, and its modules with their styles."""
    known = placement_of(model)
    planned = known.axis is not None
    if plan is None and not planned:
        raise ValueError(
            "set_tensor_invariant: parallelize_module has not been called on this model; pass the plan "
            "that would split it, plan=plan_of(model)"
        )
    if plan is None:
        return known.axis, known.styles
    if planned:
        raise ValueError(
            "set_tensor_invariant: the model has the plan of parallelize_module already; leave plan out"
        )
    return Alone(in_sequence(plan.values())), chosen_by(model, plan, "set_tensor_invariant")


def _check(model: Module, axis: Axis | Alone, chosen: Sequence[tuple[Module, Style]]) -> None:
    """Raise ValueError for sums that are not made in parts."""
    if axis.communicator.reduction != "tree":
        raise ValueError(
            "set_tensor_invariant: NCCL adds in an order that depends on the number of ranks; make the mesh "
            "by init_device_mesh(..., reduction='tree')"
        )
    if adapted := adapted_layers(model):
        raise ValueError(
            f"set_tensor_invariant: {adapted[0].name!r} has a LoRA adapter, which is not supported; "
            "merge_lora first"
        )
    late = [
        p for p in model.parameters() if p.pipeline is not None or not isinstance(p.storage, LocalStorage)
    ]
    if axis.sequence and late:
        raise RuntimeError(
            f"set_tensor_invariant: parameter {late[0].name!r} is on a stage or sharded already; with "
            "SequenceParallel call it before pipeline_stages and fully_shard"
        )
