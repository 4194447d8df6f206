"""UnitBoundary: what fully_shard attaches to a module, to act when its forward begins and ends.

It casts inputs and outputs as the unit's policy says and finds the tensors in whatever forward returns.
"""

from collections.abc import Callable
from typing import Any

from shardrt import dtypes
from shardrt import functional as F
from shardrt.autograd import Variable
from shardrt.fsdp.unit import Unit
from shardrt.nest import replaced
from shardrt.nn.module import Module


class UnitBoundary:
    """One module of one unit."""

    def __init__(self, unit: Unit, module: Module) -> None:
        self.unit = unit
        self.module = module
        policy = unit.settings.precision
        self._input = policy.param_dtype if policy.cast_forward_inputs else None
        self._output = policy.output_dtype

    def enter(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Forward begins: gather. Gives its arguments, cast where the policy says so."""
        self.unit.schedule.enter(self.unit)
        if self._input is None:
            return args, kwargs
        cast = _caster(self._input)
        return replaced(args, cast), replaced(kwargs, cast)

    def leave(self, output: Any) -> Any:
        """Forward ends: give its output, marked on the tape."""
        if self._output is not None:
            output = replaced(output, _caster(self._output))
        tensors: list[Variable] = []
        replaced(output, lambda tensor: tensors.append(tensor) or tensor)
        marked = iter(self.unit.schedule.leave(self.unit, self.module, tensors))
        return replaced(output, lambda tensor: next(marked))

    def abandon(self) -> None:
        """Forward has raised."""
        self.unit.schedule.abandon(self.unit)


def _caster(dtype: str) -> Callable[[Variable], Variable]:
    """A function that casts floating tensors to `dtype`, or to the type that represents it on the device."""

    def cast(tensor: Variable) -> Variable:
        if not dtypes.floating(tensor.data.dtype) or tensor.data.dtype.name == dtype:
            return tensor
        return F.cast(tensor, dtype)

    return cast if dtype in (dtypes.float32, *dtypes.LOW) else lambda tensor: tensor
