"""functional/attention.py: views, the packed form, documents, windows. More: test_beside_pytorch.py."""

import numpy as np
import pytest

from shardrt import Tensor, nn
from shardrt import functional as F
from shardrt.recompute import checkpoint
from tests import lab
from tests.gradcheck import check_gradients, contiguous, leaf, normal, sliced


def test_gradients_of_views_of_a_packed_tensor():
    def views(x):
        q, k, v = F.split(x.reshape(2, 5, 3, 2, 4), 1, axis=2)
        return F.scaled_dot_product_attention(*(a.squeeze(2).transpose(1, 2) for a in (q, k, v)))

    check_gradients(views, leaf(normal(2, 5, 24)))


def test_one_tensor_as_query_key_and_value():
    check_gradients(
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), leaf(normal(1, 2, 4, 3))
    )


@pytest.mark.parametrize("sizes", [(2, 5, 3, 4), (1, 1, 1, 1), (3, 7, 2, 1)], ids=str)
@pytest.mark.parametrize(("causal", "layout"), [(False, contiguous), (True, sliced)])
def test_packed_gradients(sizes, causal, layout):
    batch, time, heads, head_dim = sizes
    x = layout(normal(batch, time, 3 * heads * head_dim))
    check_gradients(lambda x: F.self_attention(x, heads, is_causal=causal), leaf(x))


