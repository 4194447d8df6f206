"""kernels/cpu/_attention_pairs.py: our own products of bfloat16 in attention, beside those of oneDNN."""

import numpy as np
import pytest

from shardrt.kernels import cpu as K
from shardrt.kernels import onednn
from shardrt.kernels.cpu import _attention_pairs, _vectors
from tests.gradcheck import normal

pytestmark = pytest.mark.skipif(
    not (_vectors.PAIRS and onednn.computes_bf16()), reason="needs AVX512-BF16, no AMX, and oneDNN"
)


def heads(*shape, seed):
    """(batch, heads, time, width) of normal numbers as a linear layer leaves them, in float32 and as bits."""
    numbers = normal(*shape, seed=seed).astype(np.float32)
    bits = np.empty(shape, np.uint16)
    K.cast.pack(numbers.reshape(-1), bits.reshape(-1), "bfloat16")
    return numbers.transpose(0, 2, 1, 3), bits.transpose(0, 2, 1, 3)


def run(dy, q, k, v, **how):
    """y, lse, dq, dk, dv."""
    y, dq = (np.full(dy.shape, np.nan, np.float32) for _ in range(2))
    dk, dv = (np.full(k.shape, np.nan, np.float32) for _ in range(2))
    lse = np.full(dy.shape[:3], np.nan, np.float32)
    K.attention.forward(q, k, v, y, lse, **how)
    K.attention.backward(dy, q, k, v, y, lse, dq, dk, dv, **how)
    return y, lse, dq, dk, dv


DOCUMENTS = np.stack([np.repeat([0, 40, 101], [40, 61, 29]), np.zeros(130, np.int64)])


@pytest.mark.parametrize(
    "time, keys, width, kv_heads, how",
    [
        (1, 1, 64, 2, {"causal": True}),
        (37, 37, 32, 1, {"causal": True}),
        (130, 130, 64, 2, {"causal": True, "starts": DOCUMENTS}),
        (64, 200, 96, 1, {"causal": True, "offsets": (30, 100)}),
        (66, 77, 64, 2, {"causal": False}),
        (9, 3, 128, 1, {"causal": False}),
    ],
)
def test_what_onednn_computes(monkeypatch, time, keys, width, kv_heads, how):
    shapes = ((2, time, 2, width), (2, time, 2, width), *[(2, keys, kv_heads, width)] * 2)
    (dy, _), *given = (heads(*shape, seed=seed) for seed, shape in enumerate(shapes))
    how["scale"] = width**-0.5
    found = run(dy, *(bits for _, bits in given), **how)
    monkeypatch.setattr(_attention_pairs, "suits", lambda head_dim: False)
    for mine, other in zip(found, run(dy, *(bits for _, bits in given), **how), strict=True):
        # Probabilities that differ in their last bit may be rounded apart.
        np.testing.assert_allclose(mine, other, rtol=0, atol=2e-3 * np.abs(other).max())


def test_beside_float64():
    (dy, _), *given = (heads(1, 75, 2, 64, seed=seed) for seed in range(4))
    found = run(dy, *(bits for _, bits in given), causal=True, scale=0.125)
    exact = (x.astype(np.float64) for x in (dy, *(numbers for numbers, _ in given)))
    dy, q, k, v = exact
    scores = np.where(np.tri(75, dtype=bool), q @ k.swapaxes(2, 3) * 0.125, -np.inf)
    lse = np.log(np.exp(scores).sum(-1))
    p = np.exp(scores - lse[..., None])
    y = p @ v
    ds = p * (dy @ v.swapaxes(2, 3) - (dy * y).sum(-1, keepdims=True)) * 0.125
    for mine, other in zip(
        found, (y, lse, ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dy), strict=True
    ):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-2 * np.abs(other).max())


def test_a_query_has_the_same_bits_whatever_follows_and_a_head_whatever_is_beside_it():
    (dy, _), *given = (heads(2, 150, 3, 64, seed=seed) for seed in range(4))
    how = {"causal": True, "scale": 0.125}
    y, lse, dq, dk, dv = run(dy, *(bits for _, bits in given), **how)
    short = [x[:, :, :75] for x in (dy, *(bits for _, bits in given))]
    for mine, whole in zip(run(*short, **how)[:3], (y, lse, dq), strict=True):
        np.testing.assert_array_equal(mine, whole[:, :, :75])
    alone = [np.ascontiguousarray(x[1:, 2:]) for x in (dy, *(bits for _, bits in given))]
    for mine, whole in zip(run(*alone, **how), (y, lse, dq, dk, dv), strict=True):
        np.testing.assert_array_equal(mine, whole[1:, 2:])
