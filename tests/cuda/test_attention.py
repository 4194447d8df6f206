"""The reference attention of kernels/cuda: what it refuses."""

import numpy as np
import pytest

from shardrt.kernels.cuda import attention as cuda


def test_a_head_that_is_too_wide_is_refused(emulated):
    x, lse = np.zeros((1, 1, 2, 257), np.float32), np.zeros((1, 1, 2), np.float32)
    with pytest.raises(ValueError, match="head_dim must be at most 256 on CUDA, got 257"):
        cuda.forward(x, x, x, x, lse, causal=True, scale=1.0)
