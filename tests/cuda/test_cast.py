"""16-bit floats as bits: nan, every float16, and kinds that are refused."""

import numpy as np
import pytest

from shardrt.kernels.cuda import cast as cuda
from tests.cuda.numbers import guarded

KINDS = ["bfloat16", "float16"]


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_nan(emulated, kind):
    with guarded("float32") as array:
        x = array(np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0x7FFFFFFF], np.uint32).view(np.float32))
        bits, back = array(np.zeros(4), dtype=np.uint16), array(np.zeros(4))
        cuda.pack(x, bits, kind)
        cuda.unpack(bits, back, kind)
        assert np.isnan(back).all()
        cuda.round_to(x, x, kind)
        assert np.isnan(x).all()


@pytest.mark.parametrize("function", [cuda.round_to, cuda.pack, cuda.unpack])
def test_other_kinds_are_refused(emulated, function):
    with pytest.raises(ValueError, match="'bfloat16' or 'float16', got 'float32'"):
        function(np.zeros(4, np.float32), np.zeros(4, np.float32), "float32")
