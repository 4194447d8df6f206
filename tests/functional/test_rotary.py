"""functional/rotary.py: gradients against differences, scores by distance, errors."""

import numpy as np
import pytest

from shardrt import functional as F
from tests import lab
from tests.gradcheck import LAYOUTS, check_gradients, leaf, normal


def tables(time, half, dtype=np.float64):
    angles = np.arange(time)[:, None] * 10000.0 ** (-np.arange(half) / half)
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(2, 3, 4, 2, 3), (1, 5, 2, 3, 0), (3, 1, 2, 1, 1)], ids=str)
def test_gradients(layout, sizes):
    batch, time, head_dim, heads, rest = sizes
    x = leaf(layout(normal(batch, time, heads * head_dim + rest)))
    check_gradients(lambda x: F.rotary(x, *tables(time, head_dim // 2), heads), x)


def test_scores_depend_on_the_distance_alone():
    cos, sin = tables(9, 4)
    q, k = (np.repeat(normal(1, 1, 8, seed=seed), 9, axis=1) for seed in (1, 2))
    q, k = (F.rotary(x, cos, sin, 1).data[0] for x in (q, k))
    scores = q @ k.T
    for distance in range(-8, 9):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-12)


test_what_does_not_fit_is_an_error = lab.refusals(
    (lambda: F.rotary(normal(2, 3, 8), *tables(3, 2), 3), "too narrow for 3 heads of width 4"),
    (lambda: F.rotary(normal(2, 3, 8), *tables(4, 2), 1), "needs cos and sin"),
)
