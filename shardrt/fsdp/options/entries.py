"""Entries: methods of a unit's module that gather the unit as forward does."""

from shardrt.fsdp.boundary import unit_of
from shardrt.nn.module import Module, stages_of


def register_forward_method(module: Module, name: str) -> None:
    """Gather a unit around each call of one of its methods, as around forward.

    Args:
        module: a module that fully_shard has made a unit.
        name: name of the method.

    Raises:
        ValueError: if `module` is not a unit.
        AttributeError: if `module` has no such method.

    Example:
        >>> fully_shard(model)
        >>> register_forward_method(model, "generate")
    """
    if stages_of(module):
        raise ValueError(
            f"register_forward_method: {type(module).__name__} has stages, and a pipeline calls only forward"
        )
    if unit_of(module) is None:
        raise ValueError(
            f"register_forward_method: {type(module).__name__} is not a unit; call fully_shard first"
        )
    object.__setattr__(module, name, module.entered_around(getattr(module, name)))
