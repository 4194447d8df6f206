"""Random programs: models of nested units, steps whose ranks differ, errors between; each trains as one rank.

The pairs of tests/fsdp/test_pairs.py are features in one training loop. Here the loop itself varies. More
seeds than the tests take: `python -m tests.fsdp.test_programs FIRST LAST`.
"""

import random
import sys
import warnings
from contextlib import nullcontext, suppress

import numpy as np
import pytest

from shardrt import autograd, nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import thread
from shardrt.fsdp import full_parameters, fully_shard, no_sync, reshard, unshard
from shardrt.recompute import checkpoint
from tests import lab

WIDTH = 7  # of lab.Block


class Routed(nn.Module):
    """Calls its parts in the order of `route`; a part may be left out or called twice."""

    def __init__(self, kinds):
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x, route):
        x = self.trunk(x)
        for part in route:
            x = self.parts[part](x)  # IndexError for a part that is not there
        return (x * x).mean()


def program(seed):
    """Settings and steps, the same on every rank."""
    draw = random.Random(seed)
    kinds = [draw.choice((lab.Block, lab.Outer)) for _ in range(draw.randint(2, 4))]
    ranks, differ, inner = draw.choice((2, 2, 3, 4)), draw.random() < 0.5, draw.random() < 0.6
    hybrid = ("HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP") if ranks == 4 else ()
    settings = {"strategy": draw.choice(("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPT", "NO_SHARD", *hybrid))}
    settings |= {"prefetch": draw.choice((None, 0, 1, 3)), "by_rank": differ}
    # Units inside a recomputed module can't be left out by some ranks only.
    recomputed = [i for i in range(len(kinds)) if draw.random() < 0.25 and not (differ and inner)]
    steps = [step(draw, ranks, len(kinds), differ) for _ in range(draw.randint(2, 4))]
    return kinds, ranks, inner, settings, recomputed, steps


def step(draw, ranks, parts, differ):
    """(what happens before the step, its micro-batches: the route of each rank, whether it is reduced)."""

    def route():
        found = [part for part in range(parts) if draw.random() < 0.8]
        return found if differ else draw.sample(found, len(found)) + found[: draw.random() < 0.3]

    events = [kind for kind in EVENTS if draw.random() < 0.2]
    micro_batches = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        whole = route()
        routes = [[part for part in whole if not differ or draw.random() < 0.75] for _ in range(ranks)]
        micro_batches.append((routes, draw.random() < 0.5))
    return [(kind, route(), draw.randrange(parts)) for kind in events], micro_batches


def evaluate(model, route, part):
    with autograd.no_grad():
        model(samples(0, 0), route)


def raise_in_forward(model, route, part):
    with suppress(IndexError):
        model(samples(1, 0), [*route, 99])


def raise_in_backward(model, route, part):
    with lab.backward_raises(model.trunk):
        model(samples(2, 0), route).backward()
    model.zero_grad()


def look_at_parameters(model, route, part):
    with full_parameters(model):
        assert all(np.isfinite(np.asarray(parameter.data)).all() for parameter in model.parameters())


def gather_by_hand(model, route, part):
    unshard(model.parts[part])


def gather_and_release(model, route, part):
    gather_by_hand(model, route, part)
    reshard(model.parts[part])


EVENTS = (
    *(evaluate, raise_in_forward, raise_in_backward),
    *(look_at_parameters, gather_by_hand, gather_and_release),
)


def samples(number, rank):
    return np.random.default_rng((number, rank)).standard_normal((3, WIDTH)).astype(np.float32)


def made(kinds, recomputed):
    model = lab.seeded(lambda: Routed(kinds))
    for part in recomputed:
        checkpoint(model.parts[part])
    return model


def on_ranks(kinds, ranks, inner, settings, recomputed, steps):
    model = made(kinds, recomputed)
    mesh = lab.mesh_for(settings["strategy"])
    if inner:
        lab.shard(model, mesh, **settings)
    else:
        for module in (*model.parts, model):
            fully_shard(module, mesh=mesh, **settings)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    for number, (events, micro_batches) in enumerate(steps):
        for event, route, part in events:
            event(model, route, part)
        for place, (routes, reduces) in enumerate(micro_batches):
            with nullcontext() if reduces or place == len(micro_batches) - 1 else no_sync(model):
                model(samples(number, mesh.rank), routes[mesh.rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state_dict(model)


def on_one(kinds, ranks, inner, settings, recomputed, steps):
    model = made(kinds, recomputed)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    for number, (_, micro_batches) in enumerate(steps):
        for routes, _ in micro_batches:
            losses = [model(samples(number, rank), routes[rank]) for rank in range(ranks)]
            (sum(losses[1:], start=losses[0]) * (1 / ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state_dict(model)


@pytest.mark.filterwarnings("ignore:fully_shard. expected")
@pytest.mark.parametrize("seed", range(24))
def test_a_program_trains_as_on_one_rank(seed):
    chosen = program(seed)
    found, expected = thread.run(chosen[1], on_ranks, *chosen)[0], on_one(*chosen)
    lab.assert_close(found, expected, seed, atol=2e-5, of_largest=2e-5)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for number in range(*map(int, sys.argv[1:3])):
        try:
            test_a_program_trains_as_on_one_rank(number)
        except Exception as error:
            print(f"seed {number}: {type(error).__name__}: {error}".splitlines()[0], flush=True)
