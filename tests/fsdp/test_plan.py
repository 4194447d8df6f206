"""The order of units: recorded, followed, and safe where ranks differ."""

import warnings

import numpy as np
import pytest

import shardrt
from shardrt import nn
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import fully_shard, units
from tests.fsdp.nets import Nested, Net, batches, gradients, loss_of, shard

TOKENS, TARGETS = batches(1)[0]


class Skips(Net):
    """Leaves out the blocks in `skipped`."""

    skipped = ()

    def run_blocks(self, x):
        for index, block in enumerate(self.blocks):
            if index not in self.skipped:
                x = block(x)
        return x


def part(mesh):
    rows = len(TOKENS) // mesh.size
    return slice(mesh.rank * rows, (mesh.rank + 1) * rows)


def skipping_gradients(skipped_by_rank, strategy, first):
    """Gradients of a step in which ranks leave out different blocks; `first`: it is the first step."""
    shardrt.manual_seed(3)
    model = Skips(blocks=4)
    mesh = init_device_mesh("auto")
    shard(model, mesh, strategy=strategy)
    if not first:
        loss_of(model, TOKENS[part(mesh)], TARGETS[part(mesh)]).backward()
        model.zero_grad()
    model.skipped = skipped_by_rank[mesh.rank]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss_of(model, TOKENS[part(mesh)], TARGETS[part(mesh)]).backward()
    return gradients(model), units(model)[0].schedule.plan.deviations


def expected_gradients(skipped_by_rank):
    """The mean over ranks of what plain models compute, zeros where a rank did not use a block."""
    total = {}
    ranks = len(skipped_by_rank)
    for rank, skipped in enumerate(skipped_by_rank):
        shardrt.manual_seed(3)
        model = Skips(blocks=4)
        model.skipped = skipped
        rows = len(TOKENS) // ranks
        mine = slice(rank * rows, (rank + 1) * rows)
        loss_of(model, TOKENS[mine], TARGETS[mine]).backward()
        for name, gradient in gradients(model).items():
            total[name] = total.get(name, 0) + gradient / ranks
    return total


@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "FULL_SHARD"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("skipped", [[(1,), ()], [(), (3,)], [(0, 2), (1,)], [(0, 1, 2, 3), ()]], ids=str)
def test_ranks_may_leave_out_different_units(skipped, first, strategy):
    expected = expected_gradients(skipped)
    for found, _ in thread.run(2, skipping_gradients, skipped, strategy, first):
        for name, gradient in found.items():
            wanted = expected.get(name, np.zeros_like(gradient))
            np.testing.assert_allclose(gradient, wanted, rtol=0, atol=2e-6, err_msg=name)


class Experts(nn.Module):
    """One of three, chosen by rank."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.last = nn.Linear(7, 7)
        self.choice = 0

    def forward(self, x):
        return self.last(self.experts[self.choice](x))


CHOICES = [(0, 0), (1, 0), (1, 2), (2, 2), (0, 1)]  # the second and the third: at first used by nobody


def chosen(**settings):
    """Gradients of each step, and how many forwards were told to deviate."""
    shardrt.manual_seed(3)
    model, mesh = Experts(), init_device_mesh("auto")
    for expert in model.experts:
        fully_shard(expert, mesh=mesh, by_rank=True, **settings)
    for part in (model.last, model):
        fully_shard(part, mesh=mesh, **settings)
    steps = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for choices in CHOICES:
            model.choice = choices[mesh.rank]
            model(np.full((2, 7), 1.0 + mesh.rank, np.float32)).sum().backward()
            steps.append(gradients(model))
            model.zero_grad()
    return steps


@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "FULL_SHARD"])
def test_some_ranks_may_begin_to_use_a_unit_that_is_marked_for_it(strategy):
    shardrt.manual_seed(3)
    plain = Experts()
    for found, choices in zip(thread.run(2, chosen, strategy=strategy)[0], CHOICES, strict=True):
        for rank, plain.choice in enumerate(choices):
            (plain(np.full((2, 7), 1.0 + rank, np.float32)).sum() * 0.5).backward()
        expected = gradients(plain)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-6, err_msg=name)
        plain.zero_grad()


def evaluated_and_trained():
    """Rank 1 leaves out a block in training that rank 0 has left out in the evaluation before."""
    shardrt.manual_seed(3)
    model, mesh = Skips(blocks=4), init_device_mesh("auto")
    shard(model, mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.skipped = (1,) if mesh.rank == 0 else ()
        with shardrt.no_grad():
            model(TOKENS)
        model.skipped = (1,) if mesh.rank == 1 else ()
        loss_of(model, TOKENS[part(mesh)], TARGETS[part(mesh)]).backward()
    return gradients(model)


def test_an_evaluation_does_not_change_what_backward_does_for_others():
    expected = expected_gradients([(), (1,)])
    for name, gradient in thread.run(2, evaluated_and_trained)[0].items():
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=2e-6, err_msg=name)


def test_a_step_that_differs_is_counted():
    assert [count for _, count in thread.run(2, skipping_gradients, [(1,), ()], "FULL_SHARD", False)] == [
        1,
        0,
    ]


def warned():
    model = Skips()
    shard(model, init_device_mesh("auto"))
    loss_of(model, TOKENS, TARGETS).backward()
    model.skipped = (1,)
    with pytest.warns(UserWarning, match=r"expected unit blocks\.1 next, .* but blocks\.2 was used"):
        loss_of(model, TOKENS, TARGETS).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(model, TOKENS, TARGETS).backward()
    return units(model)[0].schedule.plan.deviations


def test_it_is_reported_once_by_name():
    assert warned() == 2


class Swaps(Net):
    """One rank uses two blocks in the other order."""

    def run_blocks(self, x):
        first, second, third = self.blocks
        return third(first(second(x)) if self.swapped else second(first(x)))


def swapped():
    model = Swaps()
    mesh = init_device_mesh("auto")
    shard(model, mesh, prefetch=0)
    model.swapped = mesh.rank == 1
    loss_of(model, TOKENS, TARGETS).backward()


def test_different_orders_are_an_error_that_names_ranks_and_units():
    with pytest.raises(Exception, match=r"rank 0 called .*unit blocks\.\d.*rank 1 called .*unit blocks\.\d"):
        thread.run(2, swapped)


def nested_part_skipped():
    model = Nested()
    shard(model, init_device_mesh("auto"))
    loss_of(model, TOKENS, TARGETS).backward()
    return [unit.label for unit in units(model)[0].schedule.plan.order]


def test_the_recorded_order_is_that_of_entry():
    found = thread.run(2, nested_part_skipped)[0]
    assert found[:4] == ["(root)", "stages.0", "stages.0.0", "stages.0.2"]
