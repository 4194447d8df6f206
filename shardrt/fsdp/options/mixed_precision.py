"""MixedPrecisionPolicy: element types of a unit, and the casts of its inputs and outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardrt import dtypes
from shardrt import functional as F
from shardrt.autograd import Variable
from shardrt.fsdp.options.quantisation import Quantisation
from shardrt.fsdp.policy import Precision
from shardrt.nn.module import Module


@dataclass(frozen=True)
class MixedPrecisionPolicy(Precision):
    """The element types of a unit: "float32", "bfloat16", "float16", or a NumPy dtype.

    float64 and integer parameters keep their type: they are gathered, computed with and reduced in it. Inputs
    of a unit that has only such parameters are not cast.

    (Micikevicius et al., Mixed Precision Training, 2018, and FP8 Formats for Deep Learning, 2022.)

    Args:
        param_dtype: type in which parameters are gathered and computed with; None: their own. The shards that
            the optimizer updates always stay float32. If the device has no arithmetic of the type (the CPU),
            values are rounded to it, stored and sent in it, and computed with in float32.
        reduce_dtype: type in which gradients are sent; None: param_dtype. Each rank's gradient is rounded
            once and the sum is made in float32. A 16-bit reduction so halves the bytes without the rounding
            of a ring. NCCL's own reductions add in the type that is sent: use a mesh with reduction="tree".
        output_dtype: type to which floating outputs of the unit's forward are cast; None: no cast.
        cast_forward_inputs: cast floating inputs of the unit's forward to param_dtype. Without a param_dtype,
            cast 16-bit inputs to float32 if the unit has float32 parameters.
        full_precision: classes of modules in the unit whose own parameters stay float32, for instance
            (nn.LayerNorm,). Parameters of a nn.Router always do.
        float8: compute the matmuls of nn.Linear in the unit in float8, forward and backward: E4M3, and E5M2
            for gradients, with one scale per tensor. Parameters are still gathered in bfloat16. Needs an
            NVIDIA GPU from Hopper on and param_dtype="bfloat16". Leave it off for the first and the last
            block and for the unit of the head.
        quantised: gathers and reductions between hosts in 8 or 4 bits; None: in the types above.

    Raises:
        ValueError: for an unknown type, and for float8 without param_dtype="bfloat16".

    Example:
        >>> from shardrt import nn
        >>> from shardrt.fsdp import MixedPrecisionPolicy, fully_shard
        >>> policy = MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="float32")
        >>> model = fully_shard(nn.Linear(8, 8), mp_policy=policy)
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True
    full_precision: tuple[type[Module], ...] = ()
    float8: bool = False
    quantised: Quantisation | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, name)
            if value is not None:
                value = dtypes.named(name, value)
                object.__setattr__(self, name, value)
                if value == dtypes.float64:
                    raise ValueError(
                        f"MixedPrecisionPolicy: {name}: float64 is not a type of mixed precision; omit it"
                    )
        if self.float8 and self.param_dtype != dtypes.bfloat16:
            raise ValueError(
                f"MixedPrecisionPolicy: float8 needs param_dtype='bfloat16', got {self.param_dtype!r}"
            )

    def types_of(self, module: Module, dtype: str) -> tuple[str, str]:
        if not dtypes.casts(dtype) or isinstance(module, self.full_precision) or module.full_precision:
            return dtype, dtype
        param = self.param_dtype or dtype
        return param, self.reduce_dtype or param

    def input_cast(self, types: set[str]) -> Callable[[Any], Any] | None:
        if not self.cast_forward_inputs:
            return None
        if self.param_dtype is not None:
            return _caster(self.param_dtype) if not types or any(map(dtypes.casts, types)) else None
        # Another unit may have rounded 16-bit inputs to its output_dtype: float32 parameters need float32.
        return _caster(dtypes.float32, low_only=True) if dtypes.float32 in types else None

    def output_cast(self) -> Callable[[Any], Any] | None:
        return None if self.output_dtype is None else _caster(self.output_dtype)


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
