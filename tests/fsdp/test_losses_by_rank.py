"""All heads run on every rank, each rank's loss uses others: tasks, modalities, labels that are missing."""

import threading
from contextlib import nullcontext

import numpy as np
import pytest

import shardrt
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import thread
from shardrt.comm.interceptors import Interceptor
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    no_sync,
    set_find_unused_parameters,
    set_world_invariant,
)
from shardrt.recompute import checkpoint
from tests import lab
from tests.lab import Block

X = np.random.default_rng(0).standard_normal((4, 3, 7)).astype(np.float32)


class Heads(nn.Module):
    """A trunk and heads: one unit, one of several, one that is called twice, one that is detached."""

    def __init__(self):
        super().__init__()
        self.trunk = Block()
        self.one, self.twice, self.cut = Block(), Block(), Block()
        self.tower = nn.Sequential(Block(), Block())

    def forward(self, x):
        x = self.trunk(x)
        return {
            "one": self.one(x),
            "cut": self.cut(x).detach(),
            "tower": self.tower(x),
            "twice": self.twice(self.twice(x)),
        }


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = Block(), Block()

    def forward(self, x):
        return self.left(x), self.right(x)


class Stages(Heads):
    """A recomputed stage holds two heads, of which a loss may use one."""

    def __init__(self):
        super().__init__()
        self.pair = Pair()

    def forward(self, x):
        return super().forward(x) | dict(zip(("left", "right"), self.pair(self.trunk(x)), strict=True))


# What the loss of each of four ranks uses, step by step.
USES = [
    [("one",), ("tower",), ("one", "twice"), ("twice",)],
    [("tower",), ("twice",), ("one",), ("tower", "one")],
    [("one",), ("one",), ("one",), ("one",)],  # no rank uses the others: their gradients are none
    [("twice",), ("one", "tower"), ("twice",), ("twice",)],
]


def uses_of(make, step, rank):
    extra = {Heads: (), Stages: (("left",), ("right",), ("left", "right"), ())[(step + rank) % 4]}[make]
    return (*USES[step][rank], *extra)


def loss_of(model, uses, rank):
    outputs = model(shardrt.Tensor(X[rank]))
    terms = [(outputs[name] * outputs[name]).mean() for name in uses]
    return sum(terms[1:], start=terms[0])


def build(make=Heads, recomputed=(), shape=None, wrap=None, **settings):
    """Blocks are units, and so is the whole; a tower is none."""
    mesh, model = lab.mesh_for(settings.get("strategy"), shape, wrap=wrap), lab.seeded(make)
    for module in model.modules():
        if isinstance(module, recomputed):
            checkpoint(module)
    for module in list(model.modules())[::-1]:
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings), mesh


def with_gradients(model):
    return {name for name, p in model.named_parameters() if p.grad is not None}


def trained(make=Heads, in_backward=False, way="each", **settings):
    """Names that had a gradient after each step, and the weights at the end."""
    model, mesh = build(make, **settings)
    if way == "invariant":
        set_world_invariant(model, mesh.size)
    optimizer = lab.adamw(model.parameters(), in_backward=in_backward)
    named = []
    for step in range(len(USES)):
        uses, factor = uses_of(make, step, mesh.rank), 1 / mesh.size if way == "invariant" else 1.0
        if way == "two forwards":
            (loss_of(model, uses, mesh.rank) * 1.5 - loss_of(model, uses, mesh.rank) * 0.5).backward()
        elif way == "no_sync":
            for delayed in (True, False):  # the second micro-batch uses what the first has not
                with no_sync(model) if delayed else nullcontext():
                    loss = loss_of(model, uses if delayed else uses[:1], mesh.rank)
                    (loss * float(delayed)).backward()
        else:
            (loss_of(model, uses, mesh.rank) * factor).backward()
        if not in_backward:
            named.append(with_gradients(model))
        lab.update(optimizer)
    return named, full_state_dict(model)


def expected(make, ranks):
    """As `trained`, of a plain model whose loss is the mean over the ranks."""
    model = lab.seeded(make)
    optimizer = lab.adamw(model.parameters())
    named = []
    for step in range(len(USES)):
        losses = [loss_of(model, uses_of(make, step, rank), rank) for rank in range(ranks)]
        (sum(losses[1:], start=losses[0]) * (1 / ranks)).backward()
        named.append(with_gradients(model))
        lab.update(optimizer)
    return named, full_state_dict(model)


