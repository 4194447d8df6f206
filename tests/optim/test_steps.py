"""Which parameters a step updates, and how often each was: per parameter, however they lie in memory."""

import numpy as np
import pytest

import shardrt
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import fully_shard
from shardrt.nn.storage import Offloaded
from tests import lab
from tests.optim.storages import SIZES, HostStorage, assert_same_bits, gradients, snapshot

STEPS = 12
OPTIMIZERS = {
    "AdamW": lambda library, groups: library.AdamW(groups, lr=0.01, weight_decay=0.1),
    "SGD": lambda library, groups: library.SGD(groups, lr=0.01, momentum=0.9, dampening=0.3),
}


class Chosen(HostStorage):
    """A storage in which only the parameters in `used` have a gradient."""

    used = frozenset(range(len(SIZES)))

    def has_gradient(self, parameter):
        return super().has_gradient(parameter) and any(
            parameter is self.parameters[number] for number in self.used
        )


def used_in(step):
    """Numbers of parameters with a gradient: some always, some with pauses of their own, one late."""
    return {n for n in range(len(SIZES)) if n != 4 or step > 5} - {step % 3, 1 if step % 4 else 99}


def train(kind, placement):
    """A storage after STEPS steps, half of whose pauses are frozen parameters, half unused ones."""
    storage = Chosen(placement)
    optimizer = OPTIMIZERS[kind](optim, storage.parameters)
    for step, gradient in enumerate(gradients(STEPS)):
        used = used_in(step)
        storage.used = used if step % 2 else Chosen.used
        for number, parameter in enumerate(storage.parameters):
            parameter.requires_grad = number in used or step % 2 == 1
        storage.reduce(gradient)
        lab.update(optimizer)
    return storage, optimizer


@pytest.mark.torch
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_pauses_of_parameters_in_one_array_are_those_of_torch(kind):
    torch = pytest.importorskip("torch")
    storage, _ = train(kind, Offloaded())
    stops = np.cumsum(SIZES)[:-1]
    theirs = [torch.nn.Parameter(torch.from_numpy(p.copy())) for p in np.split(Chosen().shard, stops)]
    optimizer = OPTIMIZERS[kind](torch.optim, theirs)
    for step, gradient in enumerate(gradients(STEPS)):
        for number, (their, part) in enumerate(zip(theirs, np.split(gradient, stops), strict=True)):
            their.grad = torch.from_numpy(part.copy()) if number in used_in(step) else None
        optimizer.step()
    for ours, their in zip(np.split(storage.shard, stops), theirs, strict=True):
        np.testing.assert_allclose(ours, their.detach().numpy(), rtol=0, atol=3e-6)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_pauses_have_the_same_bits_wherever_the_arrays_are(kind, monkeypatch):
    monkeypatch.setattr(optim.offload, "CHUNK", 1000)
    expected = snapshot(*train(kind, Offloaded()))
    assert_same_bits(snapshot(*train(kind, Offloaded(True, True, True))), expected)
    assert_same_bits(snapshot(*train(kind, Offloaded(True, True, True, step="host"))), expected)


def test_an_ordinary_step_is_one_range_for_each_group_of_neighbours():
    storage = HostStorage()
    optimizer = optim.AdamW(storage.parameters)
    (piece,) = optimizer.slices
    storage.reduce(gradients(1)[0])
    optimizer.step()
    assert piece.due().rows == ((0, sum(SIZES), 0),)
    storage.parameters[2].requires_grad = False
    optimizer.step()
    storage.parameters[2].requires_grad = True
    assert [row[:2] for row in piece.due().rows] == [(0, 1870), (1870, 4473), (4473, 5504)]
    assert piece.steps.tolist() == [2, 2, 1, 2, 2]


def pauses(sharded):
    """Weights and numbers of updates after steps in which some parameters of the only unit are frozen."""
    shardrt.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("auto"))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        model[0].weight.requires_grad = step in (0, 5)
        model[1].bias.requires_grad = step != 3
        y = model(np.full((2, 6), 0.1 * (step + 1), np.float32))
        (y * y).sum().backward()
        lab.update(optimizer)
    steps = {p.name: int(n) for s in optimizer.slices for (p, _), n in zip(s.members, s.steps, strict=True)}
    return full_state_dict(model), steps


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_parameter_of_a_unit_that_was_frozen_for_a_while_trains_as_a_plain_one(ranks):
    weights, steps = pauses(sharded=False)
    found = thread.run(ranks, pauses, sharded=True)
    lab.assert_close(found[0][0], weights, atol=1e-6)
    assert steps == {"0.weight": 2, "0.bias": 6, "1.weight": 6, "1.bias": 5}
    assert all(own == steps for _, own in found)


