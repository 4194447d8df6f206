"""The reference attention of kernels/cuda: any time, keys, width and strides, causal or not."""

import numpy as np
import pytest

from shardrt.kernels.cpu import attention as cpu
from shardrt.kernels.cuda import attention as cuda
from tests.cuda.numbers import ELEMENTS, assert_close, dtype_of, guarded, normal

# batch, heads, heads of keys, time, keys, width, causal
CASES = [
    (1, 1, 1, 1, 1, 1, True),
    (2, 3, 3, 33, 33, 20, True),
    (1, 2, 2, 5, 70, 32, False),
    (1, 1, 1, 70, 5, 65, False),
    (1, 2, 2, 65, 65, 130, True),
    (2, 4, 2, 33, 33, 64, True),
    (1, 3, 1, 34, 41, 128, False),
]


def heads_of(x, parts, heads):
    """(batch, time, parts * width) as views (batch, heads, time, head_dim), as a linear layer makes them."""
    batch, time, width = x.shape
    x = x.reshape(batch, time, parts, heads, width // (parts * heads))
    return [x[:, :, part].transpose(0, 2, 1, 3) for part in range(parts)]


def in_double(*arrays):
    return [array.astype(np.float64) for array in arrays]


@pytest.mark.parametrize(
    ("element", "case"),
    [*(("float32", case) for case in CASES), *((element, CASES[1]) for element in ELEMENTS[1:])],
)
def test_forward_and_backward(emulated, element, case):
    batch, heads, kv_heads, time, keys, width, causal = case
    scale = 0.7 / np.sqrt(width)
    exact = dtype_of("float64" if element == "float64" else "float32")
    with guarded(element) as array:
        (q,) = heads_of(array(normal(batch, time, heads * width)), 1, heads)
        k, v = heads_of(array(normal(batch, keys, 2 * kv_heads * width)), 2, kv_heads)
        (y,) = heads_of(array(np.full((batch, time, heads * width), np.nan)), 1, heads)
        lse = array(np.full((batch, heads, time), np.nan), dtype=exact)
        cuda.forward(q, k, v, y, lse, causal=causal, scale=scale)
        expected_y, expected_lse = np.empty(q.shape), np.empty(lse.shape)
        exact_inputs = in_double(q, k, v)
        cpu.forward(*exact_inputs, expected_y, expected_lse, causal=causal, scale=scale)
        assert_close(y, expected_y, 2)
        assert_close(lse, expected_lse, 2)

        dy = array(normal(batch, heads, time, width, seed=1))
        gradients = [array(np.full(x.shape, np.nan)) for x in (q, k, v)]
        cuda.backward(dy, q, k, v, y, lse, *gradients, causal=causal, scale=scale)
        expected = [np.empty(x.shape) for x in (q, k, v)]
        statistics = in_double(y, lse)  # as rounded as the kernel gets them
        inputs = (*in_double(dy), *exact_inputs, *statistics)
        cpu.backward(*inputs, *expected, causal=causal, scale=scale)
        largest = max(np.linalg.norm(gradient) for gradient in expected)
        for found, exactly in zip(gradients, expected, strict=True):
            if np.linalg.norm(exactly) > 1e-3 * largest:  # with one key, dq and dk are zero but for rounding
                assert_close(found, exactly, 4)
            else:
                assert np.abs(found.astype(np.float64)).max() < 1e-2 * largest


def test_a_head_that_is_too_wide_is_refused(emulated):
    x, lse = np.zeros((1, 1, 2, 257), np.float32), np.zeros((1, 1, 2), np.float32)
    with pytest.raises(ValueError, match="head_dim is at most 256 on CUDA, got 257"):
        cuda.forward(x, x, x, x, lse, causal=True, scale=1.0)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("lengths", [(1, 69), (40, 2, 28), (70,), (33, 32, 5)])
def test_documents_side_by_side(emulated, lengths, kv_heads):
    time, heads, width, scale = 70, 2, 20, 0.3
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    with guarded("float32") as array:
        (q,) = heads_of(array(normal(2, time, heads * width)), 1, heads)
        k, v = heads_of(array(normal(2, time, 2 * kv_heads * width)), 2, kv_heads)
        starts = array(np.stack([starts, np.zeros(time)]), dtype=np.int64)  # the second is one document
        y, lse = array(np.full(q.shape, np.nan)), array(np.full((2, heads, time), np.nan))
        how = {"causal": True, "scale": scale, "starts": starts}
        cuda.forward(q, k, v, y, lse, **how)
        exact_inputs = in_double(q, k, v)
        expected_y, expected_lse = np.empty(q.shape), np.empty(lse.shape)
        cpu.forward(*exact_inputs, expected_y, expected_lse, **how)
        assert_close(y, expected_y, 2)
        assert_close(lse, expected_lse, 2)
        dy = array(normal(*q.shape, seed=1))
        gradients = [array(np.full(x.shape, np.nan)) for x in (q, k, v)]
        cuda.backward(dy, q, k, v, y, lse, *gradients, **how)
        expected = [np.empty(x.shape) for x in (q, k, v)]
        cpu.backward(*in_double(dy), *exact_inputs, *in_double(y, lse), *expected, **how)
        for found, exactly in zip(gradients, expected, strict=True):
            assert_close(found, exactly, 4)


@pytest.mark.parametrize("lengths", [None, (10, 30, 61, 3)])
@pytest.mark.parametrize("offsets", [(0, 78), (26, 52), (39,)])
def test_chunks_of_queries_at_their_places_among_the_keys(emulated, offsets, lengths):
    each, keys, heads, kv_heads, width = 26, 104, 2, 1, 20
    time = each * len(offsets)
    places = np.concatenate([offset + np.arange(each) for offset in offsets])
    with guarded("float32") as array:
        (q,) = heads_of(array(normal(2, time, heads * width)), 1, heads)
        k, v = heads_of(array(normal(2, keys, 2 * kv_heads * width)), 2, kv_heads)
        y, lse = array(np.full(q.shape, np.nan)), array(np.full((2, heads, time), np.nan))
        how = {"causal": True, "scale": 0.3, "offsets": offsets}
        if lengths is not None:
            starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)[places]
            how["starts"] = array(np.stack([starts, np.zeros(time)]), dtype=np.int64)
        cuda.forward(q, k, v, y, lse, **how)
        exact_inputs = in_double(q, k, v)
        expected_y, expected_lse = np.full(q.shape, np.nan), np.full(lse.shape, np.nan)
        cpu.forward(*exact_inputs, expected_y, expected_lse, **how)
        assert_close(y, expected_y, 2)
        assert_close(lse, expected_lse, 2)
        dy = array(normal(*q.shape, seed=1))
        gradients = [array(np.full(x.shape, np.nan)) for x in (q, k, v)]
        cuda.backward(dy, q, k, v, y, lse, *gradients, **how)
        expected = [np.full(x.shape, np.nan) for x in (q, k, v)]
        cpu.backward(*in_double(dy), *exact_inputs, *in_double(y, lse), *expected, **how)
        for found, exactly in zip(gradients, expected, strict=True):
            assert_close(found, exactly, 4)
