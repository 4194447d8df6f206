"""Attention as training calls it, on heads packed in one array: cuDNN's where it is there, else our own."""

from math import sqrt

import ml_dtypes
import numpy as np
import pytest

from tests.contracts.attention import backward, forward, heads_of
from tests.gpu.sizes import ELEMENTS, HEADS, TIME
from tests.gpu.test_products import assert_repeats

pytestmark = pytest.mark.gpu


def check(on_gpu, element, shape, **how):
    for name, call in (("forward", forward), ("backward", backward)):
        on_gpu(f"attention.{name}", element, [call(shape, {"causal": True, "scale": 0.125} | how)])


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("causal", [True, False])
def test_forward_and_backward(on_gpu, element, shape, causal):
    batch, heads, time, width = shape
    check(on_gpu, element, (batch, heads, heads, time, time, width), causal=causal, scale=1 / sqrt(width))


@pytest.mark.parametrize("element", ELEMENTS)
def test_heads_that_share_keys_and_values(on_gpu, element):
    check(on_gpu, element, (2, 8, 2, TIME, TIME, 64))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("window", [5, TIME * 5 // 8])
def test_a_window_where_heads_share_keys_and_values(on_gpu, element, window):
    check(on_gpu, element, (2, 4, 2, TIME, TIME, 64), window=window)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("length", [TIME * 5 // 8, 4], ids=["documents", "many documents"])
def test_documents_as_in_training_and_too_many_for_cudnn(on_gpu, element, length):
    starts = np.broadcast_to(np.arange(TIME) // length * length, (2, TIME)).copy()  # a plan is for 4 here
    check(on_gpu, element, (2, 2, 2, TIME, TIME, 64), starts=starts)


@pytest.mark.parametrize("element", ELEMENTS)
def test_chunks_of_queries_as_a_rank_of_context_parallelism_has_them(on_gpu, element):
    each = TIME // 4
    check(on_gpu, element, (2, 2, 2, 2 * each, TIME, 64), offsets=(each, 2 * each))


def run(kernels, qkv, dy, y, dqkv, lse, heads, how):
    """Forward, then backward from what it gave."""
    (y_heads,), (dy_heads,) = heads_of(y, 1, heads), heads_of(dy, 1, heads)
    kernels.forward(*heads_of(qkv, 3, heads), y_heads, lse, **how)
    kernels.backward(dy_heads, *heads_of(qkv, 3, heads), y_heads, lse, *heads_of(dqkv, 3, heads), **how)


def test_the_same_bits_every_time(gpu, deterministic):
    dtype = np.dtype(ml_dtypes.bfloat16)
    random = np.random.default_rng(0)
    qkv = gpu.asarray(random.normal(size=(2, 2 * TIME, 3 * 128)).astype(dtype))
    dy = gpu.asarray(random.normal(size=(2, 2 * TIME, 128)).astype(dtype))

    def both():
        outs = [gpu.empty(like.shape, dtype) for like in (dy, qkv)]
        lse = gpu.empty((2, 2, 2 * TIME), np.float32)
        run(gpu.kernels.attention, qkv, dy, *outs, lse, 2, {"causal": True, "scale": 0.125})
        return outs

    assert_repeats(gpu, both)


@pytest.mark.parametrize("keys", [64, 192])
def test_rows_whose_weights_are_far_below_one_have_finite_gradients(gpu, keys):
    """Every product of a query and a key is -120, where cuDNN has given nan on Hopper."""
    random = np.random.default_rng(0)
    q, k, v, dy = (0.1 * random.normal(size=(1, 1, keys, 64)) for _ in range(4))
    q[..., 0], k[..., 0] = 1.0, -120.0
    q, k, v, dy = (gpu.asarray(x.astype(ml_dtypes.bfloat16)) for x in (q, k, v, dy))
    y, dq, dk, dv = (gpu.empty(q.shape, q.dtype) for _ in range(4))
    lse = gpu.empty(q.shape[:3], np.float32)
    how = {"causal": False, "scale": 1.0}
    gpu.kernels.attention.forward(q, k, v, y, lse, **how)
    gpu.kernels.attention.backward(dy, q, k, v, y, lse, dq, dk, dv, **how)
    assert gpu.to_numpy(lse).max() < -89
    for gradient in (dq, dk, dv):
        assert np.isfinite(gpu.to_numpy(gradient).astype(np.float32)).all()
