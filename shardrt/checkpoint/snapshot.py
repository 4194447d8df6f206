"""The host copy from which a background save is written, while training changes the original."""

import numpy as np

from shardrt import device
from shardrt.checkpoint.pieces import Piece

_ALIGN = 64  # bytes


class Snapshot:
    """`pieces` as of the last `take`, in memory that is kept from save to save.

    The memory is page-locked if the device supports it. The flat arrays of the pieces are copied whole, with
    padding: a few long copies for any number of parameters. Raises MemoryError.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        flats = {id(array): array for piece in pieces for array in piece.arrays}
        starts = np.cumsum([0, *(-(-flat.nbytes // _ALIGN) * _ALIGN for flat in flats.values())]).tolist()
        memory = device.current().pinned(starts[-1], np.uint8)
        copies = {
            key: memory[start : start + flat.nbytes].view(flat.dtype)
            for (key, flat), start in zip(flats.items(), starts, strict=False)
        }
        self._copies = [(device.of(flat), copies[key], flat) for key, flat in flats.items()]
        self.pieces = [piece.copied(copies) for piece in pieces]

    def take(self) -> None:
        """Copy the pieces over the last copy."""
        for where, target, source in self._copies:
            where.copy(target, source)
        device.current().wait_here()
