"""functional/collective.py: values and gradients are those of one graph over all ranks, in PyTorch."""

import ml_dtypes
import numpy as np
import pytest

from shardrt import Tensor
from shardrt.comm import CollectiveCounter, CollectiveMismatch, create
from shardrt.functional import collective as C
from tests.gradcheck import normal
from tests.ranks import run_ranks


def shift(x, comm, by=1):
    """To the next rank; nobody sends to the first, and the last sends to nobody."""
    to, source = comm.rank + by, comm.rank - by
    inside = range(comm.size)
    return C.exchange(x, comm, to=to if to in inside else None, source=source if source in inside else None)


def turn(x, comm):
    """To the next rank, around."""
    return C.exchange(x, comm, to=(comm.rank + 1) % comm.size, source=(comm.rank - 1) % comm.size)


def counts(size):
    """[s][r]: rows of 2 * size that rank s sends to rank r: of more than two ranks some receive none."""
    table = np.zeros((size, size), int)
    table[:, 0] = range(size)
    table[:, -1] += 2 * size - np.arange(size)
    return table


def by_counts(x, comm):
    table = counts(comm.size)
    return C.all_to_all_rows(x, comm, table[comm.rank], table[:, comm.rank])


def by_counts_at_once(torch, xs):
    table = counts(len(xs)).tolist()
    cut = [torch.split(x, row) for x, row in zip(xs, table, strict=True)]
    return [torch.cat(column) for column in zip(*cut, strict=True)]


# Each op: kinds of its input and output, itself, and all ranks' results at once from all ranks' inputs, where
# `t` is PyTorch. A value of kind I is one tensor, which stands on every rank.
OPS = {
    "copy_to": ("I", "R", lambda x, c, a: C.copy_to(x, c), lambda t, xs, a: list(xs)),
    "reduce_from": ("P", "I", lambda x, c, a: C.reduce_from(x, c), lambda t, xs, a: [sum(xs)] * len(xs)),
    "gather": ("V", "R", C.gather, lambda t, xs, a: [t.cat(xs, a)] * len(xs)),
    "gather_same": ("V", "I", C.gather_same, lambda t, xs, a: [t.cat(xs, a)] * len(xs)),
    "scatter_to": ("I", "V", C.scatter_to, lambda t, xs, a: t.chunk(xs[0], len(xs), a)),
    "reduce_scatter_to": ("P", "V", C.reduce_scatter_to, lambda t, xs, a: t.chunk(sum(xs), len(xs), a)),
    "all_to_all": (
        "V",
        "V",
        C.all_to_all,
        lambda t, xs, a: [t.cat([t.chunk(x, len(xs), a)[r] for x in xs], a) for r in range(len(xs))],
    ),
    "all_to_all_rows": ("V", "V", lambda x, c, a: by_counts(x, c), lambda t, xs, a: by_counts_at_once(t, xs)),
    "exchange": ("V", "V", lambda x, c, a: turn(x, c), lambda t, xs, a: [xs[-1], *xs[:-1]]),
    "send and receive": (
        "V",
        "V",
        lambda x, c, a: shift(x, c),
        lambda t, xs, a: [0 * xs[0], *xs[:-1]],
    ),
}
ALONG_AN_AXIS = ("gather", "gather_same", "scatter_to", "reduce_scatter_to", "all_to_all")
CASES = [(name, axis) for name in OPS for axis in ((0, 1, -1) if name in ALONG_AN_AXIS else (0,))]


def values(kind, shape, rank, seed):
    """A rank's value of this kind: I is the same on all."""
    return normal(*shape, seed=seed if kind == "I" else seed + 1 + rank)


def results(name, axis, size, dtype=np.float64):
    """x, y, dy and dx of every rank, (2 x 3) times the number of ranks, which every op can cut."""
    into, out, op, _ = OPS[name]

    def body():
        comm = create()
        x = values(into, (2 * size, size, 3 * size), comm.rank, 10).astype(dtype)
        x = Tensor(x, requires_grad=True)
        y = op(x, comm, axis)
        dy = values(out, y.shape, comm.rank, 50).astype(dtype)
        y.backward(dy)
        assert x.grad.dtype == y.dtype == dtype
        return np.array(x.data), np.array(y.data), dy, np.array(x.grad)

    return [list(column) for column in zip(*run_ranks(size, body), strict=True)]


