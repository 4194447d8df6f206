"""GradScaler: scale by scale as PyTorch's, and one decision for all ranks."""

from math import inf, nan

import numpy as np
import pytest

from shardrt import Tensor, nn, optim
from shardrt.comm import create
from shardrt.nn.storage import LocalStorage
from shardrt.optim import GradScaler
from tests import lab
from tests.ranks import run_ranks


def make(communicator=None, values=(1.0, 2.0, 3.0)):
    """(parameter, optimizer) of a plain SGD with learning rate 1; with `communicator`, seen as a shard."""
    parameter = nn.Parameter((len(values),), nn.init.Zeros())
    parameter.storage = LocalStorage(parameter)
    parameter.storage.communicator = communicator
    parameter.storage.shard[:] = values
    return parameter, optim.SGD([parameter], lr=1.0)


def put_gradient(parameter, values):
    parameter.storage.gradient_target(parameter)[0][...] = np.asarray(values, np.float32)


def loss_of(parameter):
    return (parameter * parameter).sum()


def steps_of(scaler, parameter, optimizer, gradients, put=put_gradient):
    """(scale, parameters, gradients after unscaling) after each step, of a scaler of ours or of PyTorch's."""
    history = []
    for gradient in gradients:
        optimizer.zero_grad()
        scaler.scale((parameter * 0.0).sum())
        put(parameter, gradient)
        scaler.step(optimizer)
        scaler.update()
        history.append((scaler.get_scale(), parameter.data.tolist(), np.array(parameter.grad.tolist())))
    return history


GRADIENTS = [[64, 32, 16], [inf, 0, 0], [1, 2, 3], [3, 2, 1], [0, 0, 0], [0, nan, 0], [-inf, 1, 0], [5, 5, 5]]


@pytest.mark.parametrize(
    "settings",
    [
        {"init_scale": 8.0, "growth_interval": 2},
        {"init_scale": 3.3, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 1},
        {"init_scale": 3e38, "growth_interval": 1},  # would become infinite
    ],
)
def test_scales_and_parameters_are_those_of_pytorch(settings):
    torch = pytest.importorskip("torch")

    def put(parameter, values):
        parameter.grad = torch.tensor(values, dtype=torch.float32)

    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    scaler = torch.amp.GradScaler("cpu", **settings)
    expected = steps_of(scaler, parameter, torch.optim.SGD([parameter], lr=1.0), GRADIENTS, put)
    found = steps_of(GradScaler(**settings), *make(), GRADIENTS)
    lab.assert_equal(found, expected)
    assert len({scale for scale, *_ in found}) > 2


def test_a_step_is_that_without_scaling():
    parameter, optimizer = make()
    scaler = GradScaler(init_scale=1024.0)
    scaler.scale(loss_of(parameter)).backward()
    assert np.array(parameter.grad).tolist() == [2048, 4096, 6144]
    scaler.unscale_(optimizer)
    assert np.array(parameter.grad).tolist() == [2, 4, 6]
    scaler.step(optimizer)
    assert parameter.data.tolist() == [-1, -2, -3]
    assert np.array(parameter.grad).tolist() == [2, 4, 6]


@pytest.mark.parametrize("bad", [inf, -inf, nan])
def test_all_ranks_skip_a_step_that_overflowed_on_one(bad):
    def body():
        comm = create()
        parameter, optimizer = make(comm)
        scaler = GradScaler(init_scale=4.0)
        scaler.scale(loss_of(parameter))
        put_gradient(parameter, [4, bad if comm.rank == 1 else 4, 4])
        scaler.step(optimizer)
        skipped = parameter.data.tolist() == [1, 2, 3]
        scaler.update()
        scaler.scale(loss_of(parameter))
        put_gradient(parameter, [2, 2, 2])
        scaler.step(optimizer)
        scaler.update()
        return skipped, parameter.data.tolist(), scaler.get_scale()

    assert run_ranks(3, body) == [(True, [0, 1, 2], 2.0)] * 3


