"""A kernel that does nothing for a while, to make a stream late."""

from functools import cache

import cupy
import numpy as np

_SOURCE = r"""
extern "C" __global__ void spin(long long nanoseconds) {
#ifndef SHARDRT_SHIM  // there streams are late by themselves
    long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
#endif
}
"""


@cache
def _kernel():
    return cupy.RawKernel(_SOURCE, "spin")


def spin(milliseconds):
    """Keep CuPy's current stream busy."""
    _kernel()((1,), (1,), (np.int64(1e6 * milliseconds),))
