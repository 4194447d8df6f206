"""Splits the rows of a kernel over the threads of this rank.

Not Numba's prange: its threads clash with ranks and streams that are threads themselves. A kernel takes
(start, stop, ...) and may not depend on how the range is split, so the results don't depend on the threads.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

_WORTH = 16384  # elements for which another thread pays
_count = max(1, int(os.environ.get("NUMBA_NUM_THREADS", "1")))


def threads() -> int:
    """How many threads kernels use."""
    return _count


def set_threads(count: int) -> None:
    """Use `count` threads from now on. Raises ValueError for less than one."""
    global _count
    if count < 1:
        raise ValueError(f"set_threads: count must be 1 or more, got {count}")
    _count = count


def run_rows(kernel: Callable, rows: int, elements: int, *args: Any) -> None:
    """Call kernel(start, stop, *args) for pieces that cover range(rows), at the same time where it pays.

    elements: how much work there is in all; little work is not split.
    """
    pieces = min(_count, rows, elements // _WORTH) if _count > 1 else 1
    if pieces <= 1:
        kernel(0, rows, *args)
        return
    edges = [rows * i // pieces for i in range(pieces + 1)]
    jobs = [_pool(_count).submit(kernel, edges[i], edges[i + 1], *args) for i in range(1, pieces)]
    kernel(edges[0], edges[1], *args)
    for job in jobs:
        job.result()


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="shardrt-kernel")