SETTINGS = {
    "FULL_SHARD": {},
    "prefetch 0": {"prefetch": 0},
    "SHARD_OPT": {"strategy": "SHARD_OPT"},
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "HYBRID_SHARD": {"strategy": "HYBRID_SHARD"},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "in backward": {"in_backward": True},
    "recomputed units": {"recomputed": (Block,)},
    "recomputed tower": {"recomputed": (nn.Sequential,)},
    "two forwards": {"way": "two forwards"},
    "two forwards, recomputed tower": {"way": "two forwards", "recomputed": (nn.Sequential,)},
    "no_sync": {"way": "no_sync"},
    "world-invariant": {"way": "invariant"},
    "recomputed pair": {"make": Stages, "recomputed": (Pair, nn.Sequential)},
    "recomputed pair, in backward": {"make": Stages, "recomputed": (Pair, Block), "in_backward": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_train_as_one_would_with_the_mean_of_their_losses(name):
    settings = SETTINGS[name]
    make = settings.get("make", Heads)
    for ranks in (1, 2, 4) if not settings else (4,) if make is Stages or name == "HYBRID_SHARD" else (2,):
        names, weights = expected(make, ranks)
        results = thread.run(ranks, trained, **settings)
        for found, _ in results:
            assert found == ([] if "in_backward" in settings else names)
        lab.assert_close(results[0][1], weights, atol=2e-5)


EVERYTHING = ("one", "twice", "tower")


@lab.on_ranks(2)
@pytest.mark.parametrize("uses", [(EVERYTHING,) * 2, (("one",), ("tower",)), (("twice",), ("twice",))])
def test_every_rank_gathers_and_reduces_each_unit_that_was_called_once(uses):
    counts = lab.Counts()
    model, mesh = build(wrap=counts)
    for _ in range(2):
        loss = loss_of(model, uses[mesh.rank], mesh.rank)
        counts.reset()
        loss.backward()
    assert counts.calls("all_gather", "reduce_scatter") == [6, 6]  # the outermost unit has no parameters
    arenas = lab.groups_of(model)[0].arenas
    assert [len(arenas[role].slots) for role in ("gathered", "gradients")] == [2, 2]


def test_losses_may_differ_in_sixteen_bits():
    def in_bfloat16():
        model, mesh = build(mp_policy=MixedPrecisionPolicy("bfloat16"))
        loss_of(model, USES[0][mesh.rank], mesh.rank).backward()
        return lab.gradients(model)

    plain = lab.seeded(Heads)
    losses = [loss_of(plain, USES[0][rank], rank) for rank in range(2)]
    ((losses[0] + losses[1]) * 0.5).backward()
    lab.assert_close(lab.first(2, in_bfloat16), lab.gradients(plain), of_largest=0.1)


class Apart(nn.Module):
    """Two recomputed towers with nothing in common, each of units."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))

    def forward(self, x):
        return [tower(x) for tower in self.towers]


def test_what_a_backward_only_passed_is_there_for_the_next():
    def in_two_backwards():
        model, mesh = build(Apart, recomputed=(nn.Sequential,))
        for output in model(shardrt.Tensor(X[mesh.rank])):
            (output * output).mean().backward()
        return lab.gradients(model)

    plain = lab.seeded(Apart)
    for rank in range(2):
        for output in plain(shardrt.Tensor(X[rank])):
            ((output * output).mean() * 0.5).backward()
    lab.assert_close(lab.first(2, in_two_backwards), lab.gradients(plain), rtol=1e-4, atol=1e-7)


class Held(Interceptor):
    """Holds back the messages about what ranks have used, until `gate` is set."""

    def __init__(self, communicator, gate, sent, came):
        super().__init__(communicator)
        self.args = gate, sent, came

    def intercept(self, call, run):
        gate, sent, came = self.args
        if call.stream.name == "used":
            sent.append((call.name, call.array.size))
            call.stream.submit(lambda: came.append(gate.wait(10)))
        return run


def two_backwards(uses, find=False):
    """(what was sent, what came before it was asked for, the units with a gradient by then, in the end)."""
    args = gate, sent, came = threading.Event(), [], []
    model, mesh = build(wrap=lambda inner: Held(inner, *args))
    set_find_unused_parameters(model, find)
    parameters = [p for name, p in model.named_parameters() if not name.startswith("cut")]
    optimizer = optim.SGD(parameters, lr=0.1)
    mine = uses[mesh.rank]

    def units_with_gradients(names):
        parts = [(name, model.get_submodule(name)) for name in names]
        return [name for name, part in parts if next(iter(part.parameters())).grad is not None]

    loss_of(model, mine, mesh.rank).backward()
    own = units_with_gradients(mine)
    if mine == EVERYTHING:
        optimizer.step()
    early = list(came)
    gate.set()
    loss_of(model, mine, mesh.rank).backward()
    return sent, early, own, units_with_gradients(EVERYTHING)


def test_ranks_send_what_they_used_once_and_only_one_that_does_not_know_waits():
    everything = thread.run(2, two_backwards, [EVERYTHING] * 2)
    # Of six units; the second time of those that no rank has used, which the one that is detached always is.
    assert everything == [([("all_reduce", 6), ("all_reduce", 1)], [], [*EVERYTHING], [*EVERYTHING])] * 2
    sent, uses = [("all_reduce", 6), ("all_reduce", 2)], [("one",), ("tower",)]
    expected = [(sent, [], [*own], ["one", "tower"]) for own in uses]
    assert thread.run(2, two_backwards, uses) == expected


def test_ranks_agree_on_gradients_that_a_backward_reduced_before_it_raised():
    def gradients():
        model, mesh = build()
        mine = [("one",), ("tower",)][mesh.rank]
        with lab.backward_raises(model.trunk):
            loss_of(model, mine, mesh.rank).backward()
        loss_of(model, mine, mesh.rank).backward()
        return with_gradients(model)

    first, second = thread.run(2, gradients)
    assert first == second
    assert {"one", "tower"} <= {name.split(".")[0] for name in first}


def test_nothing_is_sent_where_each_reduction_says_it_or_there_is_one_rank():
    for sent, *_, in_the_end in thread.run(2, two_backwards, [("one",), ("tower",)], find=True):
        assert (sent, in_the_end) == ([], ["one", "tower"])
    assert thread.run(1, two_backwards, [("one",)]) == [([], [], ["one"], ["one"])]
