"""UnitBoundary: what fully_shard attaches to the modules of a unit, to act when a forward begins and ends.

It casts inputs and outputs as the unit's policy says and finds the tensors in whatever forward returns.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shardrt import dtypes
from shardrt import functional as F
from shardrt.autograd import Variable
from shardrt.fsdp.nodes import own_array
from shardrt.fsdp.unit import Unit
from shardrt.nn.module import Layer, Module, inner_ends
from shardrt.pytree import exchanged, replaced, tensors


class UnitBoundary:
    """Around the forwards of one unit's modules."""

    layer, every_entry = Layer.UNIT, True

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        policy = unit.settings.precision
        self._input = _caster(*_wanted(unit)) if policy.cast_forward_inputs else None
        self._output = None if policy.output_dtype is None else _caster(policy.output_dtype)

    def __deepcopy__(self, memo: dict) -> "UnitBoundary":
        first = self.unit.modules[0]
        raise TypeError(
            f"copy.deepcopy: {first.name or type(first).__name__} is sharded; make another model, for the "
            "same weights with shardrt.checkpoint's save and load, or full_state_dict, arrays on rank 0"
        )

    def run(self, module: Module, forward: Callable, /, *args: Any, **kwargs: Any) -> Any:
        """Gather, run forward, release. Arguments and output are cast where the policy says so."""
        schedule = self.unit.built()
        depth = schedule.forward.depth
        enters, leaves = inner_ends(module)
        try:
            schedule.enter(self.unit)
            if self._input is not None:
                given = args[enters:], kwargs
                given, kwargs = replaced(given, self._input, (Variable, np.ndarray))
                args = *args[:enters], *given
            output = forward(*args, **kwargs)
            if self._output is not None and not leaves:
                output = replaced(output, self._output)
            output = replaced(output, partial(own_array, self.unit), np.ndarray)
            found = tensors(output)
            return exchanged(output, found, schedule.forward.leave(self.unit, module, found))
        except BaseException:  # an interrupt as well, wherever it comes: a notebook goes on after it
            schedule.forward.abandon(self.unit, depth)
            raise


def _wanted(unit: Unit) -> tuple[str | None, bool]:
    """The type that inputs of a unit are cast to, or None, and whether only those of 16 bits are.

    What another unit has rounded (output_dtype) must meet parameters of float32 in float32.
    """
    types = {group.key.dtype for group in unit.groups}
    low = unit.settings.precision.param_dtype
    if low is None:
        return (dtypes.float32, True) if dtypes.float32 in types else (None, False)
    return (low, False) if not types or any(map(dtypes.casts, types)) else (None, False)


def _caster(dtype: str | None, low_only: bool = False) -> Callable[[Any], Any] | None:
    """A function that casts floating tensors to `dtype`, or to the type that represents it on the device.

    Arrays likewise: data are arrays. They stay arrays, but of the device that computes. None casts nothing.
    """
    if dtype not in (dtypes.float32, *dtypes.LOW):
        return None

    def cast(given: Any) -> Any:
        array = given.data if isinstance(given, Variable) else given
        name = dtypes.name_of(array.dtype)
        if not dtypes.floating(array.dtype) or name == dtype or (low_only and name not in dtypes.LOW):
            return given
        if isinstance(given, Variable):
            return F.cast(given, dtype)
        return F.cast(Variable.result_type(given), dtype).data

    return cast


def unit_of(module: Module) -> Unit | None:
    """The unit that fully_shard made of this very module, if it did."""
    boundary = module.around(UnitBoundary)
    return None if boundary is None else boundary.unit
