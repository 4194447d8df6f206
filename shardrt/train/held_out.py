"""How held-out samples are shared among ranks: text and images alike."""

from collections.abc import Iterator

import numpy as np

__all__ = ["IGNORED", "shares"]

IGNORED = -100  # the target or label that F.cross_entropy leaves out


def shares(
    count: int, batch_size: int, *, limit: int | None = None, rank: int = 0, size: int = 1
) -> Iterator[np.ndarray]:
    """The numbers of this rank's samples, at most batch_size at a time, until all ranks have had all `count`.

    Args:
        limit: or that many, spread evenly. Every rank gets equally many batches: the forward of a sharded
            model is collective: the last ones may be shorter, or empty.
    """
    taken = count if limit is None else min(limit, count)
    chosen = np.arange(taken) * count // taken
    for first in range(0, taken, batch_size * size):
        yield chosen[first + rank * batch_size :][:batch_size]
