"""What optimizers with low-bit state have in common."""

import numpy as np

from shardrt.device import Array
from shardrt.nn.storage import Storage
from shardrt.optim.optimizer import Optimizer


class LowBit(Optimizer):
    """Mixed into an optimizer: the state of float32 shards is of the dtype `kept`, other state of its own.

    Raises:
        ValueError: for exp_avg_dtype.
    """

    kept: np.dtype

    def _new_state(self, storage: Storage, name: str) -> Array:
        if self._low_state:
            raise ValueError(f"{type(self).__name__}: exp_avg_dtype is for optim.AdamW; leave it out")
        return storage.new_state(name, self.kept if storage.shard.dtype == np.float32 else None)
