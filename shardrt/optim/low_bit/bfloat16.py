"""AdamW and Lion with stochastically rounded moments in bfloat16, alike on any number of ranks."""

from dataclasses import replace
from types import ModuleType

import numpy as np

from shardrt import random
from shardrt.device import Array
from shardrt.optim.adamw import AdamW
from shardrt.optim.lion import Lion
from shardrt.optim.low_bit.state import LowBit
from shardrt.optim.slices import BITS, Cut, Slice, Update

_WORD = 2**32


class _SeededUpdate(Update):
    """As Update; each range ends with the five numbers of `_seed`; the last is that of its first element."""

    def part(self, start: int, stop: int) -> Update:
        ranges = self.ranges.copy()
        ranges[:, -1] += np.maximum(start - ranges[:, 0], 0)
        return Update.part(replace(self, ranges=ranges), start, stop)


class _StochasticSlice(Slice):
    """A slice, each of whose parameters is updated as a range of its own, with its seed."""

    __slots__ = ()

    def due(self) -> Cut:
        return self.due_apart()

    def update(self, ranges: Array, rounds: bool) -> Update:
        whole = super().update(ranges, rounds)
        return _SeededUpdate(whole.arrays, whole.ranges, whole.kind)


class _Stochastic(LowBit):
    """Mixed into an optimizer: its state of float32 shards is kept in bfloat16, rounded stochastically.

    The random bits of an element come from the seed, the parameter's name, the number of the update, and the
    element's place in the parameter: not from the rank that has it, nor from what else is in its unit.
    """

    kept = BITS
    slice_type = _StochasticSlice

    def _table(self, cuts: list[tuple[Slice, Cut]]) -> Array:
        seeds = [_seed(piece, position) for piece, cut in cuts for *_, position in cut.rows]
        return np.column_stack([super()._table(cuts), np.array(seeds, np.float64).reshape(-1, 5)])


class AdamWBF16(_Stochastic, AdamW):
    """AdamW whose two moments have 16 bits per element, rounded stochastically: 4 bytes per element, not 8.

    Rounding to nearest would lose most changes of a second moment at beta2 = 0.999: they are below half a
    step of bfloat16. Rounded stochastically, the changes add up to the right sum on average.

    Args:
        lr, betas, eps, weight_decay, in_backward: see AdamW.

    Example:
        >>> from shardrt import nn
        >>> from shardrt.optim.low_bit import AdamWBF16
        >>> optimizer = AdamWBF16(nn.Linear(8, 8).parameters(), lr=1e-3)
        >>> sum(array.nbytes for piece in optimizer.slices for array in piece.state.values())
        288
    """

    @property
    def rounds(self) -> bool:
        """Whether `update` also writes the 16-bit copy of the parameters; a subclass with its own may not."""
        return type(self).update is AdamWBF16.update

    def update(self, kernels: ModuleType, update: Update) -> None:
        arrays = [update.arrays[name] for name in ("shard", "gradient", "m", "v")]
        rounded = update.arrays.get("rounded")
        if arrays[3].dtype == BITS:
            kernels.stochastic.adamw(*arrays, update.ranges, rounded, update.kind)
        else:
            kernels.adamw.step(*arrays, update.ranges[:, :-5].copy(), rounded, update.kind)


class LionBF16(_Stochastic, Lion):
    """Lion whose moment has 16 bits per element, as AdamWBF16's: 2 bytes per element, not 4.

    Args:
        lr, betas, weight_decay, in_backward: see Lion.

    Example:
        >>> from shardrt import nn
        >>> from shardrt.optim.low_bit import LionBF16
        >>> optimizer = LionBF16(nn.Linear(8, 8).parameters(), lr=1e-4, weight_decay=0.1)
    """

    def update(self, kernels: ModuleType, update: Update) -> None:
        arrays = [update.arrays[name] for name in ("shard", "gradient", "m")]
        if arrays[2].dtype == BITS:
            kernels.stochastic.lion(*arrays, update.ranges)
        else:
            kernels.lion.step(*arrays, update.ranges[:, :-5].copy())


def _seed(piece: Slice, position: int) -> tuple[int, int, int, int, int]:
    """The seed of a range (kernels/cpu/stochastic.py): two words each of seed and stream, and the element."""
    parameter, seed = piece.members[position][0], random.initial_seed()
    stream = (random.name_key(parameter.name) + int(piece.steps[position])) % 2**64
    first = parameter.storage.extents_of(parameter)[0].first
    return seed % _WORD, seed // _WORD % _WORD, stream % _WORD, stream // _WORD, first
