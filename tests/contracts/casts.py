"""Contracts of 16-bit floats as bits, by NumPy's float16 and ml_dtypes' bfloat16."""

import ml_dtypes
import numpy as np

from tests.contracts import Call, Out, contract
from tests.cuda.numbers import normal

KINDS = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
COUNTS = [1, 3, 17, 2051]


def awkward(count):
    """Float32 numbers of every size: subnormal, too large, halfway between two, infinite."""
    x = np.random.default_rng(count).integers(0, 2**32, count, np.uint32).view(np.float32)
    x[::3] = normal(x[::3].size) * 10.0 ** np.random.default_rng(1).integers(-9, 6, x[::3].size)
    special = [0, -0.0, np.inf, -np.inf, 65504, 65520, 65519.9, 2**-24, 2**-25, 1 + 2**-8, 3 * 2**-25]
    x[: len(special)] = special[:count]
    x[np.isnan(x)] = 1.5
    return x.astype(np.float64)


def bits_of(x, dtype):
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(dtype).view(np.uint16)


@contract("cast.pack", "cast.round_to", "cast.unpack")
def casts(kernel):
    for kind, dtype in KINDS.items():
        for count in COUNTS:
            bits = np.random.default_rng(count).integers(0, 1 << 16, count, np.uint16)
            given = bits if kernel == "cast.unpack" else awkward(count)
            truth = {
                "cast.pack": lambda x, dtype=dtype: bits_of(x, dtype),
                "cast.round_to": lambda x, dtype=dtype: bits_of(x, dtype).view(dtype).astype(np.float64),
                "cast.unpack": lambda x, dtype=dtype: x.view(dtype).astype(np.float64),
            }[kernel]
            over = 0 if kernel == "cast.round_to" else None
            yield Call((given, Out(), kind), truth, exact=True, over=over, elements=("float32",))
