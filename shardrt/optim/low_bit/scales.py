"""The scales of 8-bit optimizer state: an array next to each array of codes (kernels/cpu/blockwise.py).

Codes are an array as long as the shard, as other optimizer state is. A block is BLOCK elements of the shard;
fsdp/layout.py starts every parameter and every shard at a multiple of BLOCK, so blocks are blocks of the
parameter too, no rank cuts one, and no bit depends on the number of ranks.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardrt import device
from shardrt.device import Array, host
from shardrt.nn.storage import Storage
from shardrt.optim.slices import Slice

if TYPE_CHECKING:
    from shardrt.fsdp.memory import MemoryPlan

__all__ = [
    "BLOCK",
    "BYTES",
    "CODES",
    "Scales",
    "decode",
    "encode",
    "encoded",
    "key_of",
    "new_scales",
    "numbers",
    "signed",
    "with_scales",
]

BLOCK = 16  # elements
CODES = np.dtype(np.uint8)
BYTES = 1 + 2 / BLOCK  # per element of a moment, in shards of whole blocks
_STATE = "optimizer state"
_SIGNED = {"m": True, "v": False}  # the map of each kind


def key_of(kind: str) -> str:
    """The name of the scales of the moments `kind`, in Slice.state."""
    return f"{kind}_scales"


def signed(kind: str) -> bool:
    """Whether the moments `kind` may be negative."""
    return _SIGNED[kind]


def encoded(piece: Slice, kind: str) -> bool:
    """Whether this optimizer state is kept in 8 bits."""
    return key_of(kind) in piece.state


class Scales:
    """The scales of a shard of codes, taken as if they were as long: scales[start:stop] is those of elements.

    So code that cuts all arrays of an optimizer alike gets the right blocks. A start must begin a block.

    Attributes:
        array: uint16, one for a block.
    """

    def __init__(self, array: Array) -> None:
        self.array = array

    def __getitem__(self, elements: slice) -> Array:
        return self.array[elements.start // BLOCK : -(-elements.stop // BLOCK)]

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return self.array.nbytes


def new_scales(storage: Storage) -> Scales:
    """Zeros, so that all codes mean 0: where the kernel runs, also if the codes are on the host."""
    here, count = device.current(), -(-storage.shard.size // BLOCK)
    on_host = storage.offloaded.step == "host"
    array = host.buffer(here, count, np.uint16) if on_host else here.buffer(count, np.uint16)
    return Scales(here.set_tag(array, _STATE))


def with_scales(plan: "MemoryPlan", *, on_host: bool) -> "MemoryPlan":
    """A plan whose optimizer state is codes alone, with their scales.

    on_host: the host updates. Scales are there then, else on the device, wherever the codes are.
    """
    codes = sum(place.get(_STATE, 0) for place in (plan.device, plan.host))
    place, name = (plan.host, "host") if on_host else (plan.device, "device")
    scaled = place | {_STATE: place.get(_STATE, 0) + int(codes * (BYTES - 1))}
    return replace(plan, **{name: scaled})


def numbers(piece: Slice, kind: str) -> np.ndarray:
    """The moments of the whole shard, float32, on the host."""
    codes, scales = piece.state[kind], piece.state[key_of(kind)].array
    here = device.of(codes)
    return decode(here.to_numpy(codes), here.to_numpy(scales), signed(kind))


def decode(codes: np.ndarray, scales: np.ndarray, has_sign: bool) -> np.ndarray:
    """The numbers of codes, from the begin of a block on."""
    out = np.empty(codes.size, np.float32)
    arrays = np.ascontiguousarray(codes), np.ascontiguousarray(scales)
    device.get("cpu").kernels.blockwise.dequantize(*arrays, out, has_sign)
    return out


def encode(values: np.ndarray, has_sign: bool) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales) of numbers, from the begin of a block on."""
    codes, scales = np.empty(values.size, CODES), np.empty(-(-values.size // BLOCK), np.uint16)
    values = np.ascontiguousarray(values, np.float32)
    device.get("cpu").kernels.blockwise.quantize(values, codes, scales, has_sign)
    return codes, scales
