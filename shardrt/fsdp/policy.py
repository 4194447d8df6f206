"""The settings of a unit, and its choices, which may change between steps."""

from dataclasses import dataclass

from shardrt import dtypes
from shardrt.comm.mesh import DeviceMesh
from shardrt.fsdp.sharded_gradient import ShardedGradient
from shardrt.fsdp.strategy import ShardingStrategy
from shardrt.nn.module import Module
from shardrt.nn.storage import HostPlacement


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Element types of a unit: "float32", "bfloat16", "float16", or a NumPy dtype. None changes nothing.

    param_dtype: what parameters are gathered and computed in. The shards that the optimizer updates stay
    float32, always. Where the device has no arithmetic of that type (the CPU), values are rounded to it,
    stored and sent in it, and computed with in float32.
    reduce_dtype: what gradients are sent in; param_dtype if None. Each rank's gradient is rounded once and
    the sum is made in float32, so a 16-bit reduction costs the bytes but not the rounding of a ring; but NCCL
    adds in the type that is sent, unless the mesh has reduction="tree".
    output_dtype: what the floating outputs of the unit's forward are cast to.
    cast_forward_inputs: cast floating inputs of the unit's forward to param_dtype; without a param_dtype
    those of 16 bits to float32, where the unit's parameters are.
    full_precision: classes of modules within the unit whose own parameters stay float32: (nn.LayerNorm,).
    Those of a nn.Router do in any case.
    float8: the matmuls of nn.Linear in the unit, in forward and backward, are in float8 (E4M3, and E5M2 for
    gradients), with a scale per tensor. On NVIDIA GPUs from Hopper on, with param_dtype="bfloat16", in which
    parameters are still gathered. Give the first and the last block, and the unit of the head, a policy
    without it.

    Parameters of float64 and of integers stay what they are: gathered, computed in and reduced as they are.
    Inputs of a unit that has such parameters alone are not cast.

    (Micikevicius et al., Mixed Precision Training, 2018, and FP8 Formats for Deep Learning, 2022.) Raises
    ValueError for an unknown type, and for float8 without bfloat16.
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
                    raise ValueError(f"{name}: float64 is not a type of mixed precision; leave it None")
        if self.float8 and self.param_dtype != dtypes.bfloat16:
            raise ValueError(f"float8 needs param_dtype='bfloat16', got {self.param_dtype!r}")

    def types_of(self, module: Module, own: str) -> tuple[str, str]:
        """(param, reduce) types for the parameters that `module` itself holds, of type `own`."""
        if not dtypes.casts(own) or isinstance(module, self.full_precision) or module.full_precision:
            return own, own
        param = self.param_dtype or own
        return param, self.reduce_dtype or param


class OffloadPolicy:
    """Which parts of a unit live in host memory between uses: none. CPUOffloadPolicy moves some there."""

    placement = HostPlacement()

    def sharded_gradient(self) -> ShardedGradient:
        """A new one for each group."""
        return ShardedGradient()


@dataclass(frozen=True)
class Settings:
    """What the user chose for one unit; the arguments of fully_shard."""

    mesh: DeviceMesh
    strategy: ShardingStrategy
    reshard_after_forward: bool | None
    prefetch: int | None  # None: as the outermost unit says
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    by_rank: bool = False  # never struck from the plan

    @property
    def placement(self) -> HostPlacement:
        """Where the arrays of the unit live between uses."""
        return self.offload.placement

    @property
    def cut(self) -> tuple[DeviceMesh, str]:
        """What says which ranks have which part: the mesh, and strategy.Row.cut."""
        return self.mesh, self.strategy.rules.cut


@dataclass
class Choices:
    """What the user may change of a unit later. The unit and its groups hold the same object."""

    divide_factor: float
    reduces: bool = True  # gradients are reduced at the end of backward; False under no_sync
    find_unused: bool = False  # ranks tell each other which parameters they have used
    micro_batches: int | None = None  # of a step, on each rank; None: sums depend on the number of ranks
    held: bool = False  # gathered until the user says reshard
