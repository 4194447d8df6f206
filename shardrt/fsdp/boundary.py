"""UnitBoundary: runs a unit's schedule around the forward of each of its modules.

fully_shard attaches it to the modules. It also casts inputs and outputs by the unit's mixed precision policy
and finds the tensors in the value that forward returns.
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
    """Wraps the forwards of one unit's modules.

    Layer.UNIT is outside of recomputation, so that the unit is gathered when a module runs again in backward.
    """

    layer, every_entry = Layer.UNIT, True

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        policy = unit.settings.precision
        self._input = _caster(*_wanted(unit)) if policy.cast_forward_inputs else None
        self._output = None if policy.output_dtype is None else _caster(policy.output_dtype)

    def __deepcopy__(self, memo: dict) -> "UnitBoundary":
        first = self.unit.modules[0]
        raise TypeError(
            f"copy.deepcopy: {first.name or type(first).__name__} is sharded and can't be copied; build a "
            "second model. To copy the weights, use shardrt.checkpoint's save and load, or full_state_dict"
        )

    def run(self, module: Module, forward: Callable, /, *args: Any, **kwargs: Any) -> Any:
        """Gather, cast the arguments, run forward, cast the output, release."""
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
        except BaseException:  # KeyboardInterrupt as well: a notebook continues after it
            schedule.forward.abandon(self.unit, depth)
            raise


def _wanted(unit: Unit) -> tuple[str | None, bool]:
    """(the type that inputs are cast to, or None, whether only 16-bit inputs are cast).

    Without a param_dtype, 16-bit inputs are cast to float32 for float32 parameters: another unit may have
    rounded them (output_dtype).
    """
    types = {group.key.dtype for group in unit.groups}
    low = unit.settings.precision.param_dtype
    if low is None:
        return (dtypes.float32, True) if dtypes.float32 in types else (None, False)
    return (low, False) if not types or any(map(dtypes.casts, types)) else (None, False)


def _caster(dtype: str | None, low_only: bool = False) -> Callable[[Any], Any] | None:
    """A function that casts floating tensors to `dtype`, or to the type that represents it on the device.

    It also casts arrays, since input data are arrays: the result is an array of the device that computes.
    Gives None if nothing is to be cast.
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
    """The unit that fully_shard made of `module` itself, or None."""
    boundary = module.around(UnitBoundary)
    return None if boundary is None else boundary.unit
