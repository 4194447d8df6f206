"""Views of tensors: every range of them is that of the array which they stand for."""

import numpy as np
import pytest

from shardrt.exchange import views
from shardrt.exchange.checkpoint import BadCheckpoint
from shardrt.exchange.views import Cast, Heads, Reshaped, Rows, Transposed, concat
from tests.exchange.made import Held

A = np.random.default_rng(0).normal(size=(24, 10)).astype(np.float32)
B = np.random.default_rng(1).normal(size=(6, 10)).astype(np.float32)
CASES = {
    "float16": (Cast(Held(A), np.dtype(np.float16)), A.astype(np.float16)),
    "joined": (concat([Held(A), Held(B), Held(A)], "x"), np.concatenate([A, B, A])),
    "rows": (Rows(Held(A), 5, 7, "x"), A[5:12]),
    "rows of matrices": (Rows(Held(A.reshape(2, 12, 10)), 5, 9, "x"), A[5:14]),
    "of a vector": (Rows(Held(A[:, 0].copy()), 3, 4, "x"), A[3:7, 0]),
    "transposed": (Transposed(Held(A), "x"), A.T),
    "transposed rows": (Transposed(Rows(Held(A), 3, 11, "x"), "x"), A[3:14].T),
    "reshaped": (Reshaped(Held(A), (2, 12, 10)), A.reshape(2, 12, 10)),
    "interleaved": (Heads(Held(A), 3, True, "x"), A.reshape(3, 2, 4, 10).swapaxes(1, 2).reshape(24, 10)),
    "halves": (Heads(Held(A), 3, False, "x"), A.reshape(3, 4, 2, 10).swapaxes(1, 2).reshape(24, 10)),
    "there and back": (Heads(Heads(Held(A), 2, True, "x"), 2, False, "x"), A),
}


@pytest.mark.parametrize("case", CASES)
def test_a_range_of_a_view_is_that_of_the_array(case, monkeypatch):
    monkeypatch.setattr(views, "CHUNK", 512)
    view, wanted = CASES[case]
    assert (view.dtype, view.shape) == (wanted.dtype, wanted.shape)
    random = np.random.default_rng(2)
    for _ in range(50):
        start, stop = sorted(random.integers(0, wanted.size + 1, 2))
        out = np.full(stop - start, 7, wanted.dtype)
        view.read_into(out, int(start))
        assert np.array_equal(out, wanted.reshape(-1)[start:stop])


@pytest.mark.parametrize(
    "make",
    [
        lambda: concat([Held(A), Held(B.T.copy())], "layer"),
        lambda: concat([Held(A), Held(B.astype(np.float64))], "layer"),
        lambda: Rows(Held(A), 20, 5, "layer"),
        lambda: Transposed(Held(A[0]), "layer"),
        lambda: Heads(Held(A), 5, True, "layer"),
        lambda: Heads(Held(A), 0, True, "layer"),
        lambda: Heads(Held(np.float32(1)), 1, True, "layer"),
    ],
)
def test_what_can_not_be_is_refused_by_name(make):
    with pytest.raises(BadCheckpoint, match="layer"):
        make()