@pytest.mark.parametrize("causal", [False, True])
def test_the_packed_form_gives_what_the_three_tensors_give(causal):
    batch, time, heads, head_dim = 2, 17, 3, 8
    packed = normal(batch, time, 3 * heads * head_dim)
    q, k, v = packed.reshape(batch, time, 3, heads, head_dim).transpose(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    expected = y.transpose(1, 2).reshape(batch, time, heads * head_dim)
    actual = F.self_attention(packed, heads, is_causal=causal)
    np.testing.assert_allclose(actual.data, expected.data, rtol=1e-12, atol=1e-14)


def test_large_scores_do_not_overflow():
    q, k, v = (100 * normal(1, 1, 6, 8, seed=seed).astype(np.float32) for seed in range(3))
    assert np.isfinite(F.scaled_dot_product_attention(q, k, v, scale=1.0).data).all()


@pytest.mark.parametrize(("kv_heads", "causal"), [(1, False), (2, True), (3, True)])
def test_gradients_where_heads_share_keys_and_values(kv_heads, causal):
    heads, width = 6, 2
    x = leaf(normal(2, 4, (heads + 2 * kv_heads) * width))
    check_gradients(lambda x: F.self_attention(x, heads, is_causal=causal, kv_heads=kv_heads), x)


@pytest.mark.parametrize("time", [5, 130])
def test_a_head_has_the_bits_that_it_has_among_others(time):
    """Alone its arrays are dense; beside others they are strided."""
    packed, dy = (normal(2, time, n * 4 * 8, seed=n).astype(np.float32) for n in (3, 1))

    def run(heads):
        own = packed.reshape(2, time, 3, 4, 8)[:, :, :, heads].reshape(2, time, -1)
        qkv = Tensor(np.ascontiguousarray(own), requires_grad=True)
        y = F.self_attention(qkv, len(heads))
        y.backward(np.ascontiguousarray(dy.reshape(2, time, 4, 8)[:, :, heads].reshape(2, time, -1)))
        return y.data.reshape(2, time, -1, 8), qkv.grad.reshape(2, time, 3, -1, 8)

    y, dqkv = run([0, 1, 2, 3])
    for heads in ([0, 1], [2, 3], [0], [3]):
        own, down = run(heads)
        np.testing.assert_array_equal(own, y[:, :, heads])
        np.testing.assert_array_equal(down, dqkv[:, :, :, heads])


DOCUMENTS = np.array([[5, 5, 5, 2, 2, 9, 9, 9, 9, 9], [0, 1, 1, 1, 1, 1, 1, 1, 1, 3]])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_documents_side_by_side_are_as_by_themselves(kv_heads):
    packed, dy = normal(2, 10, (2 + 2 * kv_heads) * 3), normal(2, 10, 6, seed=1)
    x = leaf(packed)
    y = F.self_attention(x, 2, kv_heads=kv_heads, starts=F.document_starts(DOCUMENTS))
    y.backward(dy)
    for row in range(2):
        edges = [0, *(np.flatnonzero(np.diff(DOCUMENTS[row])) + 1), 10]
        for first, last in zip(edges[:-1], edges[1:], strict=True):
            alone = leaf(packed[row : row + 1, first:last])
            expected = F.self_attention(alone, 2, kv_heads=kv_heads)
            expected.backward(dy[row : row + 1, first:last])
            np.testing.assert_allclose(y.data[row, first:last], expected.data[0], rtol=1e-13)
            np.testing.assert_allclose(x.grad[row, first:last], alone.grad[0], rtol=1e-12, atol=1e-15)


def test_documents_of_many_tiles():
    documents = np.repeat([[1, 2, 3]], [140, 3, 200], axis=1).reshape(1, 343)
    packed = normal(1, 343, 24)
    y = F.self_attention(packed, 2, starts=F.document_starts(documents)).data
    np.testing.assert_allclose(y[:, 143:], F.self_attention(packed[:, 143:], 2).data, rtol=1e-12)
    one = F.document_starts(np.zeros((1, 343), int))
    np.testing.assert_array_equal(
        F.self_attention(packed, 2, starts=one).data, F.self_attention(packed, 2).data
    )


def test_document_starts():
    starts = F.document_starts(DOCUMENTS)
    assert starts.tolist() == [[0, 0, 0, 3, 3, 5, 5, 5, 5, 5], [0, 1, 1, 1, 1, 1, 1, 1, 1, 9]]


@pytest.mark.parametrize("window", [1, 2, 4, 6])
@pytest.mark.parametrize("documents", [False, True])
def test_gradients_in_a_window(window, documents):
    starts = F.document_starts(np.array([[0, 0, 0, 0, 1, 1]])) if documents else None
    x = leaf(normal(1, 6, (2 + 2) * 2))
    check_gradients(lambda x: F.self_attention(x, 2, kv_heads=1, starts=starts, window=window), x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_window_that_holds_the_sequence_changes_no_bit(dtype):
    packed = normal(2, 37, 3 * 64).astype(dtype)
    expected = F.self_attention(packed, 2).data
    for window in (37, 38, 1 << 40):
        np.testing.assert_array_equal(F.self_attention(packed, 2, window=window).data, expected)


class Windowed(nn.Module):
    def forward(self, x):
        return F.self_attention(x * 1.0, 2, window=5)


@pytest.mark.parametrize("policy", ["full", "matmul"])
def test_a_recomputed_window_has_the_same_bits(policy):
    found = []
    for module in (Windowed(), checkpoint(Windowed(), policy)):
        x = leaf(normal(1, 20, 24))
        module(x).backward(normal(1, 20, 8, seed=1))
        found.append(x.grad)
    np.testing.assert_array_equal(*found)


@pytest.mark.torch
@pytest.mark.parametrize("window", [1, 3, 127, 128, 129, 400])
def test_a_window_is_that_of_transformers_and_torch(window):
    torch = pytest.importorskip("torch")
    packed, dy, places = normal(2, 270, 8 * 6), normal(2, 270, 4 * 6, seed=1), torch.arange(270)
    mask = (places <= places[:, None]) & (places > places[:, None] - window)  # sliding_window_overlay
    theirs = torch.tensor(packed, requires_grad=True)
    q, k, v = theirs.reshape(2, 270, 8, 6).transpose(1, 2).split([4, 2, 2], 1)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    y.transpose(1, 2).reshape(dy.shape).backward(torch.tensor(dy))
    mine = leaf(packed)
    found = F.self_attention(mine, 4, kv_heads=2, window=window)
    found.backward(dy)
    np.testing.assert_allclose(
        found.data, y.detach().transpose(1, 2).reshape(dy.shape), rtol=1e-10, atol=1e-13
    )
    np.testing.assert_allclose(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def attend(*shapes, **how):
    return F.scaled_dot_product_attention(*(normal(*shape) for shape in shapes), **how)


UNFIT = "scaled_dot_product_attention: (q must be|shapes of q)"
STARTS = F.document_starts(DOCUMENTS)
test_what_does_not_fit_is_an_error = lab.refusals(
    (lambda: attend((2, 3, 4), (2, 3, 4), (2, 3, 4)), UNFIT),
    (lambda: attend((1, 4, 4, 3), (1, 3, 4, 3), (1, 3, 4, 3)), UNFIT),
    (lambda: attend((1, 2, 4, 3), (1, 0, 4, 3), (1, 0, 4, 3)), UNFIT),
    (lambda: attend((1, 2, 4, 3), (1, 2, 5, 3), (1, 2, 4, 3)), UNFIT),
    (lambda: attend((1, 2, 4, 3), (1, 2, 5, 3), (1, 2, 5, 3), is_causal=True), UNFIT),
    (lambda: F.self_attention(normal(2, 3, 24), 5), r"a multiple of 5 \+ 2 \* 5 heads; got"),
    (lambda: F.self_attention(normal(2, 3, 24), 0), "heads must be at least 1, got 0"),
    (lambda: F.self_attention(normal(1, 2, 24), 4, kv_heads=0), "kv_heads must divide the 4 heads, got 0"),
    (lambda: F.self_attention(normal(1, 2, 24), 4, kv_heads=3), "kv_heads must divide the 4 heads, got 3"),
    (lambda: F.self_attention(normal(1, 2, 24), 4, kv_heads=8), "kv_heads must divide the 4 heads, got 8"),
    (lambda: F.document_starts(DOCUMENTS[0]), r"documents must be \(batch, time\), got \(10,\)"),
    (
        lambda: F.self_attention(normal(2, 9, 12), 2, starts=STARTS),
        r"starts must be \(2, 9\), with is_causal, got \(2, 10\)",
    ),
    (lambda: F.self_attention(normal(2, 10, 12), 2, is_causal=False, starts=STARTS), "is_causal=False"),
    (lambda: F.self_attention(normal(2, 10, 12), 2, window=0), "window must be at least 1, got 0"),
    (lambda: F.self_attention(normal(2, 10, 12), 2, False, window=3), "window needs is_causal, got window=3"),
)
