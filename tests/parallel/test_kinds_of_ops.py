"""The rules for kinds of single ops, held against what the kinds mean.

A value of kind I or R is one value, V one for each rank, P the sum of the ranks' values. A rule is right if
the result is that of these values, and, however it is used, the gradients that each rank computes alone are
those of the loss by finite differences.
"""

from itertools import product

import numpy as np
import pytest

from shardrt import functional as F
from shardrt import nn
from tests.gradcheck import normal
from tests.parallel.kinds import C, I, Kind, KindError, P, R, V, on_tape, recording, walk

RANKS = 2
SHAPE = (3, 3)
KINDS = {"C": C, "I": I, "R": R, "V": V(), "P": P}
STEP = 1e-6

ONE = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(),
    "reshape": lambda x: x.reshape(9),
    "transpose": lambda x: x.transpose(0, 1),
    "a part": lambda x: x[1:],
    "cumsum": lambda x: F.cumsum(x, 0),
    "negative": lambda x: -x,
    "expand": lambda x: x[None].expand(2, 3, 3),
    "split": lambda x: F.split(x, 1)[1],
    "gelu": F.gelu,
    "softmax": F.softmax,
    "plus a number": lambda x: x + 1.0,
    "times a number": lambda x: x * 3.0,
    "square": lambda x: x**2,
    "itself twice": lambda x: x * x,
    "divided": lambda x: 1.0 / x,
}
TWO = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / y,
    "matmul": lambda x, y: x @ y,
    "concatenate": lambda x, y: F.concatenate([x, y], axis=0),
    "maximum": F.maximum,
    "linear": F.linear,
    "linear with gelu": F.linear_gelu,
    "bias": lambda x, y: F.linear(x, nn.Linear(3, 3, dtype=np.float64).weight.detach(), y[0]),
    "layer norm": lambda x, y: F.layer_norm(x, y[0].shape, y[0], None),
    "rms norm": lambda x, y: F.rms_norm(x, y[0].shape, y[0]),
    "add and norm": lambda x, y: F.concatenate(F.add_rms_norm(x, y, x[0]), axis=0),
}
CASES = [(name, kinds) for name in ONE for kinds in "IRVP"] + [
    (name, kinds) for name in TWO for kinds in map("".join, product("CIRVP", repeat=2)) if kinds != "CC"
]

# Refused all the same: parts may be meant as summands, but it is not said; P weights and biases nobody has.
STRICTER = set(product(("add", "subtract", "concatenate", "bias"), ("PV", "VP")))
STRICTER |= set(product(("linear", "layer norm", "rms norm"), ("CP", "RP"))) | {("bias", "PP")}


class Given(nn.Module):
    def __init__(self, kinds, rank):
        super().__init__()
        for name, letter in zip("xy", kinds, strict=False):
            parameter = nn.Parameter(SHAPE, nn.init.Ones(), requires_grad=letter != "C", dtype=np.float64)
            setattr(self, name, parameter)
            parameter.data = np.abs(normal(*SHAPE, seed=ord(name) + (rank if letter in "VP" else 9))) + 0.5


def whole(kinds, ranks):
    """One rank that has the values which all of them mean."""
    one = Given(kinds, 0)
    for name, letter in zip("xy", kinds, strict=False):
        if letter == "P":
            getattr(one, name).data = sum(getattr(given, name).data for given in ranks)
    return one


def meaning(out, results, uses):
    """The loss."""
    if out == "P":
        return (sum(results) * uses[0]).sum()
    if out == "I":
        return (results[0] * uses[0]).sum()
    return sum((y * use).sum() for y, use in zip(results, uses, strict=True))


def right(op, kinds, out):
    """Whether with a result of kind `out` the gradients of arguments of these kinds are right."""
    ranks = [Given(kinds, rank) for rank in range(RANKS)]
    results = [op(*given.parameters()) for given in ranks]
    if out in "IR" and not all(np.array_equal(y.data, results[0].data) for y in results):
        return False
    if (
        "P" in kinds
        and "V" not in kinds
        and not np.allclose(
            op(*whole(kinds, ranks).parameters()).data,
            sum(y.data for y in results) if out == "P" else results[0].data,
        )
    ):
        return False
    uses = [normal(*results[0].shape, seed=70 + (rank if out in "RV" else 0)) for rank in range(RANKS)]
    for y, use in zip(results, uses, strict=True):
        if y.requires_grad:
            y.backward(use)
    direction = normal(*SHAPE, seed=80)

    def loss(name, moved, by):
        for rank in moved:
            parameter = getattr(ranks[rank], name)
            parameter.data = parameter.data + by * direction
        found = meaning(out, [op(*given.parameters()).data for given in ranks], uses)
        for rank in moved:
            parameter = getattr(ranks[rank], name)
            parameter.data = parameter.data - by * direction
        return found

    def slope(name, moved):
        return (loss(name, moved, STEP) - loss(name, moved, -STEP)) / (2 * STEP)

    everyone, checks = range(RANKS), []
    for name, letter in zip("xy", kinds, strict=False):
        if letter == "C":
            continue
        own = [(getattr(given, name).grad * direction).sum() for given in ranks]
        if letter == "R":
            checks.append((slope(name, everyone), sum(own)))
        elif letter == "I":
            checks += [(slope(name, everyone), each) for each in own]
        elif letter == "V":
            checks += [(slope(name, [rank]), own[rank]) for rank in everyone]
        else:
            checks += [(slope(name, [rank]), each) for rank in everyone for each in own]
    return all(abs(a - b) <= 1e-6 * (1 + abs(a)) for a, b in checks)


def inferred(op, kinds) -> Kind | None:
    """What the rule says, or None if it refuses."""
    tapes = []
    with recording():
        for rank in range(RANKS):
            with on_tape(lambda communicator: "") as tape:
                tape.result = op(*Given(kinds, rank).parameters())
            tapes.append(tape)
    try:
        found = walk(tapes, dict(zip("xy", [KINDS[letter] for letter in kinds], strict=False)))
    except KindError:
        return None
    return found[tapes[0].place(tapes[0].result)[0]]


@pytest.mark.parametrize("name", ONE | TWO)
def test_a_rule_gives_right_gradients_or_refuses_what_would_be_wrong_as_every_kind(name):
    op = (ONE | TWO)[name]
    for kinds in (kinds for case, kinds in CASES if case == name):
        kind = inferred(op, kinds)
        if kind is not None:
            assert right(op, kinds, kind.letter), (kinds, kind)
        else:
            possible = {out for out in "IRVP" if right(op, kinds, out)}
            assert possible == ({"P"} if (name, kinds) in STRICTER else set()), (kinds, possible)