def inner(kind, a, b):
    """<a, b> over all ranks; what all of them have counts once."""
    if kind == "I":
        assert all((each == a[0]).all() for each in a), "not the same on all ranks"
    products = [(u.astype(np.float64) * v.astype(np.float64)).sum() for u, v in zip(a, b, strict=True)]
    return products[0] if kind == "I" else sum(products)


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 2**-22), (ml_dtypes.bfloat16, 2**-8)])
@pytest.mark.parametrize("name", OPS)
def test_backward_is_the_adjoint_but_for_rounding_what_is_added_up(name, dtype, rounding):
    """16 bits are rounded once: they are summed in 32."""
    into, out, _, _ = OPS[name]
    x, y, dy, dx = results(name, -1 if name in ALONG_AN_AXIS else 0, 3, dtype)
    rounded = [inner(out, *map(sizes, (y, dy))), inner(into, *map(sizes, (x, dx)))]
    difference = abs(inner(out, y, dy) - inner(into, x, dx))
    sums = name in ("copy_to", "reduce_from", "gather", "reduce_scatter_to")
    assert difference <= (rounding if sums else 1e-13) * max(rounded)


def sizes(arrays):
    """How large their elements are."""
    return [np.abs(array.astype(np.float64)) for array in arrays]


# What each op moves, forward and backward: the calls, and how many times what a rank has of x it receives.
MOVED = {
    "copy_to": ({}, {"all_reduce": lambda n: 2 * (n - 1) / n}),
    "reduce_from": ({"all_reduce": lambda n: 2 * (n - 1) / n}, {}),
    "gather": ({"all_gather": lambda n: n - 1}, {"reduce_scatter": lambda n: n - 1}),
    "gather_same": ({"all_gather": lambda n: n - 1}, {}),
    "scatter_to": ({}, {"all_gather": lambda n: (n - 1) / n}),
    "reduce_scatter_to": (
        {"reduce_scatter": lambda n: (n - 1) / n},
        {"all_gather": lambda n: (n - 1) / n},
    ),
    "all_to_all": ({"all_to_all": lambda n: (n - 1) / n}, {"all_to_all": lambda n: (n - 1) / n}),
    "exchange": ({"exchange": lambda n: 1}, {"exchange": lambda n: 1}),
}


@pytest.mark.parametrize("name", MOVED)
def test_calls_and_bytes_are_those_of_the_formulas(name):
    size = 3

    def body():
        comm = create()
        counted = CollectiveCounter(comm)
        x = Tensor(np.ones((2 * size, 5 * size), np.float32), requires_grad=True)
        y = OPS[name][2](x, comm, 1)
        for message in MOVED[name]:
            formulas = {call: (1, formula(size) * x.data.nbytes) for call, formula in message.items()}
            assert {call: (counted.calls[call], counted.bytes[call]) for call in counted.calls} == formulas
            counted.reset()
            if y.requires_grad and x.grad is None:
                y.backward(np.ones(y.shape, np.float32))

    run_ranks(size, body)


def test_rows_by_counts_move_those_of_others_there_and_back():
    def body():
        comm, table = create(), counts(3)
        counted = CollectiveCounter(comm)
        x = Tensor(np.ones((2 * 3, 5), np.float32), requires_grad=True)
        y = by_counts(x, comm)
        own = table[comm.rank, comm.rank]
        assert counted.bytes == {"all_to_all": (table[:, comm.rank].sum() - own) * 5 * 4}
        counted.reset()
        y.backward(np.ones(y.shape, np.float32))
        assert counted.bytes == {"all_to_all": (table[comm.rank].sum() - own) * 5 * 4}
        assert counted.calls == {"all_to_all": 1}

    run_ranks(3, body)


@pytest.mark.parametrize("more", [None, 2], ids=["as many as come", "and more"])
@pytest.mark.parametrize("table", [[[0, 0, 0]] * 3, [[0, 4, 0]] * 3, [[1, 0, 2], [0, 0, 0], [3, 1, 0]]])
def test_rows_to_where_they_are_used_and_back_have_the_slope_of_the_sum_of_losses(table, more):
    """With ranks that send none, receive none, or neither: an empty array goes through an op of its own.

    more: rows behind those that are sent and come, which stay where they are.
    """
    table, step = np.array(table), 1e-6

    def loss_of(x, comm):
        sent, received = table[comm.rank], table[:, comm.rank]
        rows = None if more is None else received.sum() + more
        there = (C.all_to_all_rows(x * x, comm, sent, received, rows) * (comm.rank + 2)).exp()
        assert more is None or (there.numpy()[-more:] == 1).all()
        return (C.all_to_all_rows(there, comm, received, sent, more and x.shape[0]) * x).sum()

    def body():
        comm = create()
        x, along = (
            normal(table[comm.rank].sum() + (more or 0), 2, 3, seed=s + comm.rank) / 4 for s in (0, 9)
        )
        given = Tensor(x, requires_grad=True)
        loss_of(given, comm).backward()
        shifted = [loss_of(Tensor(x + sign * step * along), comm).item() for sign in (1, -1)]
        return (given.grad * along).sum(), (shifted[0] - shifted[1]) / (2 * step)

    found = np.array(run_ranks(3, body)).sum(axis=0)
    assert found[0] == pytest.approx(found[1], rel=1e-7, abs=1e-12)
    assert (found[0] != 0) == table.any()


