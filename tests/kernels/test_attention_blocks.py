"""attention's own products (_attention_rows.py, _attention_pairs.py) beside those of BLAS and oneDNN.

tests/contracts holds float32 to float64, test_bits.py what libraries make of bits to float32.
"""

import numpy as np
import pytest
from numba import config

from shardrt.kernels import cpu as K
from shardrt.kernels import onednn
from shardrt.kernels.cpu import _attention_pairs, _attention_rows, _vectors
from tests.gradcheck import normal
from tests.kernels.bits import bits

PAIRS = _vectors.PAIRS and onednn.computes_bf16()
KINDS = [
    pytest.param(False, marks=pytest.mark.skipif(not _vectors.FMA, reason="needs AVX2"), id="float32"),
    pytest.param(
        True, marks=pytest.mark.skipif(not PAIRS, reason="needs AVX512-BF16, oneDNN"), id="bfloat16"
    ),
]


def heads(low, *shape, seed):
    """(batch, heads, time, width) of normal numbers as a linear layer leaves them, in float32 or as bits."""
    values = normal(*shape, seed=seed).astype(np.float32)
    return (bits(values) if low else values).transpose(0, 2, 1, 3)


def run(dy, q, k, v, **how):
    """y, lse, dq, dk, dv."""
    y, dq = (np.full(dy.shape, np.nan, np.float32) for _ in range(2))
    dk, dv = (np.full(k.shape, np.nan, np.float32) for _ in range(2))
    lse = np.full(dy.shape[:3], np.nan, np.float32)
    K.attention.forward(q, k, v, y, lse, **how)
    K.attention.backward(dy, q, k, v, y, lse, dq, dk, dv, **how)
    return y, lse, dq, dk, dv


@pytest.mark.parametrize("features, wide", [("", False), ("+avx2,+fma", False), ("+avx2,+avx512f", True)])
def test_vectors_are_as_wide_as_those_that_numba_compiled_for(monkeypatch, features, wide):
    monkeypatch.setattr(config, "CPU_FEATURES", features)
    assert _vectors.compiled_for("avx512f") is wide


DOCUMENTS = np.stack([np.repeat([0, 40, 101], [40, 61, 29]), np.zeros(130, np.int64)])


@pytest.mark.parametrize("low", KINDS)
@pytest.mark.parametrize(
    "time, keys, width, kv_heads, how",
    [
        (1, 2, 64, 2, {"causal": False}),
        (37, 37, 32, 1, {"causal": True}),
        (130, 130, 64, 2, {"causal": True, "starts": DOCUMENTS}),
        (64, 200, 96, 1, {"causal": True, "offsets": (30, 100)}),
        (66, 77, 64, 2, {"causal": False}),
        (9, 3, 128, 1, {"causal": False}),
        (300, 300, 64, 1, {"causal": True, "window": 70}),
        (130, 130, 64, 2, {"causal": True, "starts": DOCUMENTS, "window": 33}),
        (64, 200, 96, 1, {"causal": True, "offsets": (30, 100), "window": 5}),
    ],
)
def test_what_libraries_compute(monkeypatch, low, time, keys, width, kv_heads, how):
    dy, q = (heads(kind, 2, time, 2, width, seed=kind) for kind in (False, low))
    k, v = (heads(low, 2, keys, kv_heads, width, seed=seed) for seed in (2, 3))
    found = run(dy, q, k, v, scale=width**-0.5, **how)
    for module in (_attention_pairs, _attention_rows):
        monkeypatch.setattr(module, "suits", lambda *_: False)
    # Probabilities in bfloat16 that differ in their last bit in float32 may be rounded apart.
    limit = 2e-3 if low else 1e-5
    for mine, other in zip(found, run(dy, q, k, v, scale=width**-0.5, **how), strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=limit * np.abs(other).max())


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("low", KINDS)
def test_a_query_has_the_same_bits_whatever_follows_and_a_head_whatever_is_beside_it(low, window):
    given = [heads(kind, 2, 150, 3, 64, seed=seed) for seed, kind in enumerate((False, low, low, low))]
    how = {"causal": True, "scale": 0.125, "window": window}
    found = run(*given, **how)
    for mine, whole in zip(run(*(x[:, :, :75] for x in given), **how)[:3], found[:3], strict=True):
        np.testing.assert_array_equal(mine, whole[:, :, :75])
    alone = [np.ascontiguousarray(x[1:, 2:]) for x in given]
    for mine, whole in zip(run(*alone, **how), found, strict=True):
        np.testing.assert_array_equal(mine, whole[1:, 2:])


@pytest.mark.skipif(not onednn.computes_bf16(), reason="needs oneDNN")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("window", [2, 50, 128])
def test_a_window_of_bits_is_that_of_float32(monkeypatch, own, window):
    if not own:
        monkeypatch.setattr(_attention_pairs, "suits", lambda *_: False)
    dy, *given = (
        heads(kind, 1, 280, 1, 64, seed=seed) for seed, kind in enumerate((False, True, True, True))
    )
    how = {"causal": True, "scale": 0.125, "window": window}
    found = run(dy, *given, **how)
    for mine, exact in zip(found, run(dy, *map(K.matmul.widened, given), **how), strict=True):
        np.testing.assert_allclose(mine, exact, rtol=0, atol=2e-2 * np.abs(exact).max())
