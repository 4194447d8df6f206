"""The tree by which the gradients of a step's micro-batches are added, the same at every number of ranks.

With M micro-batches on W ranks, both powers of two, turn j takes micro-batches j W to j W + W - 1, one on
each rank. A reduction adds those of a turn as neighbours (kernels/cpu/reduce.py); turns are added as a binary
counter counts, with a buffer for each of its bits that is 1. Together that is one tree of M leaves, whatever
W is. The buffers after each of four turns: 0; 01; 01, 2; 0123.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a turn's sum goes: written to or added to `buffer`, then `merges` times to the buffer before."""

    buffer: int
    accumulate: bool
    merges: int


def place(turn: int) -> Place:
    """The place of turn number `turn`, counted from 0."""
    set_bits = turn.bit_count()
    if turn % 2 == 0:
        return Place(set_bits, False, 0)
    trailing = (turn ^ (turn + 1)).bit_length() - 1  # ones at the end of `turn`: so far the carry goes
    return Place(set_bits - 1, True, trailing - 1)


def buffers(turns: int) -> int:
    """How many buffers it takes to add up `turns` turns, a power of two."""
    return max(1, turns.bit_length() - 1)
