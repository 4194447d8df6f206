"""Kernels that read or write bfloat16 as bits, beside those of float32: attention, linear layers, AdamW."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shardrt.kernels import cpu as K
from shardrt.kernels import onednn
from shardrt.kernels.cpu import _choice, _conv2d_bits
from shardrt.kernels.cpu.matmul import widened
from tests.kernels.bits import bits, numbers

needs_bf16 = pytest.mark.skipif(
    not onednn.computes_bf16(), reason="no instructions for bfloat16, or no oneDNN"
)
HALF = 2.0**-8  # the largest relative error of rounding to bfloat16


def in_heads(packed, heads):
    batch, time, width = packed.shape
    return packed.reshape(batch, time, heads, width // heads).transpose(0, 2, 1, 3)


class Attended:
    """A packed batch with what attention makes of it, forward and backward, as bits or as float32."""

    def __init__(self, low, batch=2, time=200, heads=4, kv_heads=2, width=16, causal=True, starts=None):
        counts = heads, kv_heads, kv_heads
        packed = bits(numbers(batch, time, sum(counts) * width))
        self.dy = in_heads(numbers(batch, time, heads * width, seed=1), heads)
        parts = np.cumsum((0, *counts))
        given = packed if low else widened(packed)
        split = in_heads(given, sum(counts))
        self.q, self.k, self.v = (split[:, a:b] for a, b in zip(parts[:-1], parts[1:], strict=True))
        self.y = in_heads(np.empty((batch, time, heads * width), np.float32), heads)
        self.lse = np.empty((batch, heads, time), np.float32)
        self.gradient = np.full(packed.shape, np.nan, np.float32)
        gradients = in_heads(self.gradient, sum(counts))
        self.gradients = [gradients[:, a:b] for a, b in zip(parts[:-1], parts[1:], strict=True)]
        how = {"causal": causal, "scale": 0.25, "starts": starts}
        K.attention.forward(self.q, self.k, self.v, self.y, self.lse, **how)
        K.attention.backward(self.dy, self.q, self.k, self.v, self.y, self.lse, *self.gradients, **how)


def starts_of(batch, time):
    begins = np.where(np.arange(time) < 77, 0, 77)
    return np.ascontiguousarray(np.broadcast_to(begins, (batch, time)), np.int64)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"causal": False},
        {"time": 1},
        {"time": 129, "heads": 2},
        {"starts": starts_of(2, 200)},
    ],
    ids=["causal", "all", "one", "tiles", "documents"],
)
def test_attention_in_bits_is_that_in_float32_but_for_rounding(case):
    """Weights are rounded once, and sum to 1: y moves by at most half a step of the largest value."""
    low, exact = Attended(True, **case), Attended(False, **case)
    np.testing.assert_allclose(low.lse, exact.lse, rtol=1e-5, atol=1e-5)
    v = np.abs(widened(np.ascontiguousarray(low.v))).max()
    assert np.abs(low.y - exact.y).max() <= HALF * v * 1.01
    for ours, theirs in zip(low.gradients, exact.gradients, strict=True):
        assert np.linalg.norm(ours - theirs) <= 2 * HALF * np.linalg.norm(theirs) + 1e-4


def test_attention_in_bits_repeats_itself_on_any_number_of_threads():
    first = Attended(True)
    K.set_threads(3)
    try:
        again = Attended(True)
    finally:
        K.set_threads(1)
    np.testing.assert_array_equal(first.y, again.y)
    np.testing.assert_array_equal(first.gradient, again.gradient)


def test_attention_of_bits_without_onednn_is_that_of_their_numbers(monkeypatch):
    monkeypatch.setattr(onednn, "library", lambda: None)
    low, exact = Attended(True), Attended(False)
    np.testing.assert_array_equal(low.y, exact.y)
    np.testing.assert_array_equal(low.gradient, exact.gradient)


@pytest.mark.parametrize("without", [False, True], ids=["", "without onednn"])
def test_a_linear_layer_in_bits_has_sums_in_float32(monkeypatch, without):
    if without:
        monkeypatch.setattr(onednn, "library", lambda: None)
    x, weight, dy, bias = bits(numbers(33, 40)), bits(numbers(24, 40)), bits(numbers(33, 24)), numbers(24)
    x64, w64, dy64 = (widened(a).astype(np.float64) for a in (x, weight, dy))
    y, dx, inner = np.empty((33, 24), "f"), np.empty((33, 40), "f"), np.empty((33, 24), "f")
    dweight = numbers(24, 40, seed=5)
    expected = dy64.T @ x64 + dweight
    K.linear.forward(x, weight, bias, y)
    K.linear.backward_input(dy, weight, dx)
    K.linear.backward_weight(x, dy, dweight, True)
    for ours, theirs in ((y, x64 @ w64.T + bias), (dx, dy64 @ w64), (dweight, expected)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-5)
    K.linear.forward_gelu(x, weight, bias, inner, y)
    np.testing.assert_allclose(inner, x64 @ w64.T + bias, rtol=1e-5, atol=2e-5)


def test_products_of_experts_in_bits_are_those_of_layers_of_their_own():
    counts = (5, 0, 17, 2)
    x, weight, dy = bits(numbers(26, 40)), bits(numbers(4, 24, 40)), bits(numbers(26, 24, seed=1))
    y, dx = np.full((26, 24), np.nan, "f"), np.full((26, 40), np.nan, "f")
    dweight = numbers(4, 24, 40, seed=5)
    expected = dweight.copy()
    K.grouped.forward(x, weight, counts, y)
    K.grouped.backward_input(dy, weight, counts, dx)
    K.grouped.backward_weight(x, dy, counts, dweight, True)
    start = 0
    for group, count in enumerate(counts):
        rows = slice(start, start + count)
        own_y, own_dx = np.empty((count, 24), "f"), np.empty((count, 40), "f")
        if count:
            K.linear.forward(x[rows], weight[group], None, own_y)
            K.linear.backward_input(dy[rows], weight[group], own_dx)
            K.linear.backward_weight(x[rows], dy[rows], expected[group], True)
        np.testing.assert_array_equal(y[rows], own_y)
        np.testing.assert_array_equal(dx[rows], own_dx)
        np.testing.assert_allclose(own_y, widened(x[rows]) @ widened(weight[group]).T, rtol=1e-5, atol=2e-5)
        start += count
    np.testing.assert_array_equal(dweight, expected)
    assert not y[24:].any() and not dx[24:].any()


# Batch, channels, height, width, outputs, window, stride, padding, dilation, groups.
CONVOLUTIONS = {
    "overlapping": (3, 5, 9, 10, 7, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "strided": (2, 8, 13, 12, 16, (3, 5), (2, 1), (0, 2), (1, 1), 1),
    "patches": (2, 3, 16, 12, 8, (4, 4), (4, 4), (0, 0), (1, 1), 1),
    "points": (2, 6, 9, 7, 4, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    "groups": (2, 32, 7, 9, 32, (3, 3), (1, 1), (1, 1), (1, 1), 2),
    "depthwise": (2, 8, 9, 7, 8, (3, 3), (1, 1), (1, 1), (1, 1), 8),
    "dilated": (1, 4, 12, 11, 6, (3, 3), (1, 1), (2, 2), (2, 2), 1),
}


class Convolved:
    """What a convolution of bits makes, forward and backward; its weight's gradient adds to another."""

    def __init__(self, case, forward, backward_input, backward_weight, low=True):
        batch, channels, *image, outputs, window, stride, padding, dilation, groups = CONVOLUTIONS[case]
        how = stride, padding, dilation, groups
        sizes = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(image, window, stride, padding, dilation, strict=True)
        ]
        x, dy = bits(numbers(batch, channels, *image)), bits(numbers(batch, outputs, *sizes))
        weight = bits(numbers(outputs, channels // groups, *window))
        if not low:
            x, dy, weight = map(widened, (x, dy, weight))
        self.y, self.dx = np.full(dy.shape, np.nan, "f"), np.full(x.shape, np.nan, "f")
        self.dweight = numbers(*weight.shape, seed=5)
        forward(x, weight, numbers(outputs, seed=1), self.y, *how)
        backward_input(dy, weight, self.dx, *how)
        backward_weight(x, dy, self.dweight, True, *how)

    def __iter__(self):
        return iter((self.y, self.dx, self.dweight))


def convolved(case, module=K.conv2d, **how):
    return Convolved(case, module.forward, module.backward_input, module.backward_weight, **how)


@needs_bf16
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution_of_bits_by_onednn_is_that_of_their_numbers(case, monkeypatch):
    found, expected = convolved(case, _conv2d_bits), convolved(case, low=False)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())
    monkeypatch.setattr(_conv2d_bits, "_CHUNK", 1)  # an image at a time
    monkeypatch.setattr(onednn, "_ready", onednn._Ready())
    np.testing.assert_array_equal(convolved(case, _conv2d_bits).y, found.y)


@needs_bf16
def test_convolution_of_bits_repeats_itself_in_each_thread():
    first = convolved("groups", _conv2d_bits)
    with ThreadPoolExecutor(3) as pool:
        for again in pool.map(lambda _: convolved("groups", _conv2d_bits), range(3)):
            for one, other in zip(first, again, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("way", ["onednn", "direct", "none"])
def test_who_convolves_bits_is_chosen_as_for_products(way, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _choice.forget()
    asked, called = [], []
    monkeypatch.setattr(_choice, "_faster", lambda ways, rule, *trial: asked.append(rule) or way)
    for name in ("forward", "backward_input", "backward_weight"):
        real = getattr(_conv2d_bits, name)
        monkeypatch.setattr(_conv2d_bits, name, lambda *a, real=real: called.append(1) or real(*a))
    way = way if onednn.computes_bf16() else "none"
    if way == "none":
        monkeypatch.setattr(onednn, "library", lambda: None)
    exact = convolved("overlapping", low=False)
    low = convolved("overlapping")
    chosen = len(asked), len(called)
    _choice.forget()
    assert chosen == {"onednn": (3, 3), "direct": (3, 0), "none": (0, 0)}[way]
    for ours, theirs in zip(low, exact, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


def test_the_slope_of_gelu_in_bits_is_that_in_float32_rounded():
    dy, inner = numbers(70, 24), bits(numbers(70, 24, seed=1))
    exact, low = np.empty_like(dy), np.empty(inner.shape, np.uint16)
    dbias, dbias_low = np.empty(24, "f"), np.empty(24, "f")
    K.linear.backward_gelu(dy, widened(inner), exact, dbias, False)
    K.linear.backward_gelu(dy, inner, low, dbias_low, False)
    np.testing.assert_allclose(widened(low), exact, rtol=1.01 * HALF)
    np.testing.assert_allclose(dbias_low, dbias, rtol=1e-5, atol=1e-6)


def test_rows_of_a_table_in_bits_are_its_numbers():
    table, index = bits(numbers(9, 12)), np.array([3, 8, 0, 3], np.int64)
    y = np.empty((4, 12), np.float32)
    K.embedding.forward(index, table, y)
    np.testing.assert_array_equal(y, widened(table)[index])


def test_adamw_writes_bits_where_it_is_given_them():
    param, grad, ranges = numbers(50), numbers(50, seed=1), np.array([[0, 50, 0.99, 0.1, 1, 0.9, 0.99, 1e-8]])
    m, v, low = np.zeros(50, "f"), np.zeros(50, "f"), np.zeros(50, np.uint16)
    K.adamw.step(param, grad, m, v, ranges, low, "bfloat16")
    np.testing.assert_array_equal(low, bits(param))
