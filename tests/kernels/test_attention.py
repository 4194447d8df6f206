"""kernels/cpu/attention.py: chunks of queries at their places among the keys, windows."""

import numpy as np
import pytest

from shardrt.kernels.cpu import attention
from tests.contracts.attention import starts_of
from tests.gradcheck import normal

BATCH, HEADS, WIDTH = 2, 4, 6


def run(dy, q, k, v, **how):
    """y, lse, dq, dk, dv."""
    y, lse = np.full(q.shape, np.nan), np.full(q.shape[:3], np.nan)
    gradients = [np.full(x.shape, np.nan) for x in (q, k, v)]
    attention.forward(q, k, v, y, lse, causal=True, scale=0.4, **how)
    attention.backward(dy, q, k, v, y, lse, *gradients, causal=True, scale=0.4, **how)
    return y, lse, *gradients


@pytest.mark.parametrize("kv_heads, window", [(1, None), (4, None), (1, 4), (4, 150)])
@pytest.mark.parametrize(
    "each, lengths", [(3, None), (3, (5, 1, 6)), (3, (3, 3, 3, 3)), (128, None), (128, (200, 312))]
)
def test_chunks_of_queries_give_their_rows_of_the_whole_and_gradients_of_keys_add_up(
    each, lengths, kv_heads, window
):
    time, ranks = 4 * each, 2
    q, dy = normal(BATCH, HEADS, time, WIDTH), normal(BATCH, HEADS, time, WIDTH, seed=1)
    k, v = (normal(BATCH, kv_heads, time, WIDTH, seed=seed) for seed in (2, 3))
    starts = None if lengths is None else starts_of(lengths, slice(None))
    y, lse, dq, dk, dv = run(dy, q, k, v, starts=starts, window=window)
    sums = np.zeros((2, *k.shape))
    for rank in range(ranks):
        offsets = rank * each, (2 * ranks - 1 - rank) * each
        rows = np.concatenate([offset + np.arange(each) for offset in offsets])
        own = None if starts is None else starts[:, rows]
        seen = [x[:, :, rows] for x in (dy, q)]
        found = run(*seen, k, v, starts=own, offsets=offsets, window=window)
        if each % attention.TILE == 0 and starts is None:  # the same tiles
            np.testing.assert_array_equal(found[0], y[:, :, rows])
            np.testing.assert_array_equal(found[1], lse[:, :, rows])
        for part, whole in zip(found[:3], (y, lse, dq), strict=True):
            np.testing.assert_allclose(part, whole[:, :, rows], rtol=1e-12, atol=1e-13)
        sums += found[3:]
    np.testing.assert_allclose(sums, (dk, dv), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("window", [1, 100, 129, 600])
def test_a_window_computes_no_tile_outside_of_it(monkeypatch, window):
    calls, run_rows = [], attention.run_rows
    monkeypatch.setattr(attention, "run_rows", lambda *how: calls.append(how[-1]) or run_rows(*how))
    for time in (1024, 2048):
        q, k, v, dy = (normal(1, 1, time, 1, seed=seed) for seed in range(4))
        run(dy, q, k, v, window=window)
    for call in calls:
        time = call.arrays[0].shape[2]
        computed = sum(
            (own.stop - own.start) * (others.stop - others.start) for own, others, _ in call.spans[0]
        )
        assert time * min(window, time // 2) <= computed <= time * (window + attention.TILE)
        assert call.keys <= window + attention.TILE  # so much scratch memory


def test_documents_that_fit_in_the_window_are_computed_as_without_one():
    q, k, v, dy = (normal(2, 2, 300, WIDTH, seed=seed) for seed in range(4))
    starts = starts_of((90, 110, 100), slice(None))
    starts[1] = starts[0]
    plain, windowed = (run(dy, q, k, v, starts=starts, window=window) for window in (None, 110))
    for mine, other in zip(windowed[:3], plain[:3], strict=True):
        np.testing.assert_array_equal(mine, other)
