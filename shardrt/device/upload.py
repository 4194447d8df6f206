"""Uploads: copies small host arrays to a GPU by pinned memory, without a wait of the host.

A stream may run a copy steps after the host has issued it. So each copy has its own pinned memory, which is
reused only after the copy.
"""

from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

_LEAST = 4096  # bytes of a piece of pinned memory


class Uploads:
    """The copies of one thread, each in the current stream. pinned(nbytes): makes pinned memory."""

    def __init__(
        self, cupy: ModuleType, pinned: Callable[[int], np.ndarray], copy: Callable[[Any, Any], None]
    ) -> None:
        self._cupy = cupy
        self._pinned = pinned
        self._copy = copy
        self._pieces: deque[tuple[np.ndarray, Any]] = deque()  # (memory, event of its copy), oldest first

    def send(self, target: Any, values: np.ndarray) -> None:
        """Issue a copy of `values` to `target`, of the same shape and dtype. `values` may change at once."""
        memory, copied = self._free(values.nbytes)
        memory[: values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._copy(target, memory[: values.nbytes].view(values.dtype))
        copied.record(self._cupy.cuda.get_current_stream())
        self._pieces.append((memory, copied))

    def _free(self, nbytes: int) -> tuple[np.ndarray, Any]:
        """The oldest piece; a new one if that is too small or its copy has not run.

        So pieces never outnumber waiting copies, which the driver's queue bounds.
        """
        if self._pieces and self._pieces[0][1].done:
            piece = self._pieces.popleft()
            if piece[0].size >= nbytes:
                return piece
        size = max(_LEAST, 1 << (nbytes - 1).bit_length())
        return self._pinned(size), self._cupy.cuda.Event(disable_timing=True)
