"""The settings of a unit, which are fixed, and its choices, which may change between steps."""

from dataclasses import dataclass
from typing import Any

from shardrt import dtypes
from shardrt.comm.mesh import DeviceMesh
from shardrt.device import Device
from shardrt.fsdp.sharded_gradient import ShardedGradient
from shardrt.fsdp.strategy import ShardingStrategy
from shardrt.nn.module import Module
from shardrt.nn.storage import HostPlacement


@dataclass(frozen=True)
class MixedPrecisionPolicy:
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

    Raises:
        ValueError: for an unknown type, and for float8 without param_dtype="bfloat16".

    Example:
        >>> fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="float32"))
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True
    full_precision: tuple[type[Module], ...] = ()
    float8: bool = False

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

    def types_of(self, module: Module, own: str) -> tuple[str, str]:
        """(param, reduce) types for parameters of type `own` that `module` itself holds."""
        if not dtypes.casts(own) or isinstance(module, self.full_precision) or module.full_precision:
            return own, own
        param = self.param_dtype or own
        return param, self.reduce_dtype or param


class OffloadPolicy:
    """Keeps all parts of a unit on the device. CPUOffloadPolicy keeps some in host memory between uses."""

    placement = HostPlacement()

    def sharded_gradient(self) -> ShardedGradient:
        """A new ShardedGradient for a group."""
        return ShardedGradient()

    def host_buffer(self, device: Device, count: int, dtype: Any) -> Any:
        """Zeros in host memory, for a part that `placement` puts there."""
        raise NotImplementedError

    def filled(self, shard: Any) -> None:
        """The shard has its initial values."""


@dataclass(frozen=True)
class Settings:
    """The arguments of fully_shard for one unit."""

    mesh: DeviceMesh
    strategy: ShardingStrategy
    reshard_after_forward: bool | None
    prefetch: int | None  # None: the outermost unit's
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    by_rank: bool = False  # stays in the plan even if no rank used the unit in the first forward

    @property
    def placement(self) -> HostPlacement:
        """Where the arrays of the unit live between uses."""
        return self.offload.placement

    @property
    def cut(self) -> tuple[DeviceMesh, str]:
        """(mesh, strategy.Rules.cut): they determine which rank holds which part."""
        return self.mesh, self.strategy.rules.cut


@dataclass
class Choices:
    """The properties of a unit that the user may change later. The unit and its groups share the object."""

    divide_factor: float
    reduces: bool = True  # gradients are reduced at the end of backward; False under no_sync
    find_unused: bool = False  # ranks exchange which parameters they have used
    micro_batches: int | None = None  # in a step, on each rank; None: sums depend on the number of ranks
    held: bool = False  # stays gathered until the user calls reshard
