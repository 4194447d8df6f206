"""Packing: examples of different lengths into windows of one length, without cutting one.

Best-fit decreasing, as in Ding et al., "Fewer Truncations Improve Language Modeling", 2024: the longest
example first, each into the fullest window that has room for it.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from shardrt.train.held_out import IGNORED

__all__ = ["Packed", "best_fit"]


def best_fit(lengths: Sequence[int] | np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Put lengths into windows of `room`. Takes time proportional to their number, but for sorting.

    Args:
        lengths: each from 1 to `room`; equal ones stay in their order.

    Returns:
        (order, borders), int64: window w has the examples order[borders[w] : borders[w + 1]].

    Raises:
        ValueError: for a length that no window has room for, or below 1.

    Example:
        >>> order, borders = best_fit([2, 6, 3, 5], 8)
        >>> [order[first:last].tolist() for first, last in zip(borders, borders[1:])]
        [[1, 0], [3, 2]]
    """
    sizes = np.asarray(lengths, np.int64)
    if sizes.size and not 1 <= sizes.min() <= sizes.max() <= room:
        raise ValueError(
            f"best_fit: lengths must be from 1 to room = {room}, got {sizes.min()} to {sizes.max()}"
        )
    decreasing = np.argsort(-sizes, kind="stable")
    window_of = np.empty(sizes.size, np.int64)
    with_space: list[list[int]] = [[] for _ in range(room + 1)]  # windows by the room they have left
    spaces, count = 0, 0  # bit s of spaces: with_space[s] is not empty
    for example, size in zip(decreasing.tolist(), sizes[decreasing].tolist(), strict=True):
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1  # the least that is enough
            window = with_space[space].pop()
            if not with_space[space]:
                spaces ^= 1 << space
        else:
            space, window, count = room, count, count + 1
        window_of[example] = window
        left = space - size
        with_space[left].append(window)
        spaces |= 1 << left
    order = decreasing[np.argsort(window_of[decreasing], kind="stable")]
    return order, np.searchsorted(window_of[order], np.arange(count + 1))


class Packed:
    """Examples in windows: their tokens, next tokens as targets, and which tokens belong together.

    Window w of epoch e is a function of the seed, e and w alone.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        answers: np.ndarray,
        begins: np.ndarray,
        sizes: np.ndarray,
        counts: np.ndarray,
        room: int,
    ) -> None:
        """Pack examples (chat.Fitted) into windows of `room` tokens.

        Args:
            tokens, answers: of all examples, 1-D; answers is 0 where a token is no target.
            begins: where each example begins in `tokens`.
            sizes: how many inputs each has; the targets are the tokens that follow them.
            counts: how many of its targets are answers.
        """
        self._tokens, self._answers, self._begins, self._sizes = tokens, answers, begins, sizes
        self.room = room
        self._order, self._borders = best_fit(sizes, room)
        ends = np.concatenate([[0], np.cumsum(counts[self._order])])
        self.counts = np.diff(ends[self._borders])  # answers in each window
        self.examples, self.inputs = sizes.size, int(sizes.sum())

    def __len__(self) -> int:
        return len(self.counts)

    def padding(self) -> float:
        """The share of the windows that holds no example."""
        return 1 - self.inputs / max(1, len(self) * self.room)

    def question(self) -> np.ndarray:
        """The tokens of the first example before its first answer, int64, one at least."""
        first, size = self._begins[0], self._sizes[0]
        said = np.flatnonzero(np.asarray(self._answers[first + 1 : first + size + 1]) == 1)
        return np.asarray(self._tokens[first : first + 1 + said[0]]).astype(np.int64)

    def numbers(self, samples: range, seed: int) -> np.ndarray:
        """The window of each sample of a run: each epoch takes all windows once, in another order."""
        epochs, places = np.divmod(np.arange(samples.start, samples.stop), len(self))
        return np.array(
            [epoch_order(len(self), int(e), seed)[p] for e, p in zip(epochs, places, strict=True)], np.int64
        )

    def rows(self, windows: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, targets, number of the example in its window; the padding has one more), int64 each.

        (windows, room). A target that is not of an answer is IGNORED.
        """
        shape = (len(windows), self.room)
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        documents = np.zeros(shape, np.int64)
        for row, window in enumerate(windows):
            at = 0
            inside = self._order[self._borders[window] : self._borders[window + 1]]
            for number, example in enumerate(inside):
                first, size = self._begins[example], self._sizes[example]
                text = np.asarray(self._tokens[first : first + size + 1])
                said = np.asarray(self._answers[first + 1 : first + size + 1]) == 1
                tokens[row, at : at + size] = text[:-1]
                targets[row, at : at + size][said] = text[1:][said]
                documents[row, at : at + size] = number
                at += size
            documents[row, at:] = len(inside)
        return tokens, targets, documents


@lru_cache(2)
def epoch_order(count: int, epoch: int, seed: int) -> np.ndarray:
    """A permutation of `count` windows, from raw Philox words: the same in every version of NumPy."""
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(count)
    return np.argsort(words, kind="stable")
