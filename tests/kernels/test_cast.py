"""kernels/cpu/cast.py: nan, overflow, errors. Every number is in tests/contracts/casts.py."""

import numpy as np
import pytest

from shardrt.kernels import cpu as K

KINDS = ["bfloat16", "float16"]


@pytest.mark.parametrize("kind", KINDS)
def test_infinity_sign_overflow_and_nan(kind):
    x = np.array([np.inf, -np.inf, -0.0, 3.4028235e38, -3.4028235e38, np.nan, -np.nan], np.float32)
    bits, back = np.empty(x.size, np.uint16), np.empty_like(x)
    K.cast.pack(x, bits, kind)
    K.cast.unpack(bits, back, kind)
    K.cast.round_to(x, x, kind)
    for found in (x, back):
        np.testing.assert_array_equal(found, [np.inf, -np.inf, 0, np.inf, -np.inf, np.nan, np.nan])
        assert np.signbit(found[2])


def test_a_kind_that_is_not_known_is_an_error():
    with pytest.raises(ValueError, match="'bfloat16' or 'float16', got 'float8'"):
        K.cast.round_to(np.ones(2, np.float32), np.ones(2, np.float32), "float8")
