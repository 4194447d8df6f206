"""What optimizers with low-bit state have in common: its type, and updates in parts (optim/offload.py)."""

from dataclasses import replace

import numpy as np

from shardrt.device import Array
from shardrt.nn.storage import Storage
from shardrt.optim.low_bit.scales import BLOCK, SCALES
from shardrt.optim.optimizer import Optimizer
from shardrt.optim.slices import Slice, Update


class LowBit(Optimizer):
    """Mixed into an optimizer: the state of float32 shards is of the dtype `kept`, other state of its own.

    Parts of updates are those of the class `update_type`: of arrays on the host, in streams.

    Raises:
        ValueError: for exp_avg_dtype.
    """

    kept: np.dtype
    update_type: type[Update]

    def _new_state(self, storage: Storage, name: str) -> Array:
        if self._low_state:
            raise ValueError(f"{type(self).__name__}: exp_avg_dtype is for optim.AdamW; leave it out")
        return storage.new_state(name, self.kept if storage.shard.dtype == np.float32 else None)

    def _issue(self, piece: Slice) -> None:
        cut = piece.due()
        piece.steps[cut.members] += 1
        rounds = self._rounds(piece)
        if cut.rows:
            whole = piece.update(self._table([(piece, cut)]), rounds)
            update = self.update_type(whole.arrays, whole.ranges, whole.kind)
            self.updates.issue(piece, update, self._update_there)
        piece.storage.modified(rounds)


class EncodedUpdate(Update):
    """As Update, with scales, which are not as long as the other arrays. Parts must begin with blocks."""

    def part(self, start: int, stop: int) -> Update:
        blocks = slice(start // BLOCK, -(-stop // BLOCK))
        scales = {name: array[blocks] for name, array in self.arrays.items() if name.endswith(SCALES)}
        return super().part(start, stop).on(scales)


class SeededUpdate(Update):
    """As Update; each range ends with SEED, whose last number is that of the range's first element."""

    def part(self, start: int, stop: int) -> Update:
        ranges = self.ranges.copy()
        ranges[:, -1] += np.maximum(start - ranges[:, 0], 0)
        return Update.part(replace(self, ranges=ranges), start, stop)