def test_what_is_frozen_at_first_has_no_state_until_it_is_trained():
    first, second = (nn.Parameter((3,), nn.init.Zeros()) for _ in range(2))
    second.requires_grad = False
    optimizer = optim.AdamW([first, second], lr=0.1)
    for trained in (False, True):
        second.requires_grad = trained
        for parameter in (first, second) if trained else (first,):
            parameter.accumulate_gradient(np.ones(3, np.float32))
        lab.update(optimizer)
        assert len(optimizer.slices) == 1 + trained
        assert np.allclose(second.data, -0.1 * trained, atol=1e-6)
    assert [piece.steps.tolist() for piece in optimizer.slices] == [[2], [1]]
    assert second.grad is None


def test_a_scaler_unscales_what_has_just_been_unfrozen():
    parameter, other = (nn.Parameter((2,), nn.init.Ones()) for _ in range(2))
    parameter.requires_grad = False
    optimizer = optim.SGD([parameter, other], lr=1.0)
    parameter.requires_grad = True
    scaler = optim.GradScaler(init_scale=8.0)
    scaler.scale((parameter * other).sum()).backward()
    scaler.step(optimizer)
    assert np.allclose(parameter.data, 0.0) and np.allclose(other.data, 0.0)


def grouped(add):
    """Parameters after three steps with two groups, the second of which is given later where `add`."""
    storage, plain = HostStorage(), nn.Parameter((5,), nn.init.Ones())
    first = {"params": storage.parameters[:2]}
    second = {"params": [*storage.parameters[3:], plain], "lr": 0.1}
    optimizer = optim.AdamW([first] if add else [first, second], lr=0.01)
    if add:
        optimizer.add_param_group(second)
    for gradient in gradients(3):
        storage.reduce(gradient)
        plain.accumulate_gradient(gradient[:5])
        lab.update(optimizer)
    return {"shard": storage.shard, "plain": plain.data}, [group["lr"] for group in optimizer.param_groups]


def test_a_group_that_is_added_is_one_that_was_given():
    (found, rates), (expected, expected_rates) = grouped(True), grouped(False)
    assert_same_bits(found, expected)
    assert rates == expected_rates == [0.01, 0.1]


def test_a_group_that_is_added_later_begins_at_its_first_step_and_goes_with_updates_in_backward():
    early, late = HostStorage(), HostStorage(Offloaded(True, True, True))
    optimizer = optim.AdamW(early.parameters, in_backward=True)
    early.reduce(gradients(1)[0])
    optimizer.step()
    optimizer.add_param_group({"params": late.parameters})
    optimizer.zero_grad()
    for storage in (early, late):
        storage.reduce(gradients(1)[0])
        assert storage.applied
    optimizer.step()
    assert [set(piece.steps.tolist()) for piece in optimizer.slices] == [{2}, {1}]
    assert np.array_equal(late.shard, train_one_step().shard)


def train_one_step():
    storage = HostStorage()
    optimizer = optim.AdamW(storage.parameters)
    storage.reduce(gradients(1)[0])
    optimizer.step()
    return storage


def test_a_group_that_cannot_be_added_changes_nothing():
    parameter = nn.Parameter((5,), nn.init.Ones())
    optimizer = optim.AdamW([parameter])
    with pytest.raises(ValueError, match="is in params twice"):
        optimizer.add_param_group({"params": [parameter]})
    with pytest.raises(ValueError, match="betas must be two numbers"):
        optimizer.add_param_group({"params": [nn.Parameter((5,), nn.init.Ones())], "betas": (1.0, 1.0)})
    with pytest.raises(ValueError, match="unknown settings"):
        optimizer.add_param_group({"params": [], "momentum": 1.0})
    assert len(optimizer.param_groups) == len(optimizer.slices) == 1


def test_step_with_a_closure_computes_the_gradients_before_the_update_and_gives_the_loss():
    parameter = nn.Parameter((3,), nn.init.Ones())
    optimizer = optim.SGD([parameter], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = (parameter * parameter).sum()
        loss.backward()
        return loss

    with shardrt.no_grad():
        assert optimizer.step(closure).item() == 3.0
        assert np.allclose(parameter.data, 0.0)
        assert optimizer.step(closure).item() == 0.0
    assert optimizer.step() is None
