"""Hooks of modules, tensors and parameters: when they are called, with what, and what they may change."""

import copy

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, nn, no_grad, optim
from shardrt.comm import CollectiveDelay, init_device_mesh
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard, no_sync
from shardrt.recompute import checkpoint
from tests.gradcheck import leaf, normal
from tests.ranks import run_ranks


def ones(*shape):
    return Tensor(np.ones(shape, np.float32))


def test_forward_hooks_run_in_order_and_change_inputs_and_output():
    layer, seen = nn.Linear(2, 2), []
    layer.weight.data = np.eye(2)
    layer.bias.data = np.zeros(2)
    layer.register_forward_pre_hook(lambda module, args: seen.append("second"))
    first = layer.register_forward_pre_hook(lambda module, args: (args[0] * 3,), prepend=True)
    layer.register_forward_pre_hook(lambda module, args: args[0] + 1)
    layer.register_forward_hook(lambda module, args, output: seen.append((module, output.shape)))
    layer.register_forward_hook(lambda module, args, output: output * 10)
    assert layer(ones(1, 2)).data.tolist() == [[40, 40]]
    assert seen == ["second", (layer, (1, 2))]
    first.remove()
    first.remove()  # once more changes nothing
    assert layer(ones(1, 2)).data.tolist() == [[20, 20]]


def test_hooks_with_keywords():
    class Scaled(nn.Module):
        def forward(self, x, *, by=1):
            return x * by

    module, seen = Scaled(), []
    module.register_forward_pre_hook(
        lambda m, args, kwargs: (args, {"by": kwargs["by"] + 1}), with_kwargs=True
    )
    with module.register_forward_hook(lambda m, a, kwargs, y: seen.append(kwargs), with_kwargs=True):
        assert module(ones(1), by=2).item() == 3
    assert module(ones(1), by=4).item() == 5
    assert seen == [{"by": 3}], "the with block took it out"


def test_a_hook_may_take_itself_out_while_hooks_run():
    layer, calls = nn.Identity(), []

    def once(module, args):
        calls.append(1)
        handle.remove()

    handle = layer.register_forward_pre_hook(once)
    layer.register_forward_pre_hook(lambda module, args: calls.append(2))
    layer(ones(1))
    layer(ones(1))
    assert calls == [1, 2, 2]


def test_a_copied_module_has_hooks_of_its_own():
    layer, calls = nn.Linear(2, 2), []
    handle = layer.register_forward_hook(lambda module, args, output: calls.append(module))
    twin = copy.deepcopy(layer)
    handle.remove()
    layer(ones(1, 2))
    twin(ones(1, 2))
    assert calls == [twin]


def test_a_tensor_hook_sees_the_whole_gradient_once_and_may_replace_it():
    x = leaf(normal(3))
    y, seen = x * 2, []
    y.register_hook(seen.append)
    y.register_hook(lambda gradient: gradient * 10)
    last = y.register_hook(lambda gradient: Tensor(gradient + 1))
    (y * 3 + y * 4).sum().backward(retain_graph=True)
    assert [gradient.tolist() for gradient in seen] == [[7, 7, 7]]
    assert x.grad.tolist() == [142] * 3
    last.remove()
    x.grad = None
    (y * 3).sum().backward()
    assert x.grad.tolist() == [60] * 3


def test_a_hook_on_one_of_several_results_and_on_the_loss():
    x = leaf(normal(4))
    first, second = x.split(2)
    second.register_hook(lambda gradient: gradient * 0)
    loss = (first + second).sum()
    loss.register_hook(lambda gradient: gradient * 5)
    loss.backward()
    assert x.grad.tolist() == [5, 5, 0, 0]
    unused, used = leaf(normal(4)).split(2)
    unused.register_hook(lambda gradient: pytest.fail("nothing used this piece"))
    used.sum().backward()


def test_the_gradient_of_a_result_can_be_kept():
    x = leaf(normal(3))
    y = x * 2
    y.retain_grad()
    (y * y).sum().backward(retain_graph=True)
    np.testing.assert_array_equal(y.grad, 2 * y.data)
    (y * y).sum().backward()
    np.testing.assert_array_equal(y.grad, 4 * y.data)
    x.retain_grad()  # a leaf does anyway


def test_what_cannot_be_hooked_says_why():
    weight = nn.Linear(2, 2).weight
    with pytest.raises(RuntimeError, match="use register_post_accumulate_grad_hook"):
        weight.register_hook(print)
    with pytest.raises(RuntimeError, match="no op made this tensor"):
        leaf([1.0]).register_hook(print)
    with pytest.raises(RuntimeError, match="requires no gradient"):
        (Tensor([1.0]) * 2).register_hook(print)
    with no_grad():
        (leaf([1.0]) * 2).register_hook(print).remove()
    for changed, text in ((np.ones(2), r"shape \(1,\) and float64, got \(2,\)"), (1.0, "got float")):
        y = leaf([1.0]) * 2
        y.register_hook(lambda gradient: changed)  # noqa: B023
        with pytest.raises(ValueError, match=f"hook of a result of Mul .*{text}"):
            y.sum().backward()


