"""Attention as training calls it, on heads packed in one array: cuDNN's where it is there, else our own."""

from math import sqrt

import ml_dtypes
import numpy as np
import pytest

from shardrt.kernels.cpu import attention as cpu
from tests.gpu.sizes import HEADS, TIME
from tests.gpu.test_products import off

pytestmark = pytest.mark.gpu

LIMITS = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


def heads_of(x, parts, heads):
    batch, time, width = x.shape
    x = x.reshape(batch, time, parts, heads, width // (parts * heads))
    return [x[:, :, part].transpose(0, 2, 1, 3) for part in range(parts)]


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("causal", [True, False])
def test_forward_and_backward(gpu, kind, shape, causal):
    dtype, limit = np.dtype(getattr(ml_dtypes, kind, kind)), LIMITS[kind]
    batch, heads, time, width = shape
    how = {"causal": causal, "scale": 1 / sqrt(width)}
    random = np.random.default_rng(shape)
    qkv = random.normal(size=(batch, time, 3 * heads * width)).astype(dtype)
    dy = random.normal(size=(batch, time, heads * width)).astype(dtype)
    y, dqkv = np.full(dy.shape, np.nan, dtype), np.full(qkv.shape, np.nan, dtype)
    lse = np.full(shape[:3], np.nan, np.float32)

    there = [gpu.asarray(array) for array in (qkv, dy, y, dqkv, lse)]
    run(gpu.kernels.attention, *there, heads, how)
    exact = [array.astype(np.float64) for array in (qkv, dy, y, dqkv, lse)]
    run(cpu, *exact, heads, how)
    names = ("y", "dqkv", "lse")
    for name, found, expected in zip(names, there[2:], exact[2:], strict=True):
        assert off(gpu, found, expected) < limit, name


def run(kernels, qkv, dy, y, dqkv, lse, heads, how):
    """Forward, then backward from what it gave."""
    (y_heads,), (dy_heads,) = heads_of(y, 1, heads), heads_of(dy, 1, heads)
    kernels.forward(*heads_of(qkv, 3, heads), y_heads, lse, **how)
    kernels.backward(dy_heads, *heads_of(qkv, 3, heads), y_heads, lse, *heads_of(dqkv, 3, heads), **how)


@pytest.mark.parametrize("kind", LIMITS)
def test_heads_that_share_keys_and_values(gpu, kind):
    dtype, limit = np.dtype(getattr(ml_dtypes, kind, kind)), LIMITS[kind]
    random = np.random.default_rng(1)
    q, k, v, dy = (random.normal(size=(2, h, TIME, 64)).astype(dtype) for h in (8, 2, 2, 8))
    outs = [np.full(x.shape, np.nan, dtype) for x in (q, q, k, v)]
    lse = np.full((2, 8, TIME), np.nan, np.float32)
    how = {"causal": True, "scale": 0.125}
    there = [gpu.asarray(array) for array in (q, k, v, dy, *outs, lse)]
    exact = [array.astype(np.float64) for array in (q, k, v, dy, *outs, lse)]
    for kernels, (q, k, v, dy, y, dq, dk, dv, lse) in ((gpu.kernels.attention, there), (cpu, exact)):
        kernels.forward(q, k, v, y, lse, **how)
        kernels.backward(dy, q, k, v, y, lse, dq, dk, dv, **how)
    for name, found, expected in zip(("y", "dq", "dk", "dv"), there[4:8], exact[4:8], strict=True):
        assert off(gpu, found, expected) < limit, name


def test_the_same_bits_every_time(gpu, deterministic):
    dtype = np.dtype(ml_dtypes.bfloat16)
    random = np.random.default_rng(0)
    qkv = gpu.asarray(random.normal(size=(2, 2 * TIME, 3 * 128)).astype(dtype))
    dy = gpu.asarray(random.normal(size=(2, 2 * TIME, 128)).astype(dtype))
    found = []
    for _ in range(3):
        outs = [gpu.empty(like.shape, dtype) for like in (dy, qkv)]
        lse = gpu.empty((2, 2, 2 * TIME), np.float32)
        run(gpu.kernels.attention, qkv, dy, *outs, lse, 2, {"causal": True, "scale": 0.125})
        found.append([gpu.to_numpy(out).view(np.uint16) for out in outs])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            np.testing.assert_array_equal(one, other)


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


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("how", ["chunks", "documents", "many documents"])
def test_chunks_and_documents(gpu, kind, how):
    """Queries as a rank of context parallelism has them; documents as in training, and too many for cuDNN."""
    dtype, limit = np.dtype(getattr(ml_dtypes, kind, kind)), LIMITS[kind]
    random, each = np.random.default_rng(2), TIME // 4
    qkv, dy = (random.normal(size=(2, TIME, parts * 128)).astype(dtype) for parts in (3, 1))
    options = {"causal": True, "scale": 0.125}
    rows = slice(each, 3 * each) if how == "chunks" else slice(None)  # of queries
    starts = None
    if how == "chunks":
        options["offsets"] = each, 2 * each
    else:
        length = 4 if how == "many documents" else TIME * 5 // 8  # a plan is for 4 here
        starts = np.broadcast_to(np.arange(TIME) // length * length, (2, TIME))
    y, dqkv = np.zeros(dy.shape, dtype), np.zeros(qkv.shape, dtype)
    lse = np.zeros((2, 2, dy[:, rows].shape[1]), np.float32)
    there = [gpu.asarray(array) for array in (qkv, dy, y, dqkv, lse)]
    exact = [array.astype(np.float64) for array in (qkv, dy, y, dqkv, lse)]
    for kernels, (qkv, dy, y, dqkv, lse) in ((gpu.kernels.attention, there), (cpu, exact)):
        if starts is not None:
            options["starts"] = gpu.asarray(starts, np.int64) if qkv is there[0] else starts.astype(np.int64)
        (y_heads,), (dy_heads,) = heads_of(y, 1, 2), heads_of(dy, 1, 2)
        (q, k, v), (dq, dk, dv) = heads_of(qkv, 3, 2), heads_of(dqkv, 3, 2)
        q, y_heads, dy_heads, dq = (x[:, :, rows] for x in (q, y_heads, dy_heads, dq))
        kernels.forward(q, k, v, y_heads, lse, **options)
        kernels.backward(dy_heads, q, k, v, y_heads, lse, dq, dk, dv, **options)
    for name, found, expected in zip(("y", "dqkv", "lse"), there[2:], exact[2:], strict=True):
        assert off(gpu, found, expected) < limit, name
