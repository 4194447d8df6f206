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
        >>> import numpy as np
        >>> from shardrt import nn
        >>> from shardrt.fsdp import fully_shard, register_forward_method
        >>> class Net(nn.Linear):
        ...     def doubled(self, x):
        ...         return 2 * self.forward(x)
        >>> model = fully_shard(Net(8, 2))
        >>> register_forward_method(model, "doubled")
        >>> model.doubled(np.ones((1, 8), np.float32)).shape
        (1, 2)
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
