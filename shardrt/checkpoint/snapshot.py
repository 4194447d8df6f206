"""The copy on the host that a save in the background is written from, while training changes the original."""

import numpy as np

from shardrt import device
from shardrt.checkpoint.pieces import Piece

_ALIGN = 64  # bytes


class Snapshot:
    """Page-locked memory, where the device knows such, kept from save to save.

    New pages with every save would take several times as long as the copy into them.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def of(self, pieces: list[Piece]) -> list[Piece]:
        """The same pieces, copied; they last until the next call. Raises MemoryError."""
        starts = np.cumsum([0, *(-(-piece.array.nbytes // _ALIGN) * _ALIGN for piece in pieces)]).tolist()
        here = device.current()
        if len(self._memory) < starts[-1]:
            self._memory = np.empty(0, np.uint8)  # the old one goes before the new one comes
            self._memory = here.pinned(starts[-1], np.uint8)
        copies = []
        for piece, start in zip(pieces, starts, strict=False):
            target = self._memory[start : start + piece.array.nbytes].view(piece.array.dtype)
            device.of(piece.array).copy(target, piece.array)
            copies.append(Piece(piece.kind, piece.parameter, piece.first, target))
        here.wait_here()
        return copies
