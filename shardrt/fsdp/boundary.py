"""UnitBoundary: runs a unit's schedule around the forward of each of its modules.

fully_shard attaches it to the modules. It also casts inputs and outputs as the unit's precision says, and
finds the tensors in the value that forward returns.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shardrt.autograd import Variable
from shardrt.fsdp.nodes import outside_slots
from shardrt.fsdp.unit import Unit
from shardrt.nn.module import Module, WrapperOrder, between_stages
from shardrt.pytree import ARRAYS, exchanged, replaced, tensors


class UnitBoundary:
    """Wraps the forwards of one unit's modules.

    WrapperOrder.UNIT is outside of recomputation: the unit is gathered when a module runs again in backward.
    """

    layer, every_entry = WrapperOrder.UNIT, True

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        precision = unit.settings.precision
        self._input = precision.input_cast({group.key.dtype for group in unit.groups})
        self._output = precision.output_cast()

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
        from_previous_stage, to_next_stage = between_stages(module)
        between = int(from_previous_stage)  # the first argument has come from a stage: it stays as it is
        try:
            schedule.enter(self.unit)
            if self._input is not None:
                given = args[between:], kwargs
                # Not arrays of a GPU: models pass tables in float32 that kernels read as such.
                given, kwargs = replaced(given, self._input, (Variable, np.ndarray))
                args = *args[:between], *given
            output = forward(*args, **kwargs)
            if self._output is not None and not to_next_stage:
                output = replaced(output, self._output)
            output = replaced(output, partial(outside_slots, self.unit), ARRAYS)
            found = tensors(output)
            return exchanged(output, found, schedule.forward.leave(self.unit, module, found))
        except BaseException:  # KeyboardInterrupt as well: a notebook continues after it
            schedule.forward.abandon(self.unit, depth)
            raise


def unit_of(module: Module) -> Unit | None:
    """The unit that fully_shard made of `module` itself, or None."""
    boundary = module.around(UnitBoundary)
    return None if boundary is None else boundary.unit
