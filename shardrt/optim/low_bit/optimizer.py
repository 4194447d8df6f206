"""What makes an optimizer keep its state in 8 bits."""

from typing import Any

import numpy as np

from shardrt.device import Array
from shardrt.optim.low_bit.scales import CODES, Scales, encoded, key_of, new_scales, numbers
from shardrt.optim.low_bit.state import LowBit
from shardrt.optim.slices import Slice


class _EncodedSlice(Slice):
    """A slice whose state may be codes with scales."""

    __slots__ = ()

    def as_shard(self, kind: str) -> Array:
        return numbers(self, kind) if encoded(self, kind) else super().as_shard(kind)


class EightBit(LowBit):
    """Mixed into an optimizer: codes for the state of float32 shards, with scales."""

    kept = CODES
    slice_type = _EncodedSlice

    def _start_updates(self, new: list[Slice]) -> None:
        scales = {piece: self._take_scales(piece) for piece in self.slices}
        super()._start_updates(new)  # which would bring them from the host, as they were as long as codes
        for piece in new:
            if piece.storage.shard.dtype == np.float32:
                scales[piece] = {key_of(kind): new_scales(piece.storage) for kind in self.state_names}
        for piece, arrays in scales.items():
            piece.state.update(arrays)

    def _take_scales(self, piece: Slice) -> dict[str, Scales]:
        keys = [key_of(kind) for kind in self.state_names if encoded(piece, kind)]
        return {key: piece.state.pop(key) for key in keys}


def arrays_of(arrays: dict[str, Any], kinds: dict[str, str]) -> list[Array]:
    """Shard and gradient of an update, then each array of codes with its scales, as kernels take them."""
    pairs = [each for kind in kinds for each in (arrays[kind], arrays[key_of(kind)])]
    plain = [each.array if isinstance(each, Scales) else each for each in pairs]  # a part has arrays
    return [arrays["shard"], arrays["gradient"], *plain]
