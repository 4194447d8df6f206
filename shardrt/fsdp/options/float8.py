"""Float8: chooses the linear layers of a unit whose matmuls run in float8 (MixedPrecisionPolicy.float8)."""

import warnings

from shardrt import dtypes
from shardrt.fsdp.api import Keyed
from shardrt.fsdp.options.mixed_precision import MixedPrecisionPolicy
from shardrt.fsdp.policy import Settings
from shardrt.functional.float8 import MULTIPLE
from shardrt.nn.layers import Linear
from shardrt.nn.module import Module


def choose_float8(modules: list[Module], settings: Settings, parameters: Keyed) -> None:
    """Mark the weights of linear layers whose matmuls run in float8, if their sizes allow it.

    Raises:
        ValueError: if the device has no matmul in float8.
    """
    if not (isinstance(settings.precision, MixedPrecisionPolicy) and settings.precision.float8):
        return
    if why := settings.mesh.device.lacks_float8():
        raise ValueError(f"fully_shard: mp_policy has float8=True, but {why}")
    taken = {id(parameter) for parameter, key in parameters if key.param == dtypes.bfloat16}
    layers = [below for module in modules for below in module.modules() if isinstance(below, Linear)]
    weights = [layer.weight for layer in layers if id(layer.weight) in taken]
    for weight in weights:
        weight.float8 = weight.in_parts is None and not any(size % MULTIPLE for size in weight.shape)
    others = [f"{weight.name} {weight.shape}" for weight in weights if not weight.float8]
    if others:
        warnings.warn(
            f"float8: these weights stay in bfloat16: {', '.join(others)}; sizes must be multiples of "
            f"{MULTIPLE}, and with set_tensor_invariant all weights stay in bfloat16",
            stacklevel=3,
        )
