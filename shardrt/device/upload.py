"""Small arrays of the host on their way to a GPU: pinned memory that is written while earlier copies wait.

A copy is made when its stream comes to it, which may be steps later; the host goes on at once. So each copy
has pinned memory of its own, which is written again only when the copy has been made.
"""

from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

_LEAST = 4096  # bytes of a piece of pinned memory


class Uploads:
    """Copies of one thread, each in the stream that is current. pinned(nbytes): makes pinned memory."""

    def __init__(
        self, cupy: ModuleType, pinned: Callable[[int], np.ndarray], copy: Callable[[Any, Any], None]
    ) -> None:
        self._cupy = cupy
        self._pinned = pinned
        self._copy = copy
        self._pieces: deque[tuple[np.ndarray, Any]] = deque()  # with the event of its copy; oldest first

    def send(self, target: Any, values: np.ndarray) -> None:
        """Issue a copy of `values`, which may be changed at once, to `target`, of their shape and dtype."""
        memory, copied = self._free(values.nbytes)
        memory[: values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._copy(target, memory[: values.nbytes].view(values.dtype))
        copied.record(self._cupy.cuda.get_current_stream())
        self._pieces.append((memory, copied))

    def _free(self, nbytes: int) -> tuple[np.ndarray, Any]:
        """The oldest piece, or a new one if that is too small or still to be copied.

        So there are never more pieces than copies that wait, and those the driver's queue bounds.
        """
        if self._pieces and self._pieces[0][1].done:
            piece = self._pieces.popleft()
            if piece[0].size >= nbytes:
                return piece
        size = max(_LEAST, 1 << (nbytes - 1).bit_length())
        return self._pinned(size), self._cupy.cuda.Event(disable_timing=True)