def test_sums_of_16_bits_move_twice_their_bytes_and_the_rest_just_these():
    """Summed in 32, so that the ranks' order does not show."""
    size = 3

    def body():
        comm, x = create(), Tensor(np.ones((size, 4), ml_dtypes.bfloat16))
        counted = CollectiveCounter(comm)
        for op in (C.reduce_from, C.reduce_scatter_to, C.gather, C.all_to_all):
            op(x, comm)
        one = x.data.nbytes * (size - 1) // size
        assert counted.bytes == {
            "all_reduce": 2 * 2 * one,
            "reduce_scatter": 2 * one,
            "all_gather": size * one,
            "all_to_all": one,
        }

    run_ranks(size, body)


@pytest.mark.torch
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("name", "axis"), CASES)
def test_values_and_gradients_are_those_of_one_graph_over_all_ranks(name, axis, size):
    torch = pytest.importorskip("torch")
    into, out, _, whole = OPS[name]
    x, y, dy, dx = results(name, axis, size)
    leaves = [torch.tensor(each, requires_grad=True) for each in (x[:1] if into == "I" else x)]
    expected = whole(torch, leaves * size if into == "I" else leaves, axis)
    ranks = range(1 if out == "I" else size)  # one loss, or the sum of the ranks' losses
    sum((expected[rank] * torch.tensor(dy[rank])).sum() for rank in ranks).backward()
    for rank in range(size):
        np.testing.assert_allclose(y[rank], expected[rank].detach().numpy(), rtol=1e-13, atol=0)
        gradient = leaves[0 if into == "I" else rank].grad
        gradient = np.zeros_like(dx[rank]) if gradient is None else gradient.numpy()
        np.testing.assert_allclose(dx[rank], gradient, rtol=1e-13, atol=1e-15)


def test_alone_each_is_the_identity():
    comm = create()
    for name in OPS.keys() - {"send and receive"}:
        x = Tensor(normal(2, 3), requires_grad=True)
        y = C.exchange(x, comm, to=0, source=0) if name == "exchange" else OPS[name][2](x, comm, 0)
        y.backward(normal(2, 3, seed=1))
        assert (y.data == x.data).all() and (x.grad == normal(2, 3, seed=1)).all(), name


def test_integers_are_gathered_too():
    def body():
        comm = create()
        return C.gather(Tensor(np.array([[comm.rank]])), comm, 1).data.tolist()

    assert run_ranks(3, body) == [[[0, 1, 2]]] * 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda c: C.scatter_to(normal(3, 2), c),
            r"scatter_to: axis 0 of x \(3, 2\) must be divisible by the 2 ranks",
        ),
        (
            lambda c: C.all_to_all(normal(2, 3), c, -1),
            r"all_to_all: axis 1 of x \(2, 3\) must be divisible by the 2 ranks",
        ),
        (
            lambda c: C.all_to_all_rows(normal(4, 3), c, [1, 2], [1, 2]),
            r"all_to_all_rows: sent is \(1, 2\): .*each of the 2 ranks; .* the rows of x \(4, 3\)",
        ),
        (lambda c: C.all_to_all_rows(normal(3), c, [1, 2], [2]), r"received is \(2,\)"),
        (lambda c: C.all_to_all_rows(normal(3), c, [1, 2], [2, -1]), r"received is \(2, -1\)"),
        (lambda c: C.all_to_all_rows(normal(3), c, [1, 2], [2, 2], 3), r"received is \(2, 2\)"),
        (lambda c: C.all_to_all_rows(normal(3), c, [2, 2], [2, 2], 9), r"sent is \(2, 2\)"),
        (lambda c: C.gather(normal(2, 3), c, 2), r"gather: axis 2 does not exist in x \(2, 3\)"),
        (
            lambda c: C.exchange(normal(2), c, to=2, source=None),
            "to must be a rank, 0 to 1, got 2",
        ),
        (
            lambda c: C.exchange(normal(2), c, to=c.rank, source=None),
            "must both be this rank or both be others",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    def body():
        with pytest.raises(ValueError, match=message):
            call(create())

    run_ranks(2, body)


def test_other_shapes_on_other_ranks_are_an_error_on_all():
    def body():
        comm = create()
        with pytest.raises(CollectiveMismatch, match="ranks differ"):
            C.gather(normal(2 + comm.rank), comm)

    run_ranks(2, body)
