"""Contracts of products, of linear layers and of groups of them, and of tables of rows."""

import numpy as np

from tests.contracts import Call, Out, contract
from tests.contracts.elementwise import bend, gelu_slope
from tests.cuda.numbers import normal


def layouts(rows, columns, seed):
    """The same numbers in rows, in columns, and as a part of a larger matrix."""
    whole = normal(rows, columns, seed=seed)
    cut = np.full((rows, columns + 3), np.nan)
    cut[:, 1:-2] = whole
    return whole, np.ascontiguousarray(whole.T).T, cut[:, 1:-2]


@contract("matmul.matmul")
def matmul():
    for m, n, k in ((1, 1, 1), (5, 7, 3), (1, 4, 6), (33, 1, 17), (64, 64, 64)):
        for a in layouts(m, k, 0):
            for b in layouts(k, n, 1):
                yield Call((a, b, Out()), np.matmul, factor=2)
        add = normal(m, n, seed=2)
        yield Call((a, b, Out(add)), lambda a, b, out: out + a @ b, {"accumulate": True}, factor=2)
    yield Call((normal(3, 5, 7), normal(3, 7, 4, seed=1), Out()), np.matmul, factor=2)


@contract("matmul.gram")
def gram():
    def truth(a):
        return a @ np.swapaxes(a, -1, -2)

    for m, n in ((1, 1), (5, 7), (7, 5), (33, 17), (64, 64), (530, 3)):
        for a in layouts(m, n, 0):
            yield Call((a, Out()), truth, factor=2)
    yield Call((normal(3, 5, 7), Out()), truth, factor=2)


LAYERS = [(0, 3, 4), (3, 5, 7), (130, 8, 16), (65, 3, 520), (1, 1, 1)]  # rows, inputs, outputs


def operands(rows, inputs, outputs):
    """x, weight, bias, dy."""
    arrays = normal(rows, inputs), normal(outputs, inputs, seed=1), normal(outputs, seed=2)
    return *arrays, normal(rows, outputs, seed=3)


def forward(*sizes):
    x, weight, bias, _ = operands(*sizes)
    yield Call((x, weight, bias, Out()), lambda x, w, b: x @ w.T + b, factor=2)
    yield Call((x, weight, None, Out()), lambda x, w: x @ w.T, factor=2)


def forward_gelu(*sizes):
    def values(x, weight, bias=0.0):
        inner = x @ weight.T + bias
        return inner, inner * bend(inner)

    x, weight, bias, _ = operands(*sizes)
    yield Call((x, weight, bias, Out(), Out()), values, factor=2)
    yield Call((x, weight, None, Out(), Out()), values, factor=2)


def backward_gelu(*sizes):
    *_, inner = operands(*sizes)
    dy, before = normal(*inner.shape, seed=4), np.full(inner.shape[1], 2.0)

    def gradients(dy, inner, before=0.0):
        dinner = dy * gelu_slope(inner)
        return dinner, dinner.sum(0) + before

    # What is summed has not been rounded.
    yield Call((dy, inner, Out(), Out(before, wide=True), True), gradients, factor=(1, 5), over=0)
    yield Call((dy, inner, Out(), Out(wide=True), False), gradients, factor=(1, 10))
    yield Call((dy, inner, Out(), None, False), lambda dy, x: dy * gelu_slope(x), over=0)


def backward_input(*sizes):
    _, weight, _, dy = operands(*sizes)
    yield Call((dy, weight, Out()), np.matmul, factor=2)


def backward_weight(*sizes):
    x, weight, _, dy = operands(*sizes)
    for begins in (None, weight):
        for wide in (False, True):
            args = x, dy, Out(begins, wide), begins is not None
            yield Call(args, lambda x, dy, before=0.0: dy.T @ x + before, factor=2)


def backward_parameters(*sizes):
    def gradients(x, dy, weight=0.0, bias=0.0):
        return dy.T @ x + weight, dy.sum(0) + bias

    x, weight, bias, dy = operands(*sizes)
    yield Call((x, dy, Out(wide=True), False, Out(wide=True), False), gradients, factor=2)
    yield Call((x, dy, Out(weight, True), True, Out(bias, True), True), gradients, factor=2)


LINEAR = {
    "linear.forward": forward,
    "linear.forward_gelu": forward_gelu,
    "linear.backward_gelu": backward_gelu,
    "linear.backward_input": backward_input,
    "linear.backward_weight": backward_weight,
    "linear.backward_parameters": backward_parameters,
}


@contract(*LINEAR)
def layers(kernel):
    for sizes in LAYERS:
        yield from LINEAR[kernel](*sizes)


