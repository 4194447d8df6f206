"""Pieces of optimizer state in 8 bits, which is float32 in a file (optim/low_bit/scales.py).

A block is encoded as a whole. What is read for a part of a block waits until the rest of it is there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from shardrt import device
from shardrt.checkpoint.pieces import Array, Piece
from shardrt.optim.low_bit.scales import BLOCK, decode, encode, signed


@dataclass(frozen=True, eq=False)
class EncodedPiece(Piece):
    """As Piece; `flat` has codes.

    Attributes:
        scales: those of all blocks of `flat`.
    """

    scales: Array = None
    _waiting: dict[int, dict[int, float]] = field(default_factory=dict)  # block -> element -> its number

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.flat, self.scales

    def copied(self, copies: Mapping[int, Array]) -> "EncodedPiece":
        return replace(self, flat=copies[id(self.flat)], scales=copies[id(self.scales)])

    def read(self, start: int, stop: int) -> np.ndarray:
        first, last = self.start + start, min(self.start + stop, self.stop)
        begin = first // BLOCK * BLOCK
        here, blocks = device.of(self.flat), slice(begin // BLOCK, -(-last // BLOCK))
        codes, scales = here.to_numpy(self.flat[begin:last]), here.to_numpy(self.scales[blocks])
        return decode(codes, scales, signed(self.kind))[first - begin :]

    def clear(self) -> None:
        self.write(0, np.zeros(self.stop - self.start, np.float32))

    def write(self, start: int, values: np.ndarray) -> None:
        first = self.start + start
        stop = first + values.size
        begin = min(-(-first // BLOCK) * BLOCK, stop)  # whole blocks are [begin, end)
        end = stop if stop == self.stop else max(begin, stop // BLOCK * BLOCK)
        if begin < end:
            self._put(begin, values[begin - first : end - first])
        for element in (*range(first, begin), *range(end, stop)):
            self._wait(element, values[element - first])

    def _wait(self, element: int, value: float) -> None:
        block = element // BLOCK
        known = self._waiting.setdefault(block, {})
        known[element] = value
        begin, end = block * BLOCK, min((block + 1) * BLOCK, self.stop)
        if len(known) == end - begin:
            del self._waiting[block]
            self._put(begin, np.array([known[each] for each in range(begin, end)], np.float32))

    def _put(self, begin: int, values: np.ndarray) -> None:
        codes, scales = encode(values, signed(self.kind))
        here, block = device.of(self.flat), begin // BLOCK
        here.copy(self.flat[begin : begin + codes.size], codes)
        here.copy(self.scales[block : block + scales.size], scales)
