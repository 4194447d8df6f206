"""The copy on the host that a save in the background is written from, while training changes the original."""

from dataclasses import replace

import numpy as np

from shardrt import device
from shardrt.checkpoint.pieces import Piece

_ALIGN = 64  # bytes


class Snapshot:
    """`pieces`, as they were when `take` was called last, in memory that is kept from save to save.

    It is page-locked where the device knows such. The flat arrays that the pieces lie in are copied whole,
    with padding: a few long copies, however many parameters there are. Raises MemoryError.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        flats = {id(piece.flat): piece.flat for piece in pieces}
        starts = np.cumsum([0, *(-(-flat.nbytes // _ALIGN) * _ALIGN for flat in flats.values())]).tolist()
        memory = device.current().pinned(starts[-1], np.uint8)
        copies = {
            key: memory[start : start + flat.nbytes].view(flat.dtype)
            for (key, flat), start in zip(flats.items(), starts, strict=False)
        }
        self._copies = [(device.of(flat), copies[key], flat) for key, flat in flats.items()]
        self.pieces = [replace(piece, flat=copies[id(piece.flat)]) for piece in pieces]

    def take(self) -> None:
        """Copy; what the last copy held is gone."""
        for where, target, source in self._copies:
            where.copy(target, source)
        device.current().wait_here()