def test_a_gradient_hook_of_a_plain_parameter_is_called_once_at_the_end_of_backward():
    layer, seen = nn.Linear(2, 2), []
    handle = layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.copy()))
    layer.weight.register_post_accumulate_grad_hook(lambda p: p.grad.fill(7))
    layer.bias.requires_grad = False
    layer.bias.register_post_accumulate_grad_hook(lambda p: pytest.fail("it is frozen"))
    (layer(ones(3, 2)) + layer(ones(3, 2))).sum().backward()
    assert [gradient.tolist() for gradient in seen] == [[[6, 6], [6, 6]]]
    assert (layer.weight.grad == 7).all()
    handle.remove()
    layer(ones(1, 2)).sum().backward()
    assert len(seen) == 1


def test_a_parameter_hook_may_update_and_forget():
    """The optimizer in backward that people write with this hook; its bits are those of the usual loop."""
    results = []
    for hooked in (False, True):
        shardrt.manual_seed(0)
        layer = nn.Linear(3, 3)
        optimizers = {p: optim.SGD([p], lr=0.1) for p in layer.parameters()}

        def update(parameter, optimizers=optimizers):
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in layer.parameters() if hooked else ():
            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(2):
            (layer(ones(2, 3)) ** 2).sum().backward()
            for parameter in () if hooked else layer.parameters():
                update(parameter)
        results.append([p.data.copy() for p in layer.parameters()])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


class InABox(nn.Module):
    """A forward whose tensor nobody finds; its last layer is in the outermost unit, which is reduced last."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return type("Box", (), {"tensor": self.last(self.first(x))})()


def reductions_are_late(in_backward):
    """What a parameter's hook finds in each step, and what is there when backward has returned."""
    shardrt.manual_seed(1)
    mesh = init_device_mesh(wrap=lambda communicator: CollectiveDelay(communicator, 0.02))
    model = InABox()
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optim.SGD(model.parameters(), lr=0.1, in_backward=in_backward)
    found, there, parameter = [], [], model.last.weight
    parameter.register_post_accumulate_grad_hook(lambda p: found.append([p.grad.copy(), p.shard.copy()]))
    for step in (1, 2):
        model(ones(2, 4) * (step + mesh.rank)).tensor.sum().backward()
        there.append([parameter.grad.copy(), parameter.shard.copy()])
        optimizer.step()
        optimizer.zero_grad()
    return found, there


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_parameter_hook_comes_after_the_reduction_and_the_update(in_backward):
    for found, there in run_ranks(2, reductions_are_late, in_backward):
        np.testing.assert_array_equal(found, there)


class Block(nn.Module):
    """Tells in its forward what has happened before."""

    def __init__(self, log):
        super().__init__()
        self.linear, self.log = nn.Linear(4, 4), log

    def forward(self, x):
        self.log.append("forward")
        y = self.linear(x)
        y.register_hook(lambda gradient: self.log.append("gradient"))
        return y


def sharded_run(recomputed, registered_after):
    """Logs of one step of two units on this rank, with hooks that read whole parameters."""
    log, block = [], None
    mesh = init_device_mesh("auto")
    shardrt.manual_seed(0)
    block = Block(log)
    model = nn.Sequential(nn.Linear(4, 4), block)

    def before(module, args):
        log.append(("before", module.linear.weight.data.shape, args[0].dtype.name))

    def after(module, args, output):
        log.append(("after", module.linear.weight.data.shape))
        return output * 2

    def register():
        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)

    if not registered_after:
        register()
    if recomputed:
        checkpoint(block)
    for part in model:
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype="float32"))
    fully_shard(model, mesh=mesh)
    if registered_after:
        register()
    seen = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, p.grad.copy())))
    with no_sync(model):
        model(Tensor(normal(2, 4).astype(np.float32) * (mesh.rank + 1))).sum().backward()
    assert seen == [], "nothing is reduced yet"
    log.clear()
    model(Tensor(normal(2, 4).astype(np.float32) * (mesh.rank + 1))).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert sorted(name for name, _ in seen) == sorted(gradients)
    for name, gradient in seen:
        np.testing.assert_array_equal(gradient, gradients[name], "it is the reduced one of this rank")
    return log, [float(np.abs(gradient).sum()) for gradient in gradients.values()]


@pytest.mark.parametrize("registered_after", [False, True])
def test_hooks_of_a_unit_run_while_it_is_gathered_and_again_when_it_is_recomputed(registered_after):
    forward = [("before", (4, 4), "float32"), "forward", ("after", (4, 4))]
    results = {}
    for recomputed in (False, True):
        results[recomputed] = run_ranks(2, sharded_run, recomputed, registered_after)
        for log, _ in results[recomputed]:
            assert log == [*forward, *(forward if recomputed else []), "gradient"]
    assert [norms for _, norms in results[False]] == [norms for _, norms in results[True]]
    assert all(sum(norms) > 0 for _, norms in results[False])
