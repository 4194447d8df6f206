"""Contracts of 16-bit floats as bits, by NumPy's float16 and ml_dtypes' bfloat16."""

from functools import partial

import ml_dtypes
import numpy as np

from tests.contracts import Call, Out, contract

KINDS = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
EVERY = np.arange(1 << 16, dtype=np.uint16)


def hard(dtype):
    """All numbers of a type, the middles between neighbours, one float32 step around all, and random bits."""
    values = EVERY.view(dtype).astype(np.float32)
    middles = (values[:-1].astype(np.float64) + values[1:]) / 2
    exact = np.concatenate([values, middles.astype(np.float32)])
    down, up = np.nextafter(exact, np.float32(-np.inf)), np.nextafter(exact, np.float32(np.inf))
    chance = np.random.default_rng(0).integers(0, 1 << 32, 50_001, np.uint32).view(np.float32)
    ends = np.array([65504, 65519.996, 65520, 65536, 1e38, 3.4e38, 3e-8, 2.9802322e-8, 1e-45], np.float32)
    every = np.concatenate([exact, down, up, chance, ends, -ends])
    return every[~np.isnan(every)].astype(np.float64)


def bits_of(x, dtype):
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(dtype).view(np.uint16)


@contract("cast.pack", "cast.round_to", "cast.unpack")
def casts(kernel):
    truth = {
        "cast.pack": lambda x, dtype: bits_of(x, dtype),
        "cast.round_to": lambda x, dtype: bits_of(x, dtype).view(dtype).astype(np.float64),
        "cast.unpack": lambda x, dtype: x.view(dtype).astype(np.float64),
    }[kernel]
    for kind, dtype in KINDS.items():
        with np.errstate(invalid="ignore", over="ignore"):
            given = EVERY if kernel == "cast.unpack" else hard(dtype)
        for piece in (given, given[:17], given[-3:], given[7:8]):
            args = piece.copy(), Out(), kind
            how = {"exact": True, "elements": ("float32",)} | (
                {"over": 0} if kernel == "cast.round_to" else {}
            )
            yield Call(args, partial(truth, dtype=dtype), **how)