@contract("linear.backward_bias", "reduce.column_sum")
def column_sum(kernel):
    for rows in (0, 1, 63, 65, 700) if kernel == "reduce.column_sum" else (130,):
        for columns in (1, 16, 33, 48):
            for begins in (None, normal(columns)):
                for wide in (False, True):
                    args = normal(rows, columns), Out(begins, wide), begins is not None
                    offsets = (0, 1) if columns == 16 else (0,)
                    yield Call(args, lambda x, before=0.0: x.sum(0) + before, offsets=offsets)


GROUPS = [(3, 0, 1, 6), (0, 0, 10, 0), (0, 0, 0, 0), (4, 4, 4, 0)]
MANY = (35, 0, 2, 40)  # more rows than a tile


def offsets_of(counts):
    return (0, 1) if counts == MANY else (0,)


def in_groups(counts, *arrays):
    """Rows of each group; the last two rows of all are of none."""
    starts = np.cumsum([0, *counts])
    return [[a[i:j] for a in arrays] for i, j in zip(starts[:-1], starts[1:], strict=True)]


def operands_of_groups(counts, inputs, outputs):
    """x, dy and weight."""
    rows = sum(counts) + 2
    arrays = normal(rows, inputs), normal(rows, outputs, seed=1)
    return *arrays, normal(len(counts), outputs, inputs, seed=2)


def grouped_forward(counts, inputs, outputs):
    def values(x, weight):
        rows = [x @ w.T for (x,), w in zip(in_groups(counts, x), weight, strict=True)]
        return np.concatenate([*rows, np.zeros((2, outputs))])

    x, _, weight = operands_of_groups(counts, inputs, outputs)
    yield Call((x, weight, counts, Out()), values, offsets=offsets_of(counts))


def grouped_backward_input(counts, inputs, outputs):
    def gradient(dy, weight):
        rows = [dy @ w for (dy,), w in zip(in_groups(counts, dy), weight, strict=True)]
        return np.concatenate([*rows, np.zeros((2, inputs))])

    _, dy, weight = operands_of_groups(counts, inputs, outputs)
    yield Call((dy, weight, counts, Out()), gradient, offsets=offsets_of(counts))


def grouped_backward_weight(counts, inputs, outputs):
    def gradient(x, dy, before=0.0):
        return np.stack([dy.T @ x for x, dy in in_groups(counts, x, dy)]) + before

    x, dy, weight = operands_of_groups(counts, inputs, outputs)
    for begins in (None, weight):
        for wide in (False, True):
            args = x, dy, counts, Out(begins, wide), begins is not None
            yield Call(args, gradient, offsets=offsets_of(counts))


grouped_calls = {
    "forward": grouped_forward,
    "backward_input": grouped_backward_input,
    "backward_weight": grouped_backward_weight,
}


@contract(*(f"grouped.{name}" for name in grouped_calls))
def grouped(kernel):
    calls = grouped_calls[kernel.removeprefix("grouped.")]
    for counts in GROUPS:
        yield from calls(counts, 5, 7)
    for inputs, outputs in ((72, 40), (40, 72), (33, 66), (16, 16)):
        yield from calls(MANY, inputs, outputs)


WIDTHS = [1, 16, 33]


def indices_of(kind, count, vocab):
    random = np.random.default_rng(count)
    return {
        "random": random.integers(0, vocab, count),
        "equal": np.full(count, vocab - 1),
        "ascending": np.arange(count) % vocab,
        "often": np.where(random.random(count) < 0.5, min(3, vocab - 1), random.integers(0, vocab, count)),
    }[kind]


@contract("embedding.forward")
def embedding_forward():
    for width in WIDTHS:
        for count in (0, 77):
            indices = indices_of("random", count, 50)
            yield Call((indices, normal(50, width), Out()), lambda i, w: w[i], exact=True)


def rows_added(indices, dy, dweight):
    dweight = dweight.copy()
    np.add.at(dweight, indices, dy)
    return dweight


@contract("embedding.backward")
def embedding_backward():
    for width in WIDTHS:
        for wide in (False, True):
            indices, begins = indices_of("often", 333, 40), normal(40, width, seed=1)
            yield Call((indices, normal(333, width), Out(begins, wide)), rows_added)
    patterns = [
        (kind, count, vocab, 4)
        for kind in ("random", "equal", "ascending", "often")
        for count in (0, 1, 31, 32, 33, 64, 96, 257)
        for vocab in (1, 5, 300)
    ]
    several = [("random", 2500, vocab, 1) for vocab in (256, 257, 70_000)]  # tiles and passes
    for kind, count, vocab, width in patterns + several:
        args = indices_of(kind, count, vocab), normal(count, width), Out(normal(vocab, width, seed=1))
        yield Call(args, rows_added, elements=("float32",), offsets=(0,))
