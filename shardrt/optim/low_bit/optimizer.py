"""What makes an optimizer keep its state in 8 bits."""

from typing import Any

import numpy as np

from shardrt.device import Array
from shardrt.nn.storage import Storage
from shardrt.optim.low_bit.scales import CODES, key_of, new_scales
from shardrt.optim.optimizer import Optimizer
from shardrt.optim.slices import Slice


class EightBit(Optimizer):
    """Mixed into an optimizer: codes for the state of float32 shards, with scales; others keep their type.

    Raises:
        ValueError: for units with an offload_policy.
    """

    def _new_state(self, storage: Storage, name: str) -> Array:
        low = storage.shard.dtype == np.float32
        return storage.new_state(name, CODES) if low else super()._new_state(storage, name)

    def _start_updates(self, new: list[Slice]) -> None:
        for piece in new:
            if piece.storage.shard.dtype == np.float32:
                scales = {key_of(kind): new_scales(piece.storage, piece.name) for kind in self.state_names}
                piece.state.update(scales)
        super()._start_updates(new)


def arrays_of(arrays: dict[str, Any], kinds: dict[str, str]) -> list[Array]:
    """Shard and gradient of an update, then each array of codes with its scales, as kernels take them."""
    pairs = [arrays[name] for kind in kinds for name in (kind, key_of(kind))]
    return [arrays["shard"], arrays["gradient"], *pairs]