def test_a_decision_goes_through_all_communicators():
    """An overflow seen in one group of ranks reaches the others through the next."""

    def body():
        world = create()
        pair = world.split(world.rank // 2, world.rank)
        parameters, optimizers = zip(make(pair), make(world), make(), strict=True)
        optimizer = optim.SGD(parameters, lr=1.0)
        scaler = GradScaler()
        scaler.scale(loss_of(parameters[0]))
        for parameter in parameters:
            put_gradient(parameter, [1, 1, 1])
        put_gradient(parameters[2 if world.rank == 3 else 0], [inf if world.rank == 3 else 1, 1, 1])
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    assert run_ranks(4, body) == [32768.0] * 4


def test_one_reduction_of_one_number_per_communicator():
    calls = []

    class Counting:
        rank, size = 0, 1

        def all_reduce(self, buffer, *, op, stream):
            calls.append((buffer.size, op))

    communicator = Counting()
    parameters = [make(communicator)[0] for _ in range(3)]
    for parameter in parameters:
        put_gradient(parameter, [1, 1, 1])
    scaler, optimizer = GradScaler(), optim.SGD(parameters, lr=1.0)
    scaler.scale(Tensor(1.0))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert calls == [(1, "max")]


def test_only_gradients_of_the_optimizer_are_unscaled():
    first, second = make()[0], make()[0]
    scaler, optimizer = GradScaler(init_scale=2.0), optim.SGD([first], lr=1.0)
    for parameter in (first, second):
        put_gradient(parameter, [2, 2, 2])
    scaler.scale(Tensor(1.0))
    scaler.unscale_(optimizer)
    assert np.array(first.grad).tolist() == [1, 1, 1]
    assert np.array(second.grad).tolist() == [2, 2, 2]


def test_one_optimizer_that_overflows_does_not_stop_the_other_but_lowers_the_scale():
    (bad, skipped), (good, taken) = make(), make()
    scaler = GradScaler(init_scale=2.0)
    scaler.scale(Tensor(1.0))
    put_gradient(bad, [nan, 0, 0])
    put_gradient(good, [2, 2, 2])
    scaler.step(skipped)
    scaler.step(taken)
    scaler.update()
    assert bad.data.tolist() == [1, 2, 3] and good.data.tolist() == [0, 1, 2]
    assert scaler.get_scale() == 1.0


def test_lists_of_outputs_are_scaled_and_nothing_else():
    scaler = GradScaler(init_scale=4.0)
    one, (two, three) = scaler.scale((Tensor(1.0), [Tensor(2.0), Tensor(3.0)]))
    assert [one.item(), two.item(), three.item()] == [4, 8, 12]
    with pytest.raises(TypeError, match="outputs must be tensors, got float"):
        scaler.scale(1.0)


def test_a_scale_may_be_set():
    parameter, optimizer = make()
    scaler = GradScaler()
    scaler.scale(loss_of(parameter)).backward()
    scaler.step(optimizer)
    scaler.update(512.0)
    assert scaler.get_scale() == 512.0


def test_a_scaler_goes_on_from_its_state():
    parameter, optimizer = make()
    settings = {"init_scale": 8.0, "growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.25}
    scaler = GradScaler(**settings)
    steps_of(scaler, parameter, optimizer, [[1, 1, 1]] * 2)
    again = GradScaler()
    again.load_state_dict(scaler.state_dict())
    assert again.state_dict() == scaler.state_dict()
    steps_of(again, parameter, optimizer, [[1, 1, 1]])
    assert again.get_scale() == 32.0


def test_a_state_dict_has_the_entries_of_pytorch():
    torch = pytest.importorskip("torch")
    assert GradScaler().state_dict() == torch.amp.GradScaler("cpu").state_dict()


def test_a_scaler_that_is_not_enabled_passes_everything_through():
    parameter, optimizer = make()
    scaler = GradScaler(enabled=False)
    loss = loss_of(parameter)
    assert scaler.scale(loss) is loss and not scaler.is_enabled()
    put_gradient(parameter, [1, 1, 1])
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict({})
    assert parameter.data.tolist() == [0, 1, 2]
    assert scaler.get_scale() == 1.0 and scaler.state_dict() == {}


def after_backward(*calls, scaled=True):
    """These calls of a scaler, with the optimizer where they take one."""

    def call():
        parameter, optimizer = make()
        scaler, loss = GradScaler(), loss_of(parameter)
        (scaler.scale(loss) if scaled else loss).backward()
        for name in calls:
            getattr(scaler, name)(*() if name == "update" else (optimizer,))

    return call


def without_gradients():
    scaler = GradScaler()
    scaler.scale(Tensor(1.0))
    scaler.step(make()[1])


FIRST = r"call scale\(loss\) first"
TWICE = r"\(\) was called for this optimizer already"
test_calls_in_a_wrong_order_are_refused = lab.refusals(
    (after_backward("unscale_", "unscale_"), RuntimeError, f"unscale_{TWICE}"),
    (after_backward("step", "step"), RuntimeError, r"step\(\) was called already"),
    (after_backward("step", "unscale_"), RuntimeError, f"step{TWICE}"),
    (after_backward("step", "update", "update"), RuntimeError, r"call step\(\) or unscale_\(\) first"),
    (after_backward("unscale_", scaled=False), RuntimeError, f"GradScaler.unscale_: {FIRST}"),
    (after_backward("step", scaled=False), RuntimeError, f"GradScaler.step: {FIRST}"),
    (after_backward("update", scaled=False), RuntimeError, f"GradScaler.update: {FIRST}"),
    (without_gradients, RuntimeError, "no parameter of this optimizer has a gradient"),
)
test_settings_and_states_that_cannot_be_are_refused = lab.refusals(
    (lambda: GradScaler(init_scale=0), "init_scale must be positive, got 0"),
    (lambda: GradScaler(growth_factor=1.0), "growth_factor must be more than 1, got 1.0"),
    (lambda: GradScaler(backoff_factor=1.0), "backoff_factor must be between 0 and 1, got 1.0"),
    (lambda: GradScaler(growth_interval=0), "growth_interval must be positive, got 0"),
    (lambda: GradScaler().load_state_dict({}), "state_dict is empty"),
)


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.0},
        {"scale": -1.0},
        {"scale": 1e-60},
        {"scale": float("nan")},
        {"scale": 10**400},
        {"scale": "8"},
        {"growth_factor": None},
        {"growth_interval": [1]},
        {"backoff_factor": 2.0},
        {"_growth_tracker": -1},
        {"_growth_tracker": 0.5},
    ],
    ids=str,
)
def test_a_forged_state_is_a_value_error_and_changes_nothing(change):
    scaler = GradScaler(init_scale=8.0)
    before = scaler.state_dict()
    with pytest.raises(ValueError, match="GradScaler: "):
        scaler.load_state_dict({**before, "scale": 4.0, **change})
    with pytest.raises(ValueError, match="a state must have finite numbers"):
        scaler.load_state_dict(list(before))
    assert scaler.state_dict() == before
