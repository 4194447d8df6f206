"""Norms as exact sums of integers, rounded once: bitwise identical however an array is sharded.

A float32 is a whole number times a power of two, so is its square; sums of those by exponent are integers of
two limbs (kernels/cpu/reduce.py, exact_power_sums). (The long accumulator of Kulisch and Miranker, The
arithmetic of the digital computer, 1986, with a bin for each exponent.)
"""

from math import inf, isqrt, nan

import numpy as np

_SMALLEST = 149  # the smallest float32 is 2 ** -149
_PRECISE = 110  # bits of a number whose root, cut off, is rounded to a float64 as the root itself


def norm_of(table: np.ndarray, p: int) -> float:
    """(sum |x| ** p) ** (1 / p) from the sum of all tables, rounded once; nan or infinity if one is there."""
    nans, infinities = table[255].tolist()
    if nans or infinities:
        return nan if nans else inf
    total = 0
    for e, (low, high) in enumerate(table[:255].tolist()):
        total += (low + (high << 24)) << p * (max(e, 1) - 1)
    return _root(total) if p == 2 else total / (1 << _SMALLEST)  # of integers: Python rounds correctly


def _root(total: int) -> float:
    """sqrt(total) * 2 ** -149, rounded to the nearest float64."""
    shift = max(0, _PRECISE - total.bit_length() + 1) // 2
    root = isqrt(total << 2 * shift)
    # A last bit that says whether something was cut off, so that a tie is none unless it is exact.
    root = 2 * root + (root * root != total << 2 * shift)
    return root / (1 << _SMALLEST + shift + 1)
