"""Random numbers in float32, and bfloat16 as bits."""

import numpy as np

from shardrt.kernels import cpu as K


def numbers(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def bits(x):
    """x rounded, as uint16."""
    out = np.empty(x.shape, np.uint16)
    K.cast.pack(np.ascontiguousarray(x).reshape(-1), out.reshape(-1), "bfloat16")
    return out
