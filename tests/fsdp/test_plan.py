"""The order of units: recorded, followed, and safe where ranks differ."""

import warnings
from contextlib import contextmanager

import numpy as np
import pytest

import shardrt
from shardrt import nn
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import fully_shard, units
from tests import lab

BATCH = lab.batches(1)[0]
STRATEGIES = ["NO_SHARD", "SHARD_OPT", "FULL_SHARD"]


def four_blocks():
    model = lab.Skips(4)
    model.blocks[0] = lab.Outer()
    return model


@contextmanager
def warnings_are(what):
    with warnings.catch_warnings():
        warnings.simplefilter(what)
        yield


def skipping_gradients(skipped_by_rank, strategy, first):
    """Gradients of a step in which ranks leave out different blocks; `first`: it is the first step."""
    model, mesh = lab.build(four_blocks, strategy=strategy)
    if not first:
        lab.backward(model, mesh)
        model.zero_grad()
    model.skipped = skipped_by_rank[mesh.rank]
    with warnings_are("ignore"):
        lab.backward(model, mesh)
    return lab.gradients(model), units(model)[0].schedule.plan.deviations


def expected_gradients(skipped_by_rank):
    """The mean over ranks of what plain models compute, zeros where a rank did not use a block."""
    total = {}
    for rank, skipped in enumerate(skipped_by_rank):
        model = lab.seeded(four_blocks)
        model.skipped = skipped
        lab.backward(model, None, [part[rank * 6 : rank * 6 + 6] for part in BATCH], scale=0.5)
        for name, gradient in lab.gradients(model).items():
            total[name] = total.get(name, 0) + gradient
    return total


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("skipped", [[(1,), ()], [(), (3,)], [(0, 2), (1,)], [(0, 1, 2, 3), ()]], ids=str)
def test_ranks_may_leave_out_different_units(skipped, first, strategy):
    expected = expected_gradients(skipped)
    for rank, (found, deviations) in enumerate(thread.run(2, skipping_gradients, skipped, strategy, first)):
        zeros = {name: np.zeros_like(found[name]) for name in found.keys() - expected.keys()}
        lab.assert_close(found, expected | zeros, atol=2e-6)
        if skipped == [(1,), ()] and not first:
            assert deviations == (rank == 0)


class Experts(nn.Module):
    """One of three, chosen by rank."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.last = nn.Linear(7, 7)
        self.choice = 0

    def forward(self, x):
        return self.last(self.experts[self.choice](x))


CHOICES = [(0, 0), (1, 0), (1, 2), (2, 2), (0, 1)]  # the second and the third: at first used by no rank


def chosen(strategy):
    """Gradients of each step."""
    model, mesh = lab.seeded(Experts), init_device_mesh("auto")
    for expert in model.experts:
        fully_shard(expert, mesh=mesh, by_rank=True, strategy=strategy)
    for part in (model.last, model):
        fully_shard(part, mesh=mesh, strategy=strategy)
    steps = []
    with warnings_are("error"):
        for choices in CHOICES:
            model.choice = choices[mesh.rank]
            model(np.full((2, 7), 1.0 + mesh.rank, np.float32)).sum().backward()
            steps.append(lab.gradients(model))
            model.zero_grad()
    return steps


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_some_ranks_may_begin_to_use_a_unit_that_is_marked_for_it(strategy):
    plain, expected = lab.seeded(Experts), []
    for choices in CHOICES:
        for rank, plain.choice in enumerate(choices):
            (plain(np.full((2, 7), 1.0 + rank, np.float32)).sum() * 0.5).backward()
        expected.append(lab.gradients(plain))
        plain.zero_grad()
    lab.assert_close(lab.first(2, chosen, strategy), expected, rtol=1e-5, atol=1e-6)


def test_an_evaluation_does_not_change_what_backward_does_for_others():
    """Rank 1 leaves out a block in training that rank 0 has left out in the evaluation before."""

    def evaluated_and_trained():
        model, mesh = lab.build(four_blocks)
        with warnings_are("ignore"):
            model.skipped = (1,) if mesh.rank == 0 else ()
            with shardrt.no_grad():
                model(BATCH[0])
            model.skipped = (1,) if mesh.rank == 1 else ()
            lab.backward(model, mesh)
        return lab.gradients(model)

    lab.assert_close(lab.first(2, evaluated_and_trained), expected_gradients([(), (1,)]), atol=2e-6)


def test_a_step_that_differs_is_counted_and_reported_once_by_name():
    model, _ = lab.build(four_blocks)
    lab.backward(model)
    model.skipped = (1,)
    with pytest.warns(UserWarning, match=r"expected unit blocks\.1 next, .* but blocks\.2 was used"):
        lab.backward(model)
    with warnings_are("error"):
        lab.backward(model)
    assert units(model)[0].schedule.plan.deviations == 2


class Swaps(lab.Net):
    """One rank uses two blocks in the other order."""

    def run_blocks(self, x):
        first, second, third = self.blocks
        return third(first(second(x)) if self.swapped else second(first(x)))


def swapped():
    model, mesh = lab.build(Swaps, prefetch=0)
    model.swapped = mesh.rank == 1
    lab.backward(model)


test_different_orders_are_an_error_that_names_ranks_and_units = lab.refusals(
    (swapped, Exception, r"rank 0 called .*unit blocks\.\d.*rank 1 called .*unit blocks\.\d"), ranks=2
)


@lab.on_ranks(2)
def test_the_recorded_order_is_that_of_entry():
    model, _ = lab.build(lab.Nested)
    lab.backward(model)
    found = [unit.label for unit in units(model)[0].schedule.plan.order]
    assert found[:4] == ["(root)", "stages.0", "stages.0.0", "stages.0.2"]
