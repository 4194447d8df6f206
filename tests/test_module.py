"""nn/module.py: the tree of modules as attributes are set, replaced and deleted."""

import copy
import importlib
import pickle
import re
import warnings
from types import ModuleType

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, nn, optim
from shardrt import functional as F
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
from shardrt.nn import elsewhere
from shardrt.recompute import checkpoint
from tests import lab
from tests.ranks import run_ranks


def names(module):
    return [name for name, _ in module.named_parameters()]


def chain():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.BatchNorm2d(5))


def test_what_is_taken_out_is_no_parameter_any_more():
    model = chain()
    first, head, norm = model
    weight = first.weight
    first.bias = None
    del first.weight
    setattr(model, "1", None)
    norm.running_mean = None
    assert names(model) == ["2.weight", "2.bias"]
    assert [name for name, _ in model.named_buffers()] == ["2.running_var"]
    assert list(model.state_dict()) == ["2.weight", "2.bias", "2.running_var"]
    assert not hasattr(first, "weight")
    with pytest.raises(AttributeError):
        del first.weight
    assert (head.name, weight.name) == ("", ""), "they are free to take a name elsewhere"
    other = nn.ModuleList([nn.GELU(), head])
    assert other[1].weight.name == "1.weight"


def test_what_is_replaced_keeps_its_place_in_the_order():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    setattr(model, "0", nn.Linear(3, 4, bias=False))
    model[1].weight = nn.Parameter((5, 4), nn.init.Zeros())
    assert names(model) == ["0.weight", "1.weight", "1.bias"]
    assert model(Tensor(np.ones((1, 3), np.float32))).shape == (1, 5)
    model[1].running = model[1].weight  # a second name for it, and gone again
    del model[1].running
    assert model[1].weight.name == "1.weight"


def test_a_buffer_may_be_replaced():
    model = chain()
    model[2].running_mean = np.full(5, 2, np.float32)
    model[2].running_mean += 1
    assert model.state_dict()["2.running_mean"].tolist() == [3] * 5


def test_a_parameter_is_replaced_by_parameters_only():
    layer = nn.Linear(3, 2)
    for value in (np.zeros((2, 3), np.float32), Tensor(np.zeros((2, 3), np.float32))):
        with pytest.raises(TypeError, match=r"'weight' is a parameter, .* weight\.data = \.\.\."):
            layer.weight = value
    assert names(layer) == ["weight", "bias"]


class Pair(nn.Module):
    """Two linear layers with one weight, and a norm with buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm2d(3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.filterwarnings("ignore:parameter .* was read")  # the original, which gets a parent late
@pytest.mark.parametrize("made", [False, True])
def test_a_deep_copy_has_equal_values_under_any_name_and_is_its_own(made):
    model = Pair()
    model.first.bias.requires_grad = False
    shardrt.manual_seed(8)
    if made:
        model(Tensor(np.ones((1, 3), np.float32))).sum().backward()
        model.norm.running_mean += 1
    checkpoint(model.first)
    twin = copy.deepcopy(model)
    holder = nn.ModuleList([twin, copy.deepcopy(model.first), model])
    for part in (twin, holder[1]):
        assert all(parameter.grad is None for parameter in part.parameters())
        lab.assert_equal((model if part is twin else model.first).state_dict(), part.state_dict())
    assert twin.second.weight is twin.first.weight and twin.first.weight is not model.first.weight
    assert [p.name for p in twin.parameters()] == [f"0.{name}" for name in names(model)]
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in model.parameters()]
    twin.first.weight.data += 1
    twin.norm.running_mean += 1
    assert np.abs(twin.first.weight.data - model.first.weight.data).min() > 0.9
    assert (twin.norm.running_mean - model.norm.running_mean == 1).all()
    twin(Tensor(np.ones((1, 3), np.float32))).sum().backward()
    optim.SGD(twin.parameters(), lr=0.1).step()


def copies_of_shards():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm2d(3))
    nn.synchronise_batch_norm(model, init_device_mesh("auto"))
    assert copy.deepcopy(model)[1].communicator is model[1].communicator
    fully_shard(model)
    with pytest.raises(TypeError, match="Sequential is sharded and can't be copied; .* full_state_dict"):
        copy.deepcopy(model)
    with pytest.raises(TypeError, match=r"'0\.weight' is sharded and can't be copied; see full_state_dict"):
        copy.deepcopy(model[0])


def test_what_is_sharded_is_not_copied():
    run_ranks(2, copies_of_shards)


@pytest.mark.parametrize("refuse", [pickle.dumps, copy.copy], ids=["pickle", "copy"])
def test_a_module_is_not_pickled(refuse):
    for what in (nn.GELU(), nn.Linear(3, 3), nn.Linear(3, 3).weight):
        with pytest.raises(TypeError, match=r"shardrt\.checkpoint has save and load"):
            refuse(what)


def test_modules_and_parameters_are_found_by_path():
    model = nn.Sequential(chain(), nn.GELU())
    assert dict(model.named_children()) == {"0": model[0], "1": model[1]}
    assert model.get_submodule("0.1") is model[0][1] and model.get_submodule("") is model
    assert model.get_parameter("0.1.bias") is model[0][1].bias
    for get, path, text in (
        (model.get_submodule, "0.7", "no module '0.7'"),
        (model.get_parameter, "0.1", "no parameter '0.1'"),
        (model.get_parameter, "2.w", "no module '2'"),
    ):
        with pytest.raises(AttributeError, match=text):
            get(path)


def test_requires_grad_freezes_all_parameters():
    model = chain()
    assert model.requires_grad_(False) is model
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_gradients_are_forgotten_as_in_pytorch():
    layer = nn.Linear(3, 2)
    optimizer = optim.SGD(layer.parameters(), lr=0.1)
    clears = (
        lambda: optimizer.zero_grad(set_to_none=True),
        lambda: layer.zero_grad(set_to_none=True),
        lambda: [setattr(parameter, "grad", None) for parameter in layer.parameters()],
    )
    for clear in clears:
        layer(Tensor(np.ones((1, 3), np.float32))).sum().backward()
        assert layer.weight.grad is not None
        clear()
        assert layer.weight.grad is None and layer.bias.grad is None
    for owner in (optimizer, layer):
        with pytest.raises(ValueError, match="set_to_none=False is not supported"):
            owner.zero_grad(set_to_none=False)
    with pytest.raises(TypeError, match="'weight': grad can be set to None only"):
        layer.weight.grad = np.zeros((2, 3))


LAYER = nn.Linear(3, 2)
OPTIMIZER = optim.SGD(LAYER.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("owner", "name", "text"),
    [
        (LAYER, "set_requires_gradient_sync", r"with shardrt\.fsdp\.no_sync\(model\)"),
        (LAYER, "to", "device that init_device_mesh names; for types, use fully_shard"),
        (OPTIMIZER, "state_dict", r"use shardrt\.checkpoint\.CheckpointManager"),
        (LAYER, "wieght", "no attribute 'wieght'$"),
        (OPTIMIZER, "wieght", "no attribute 'wieght'$"),
        (shardrt, "save", r"shardrt has no 'save': use shardrt\.checkpoint\.save or CheckpointManager"),
        (shardrt, "softmax", r"use shardrt\.functional\.softmax$"),
        (shardrt, "cat", r"use F\.concatenate"),
        (shardrt, "float32", "types are strings"),
        (nn, "MultiheadAttention", r"use shardrt\.functional\.self_attention"),
        (nn, "BCEWithLogitsLoss", r"use shardrt\.functional\.binary_cross_entropy_with_logits$"),
        (nn.init, "zeros_", r"init=shardrt\.nn\.init\.Zeros\(\)"),
        (optim, "Adam", r"use shardrt\.optim\.AdamW"),
        (optim, "lr_scheduler", r"shardrt\.optim\.warmup_cosine\(step"),
        (nn, "Linaer", "shardrt.nn has no 'Linaer'$"),
    ],
)
def test_names_of_torch_and_its_packages_say_where_to_look(owner, name, text):
    with pytest.raises(AttributeError, match=text) as error:
        getattr(owner, name)
    if isinstance(owner, ModuleType):
        assert error.value.name == name and error.value.obj is owner, "for Python's own suggestions"


def test_what_the_hints_name_exists():
    hints = elsewhere.MODULE, elsewhere.OPTIMIZER, elsewhere.LAYER, elsewhere.INIT, elsewhere.OPTIM
    for known in (*hints, F.elsewhere.TORCH):
        for path in re.findall(r"shardrt(?:\.\w+)+", " ".join(known.values())):
            module, _, function = path.rpartition(".")
            module = module.replace("shardrt.models", "models")  # as other tests import it
            assert hasattr(importlib.import_module(module), function), path
    for package, known in zip((nn, nn.init, optim, shardrt), (*hints[2:], F.elsewhere.TORCH), strict=True):
        there = {name for name, value in vars(package).items() if not isinstance(value, ModuleType)}
        assert not there & set(known), "a hint for what is there"


def test_a_buffer_is_a_copy_of_an_array_as_in_pytorch_or_full_of_a_value():
    module, index = nn.Module(), np.arange(6).reshape(2, 3)
    module.register_buffer("index", index)
    module.register_buffer("scale", Tensor(np.full(2, 0.5)))
    module.register_buffer("mean", (3,), 1.5)
    module.register_buffer("mask", np.ones(2, bool), persistent=False)
    index[:] = 0
    assert module.index.dtype == np.int64 and module.index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert module.scale.dtype == np.float64 and module.scale.tolist() == [0.5, 0.5]
    assert module.mean.dtype == np.float32 and module.mean.tolist() == [1.5] * 3
    assert module.mask.all() and set(module.state_dict()) == {"index", "scale", "mean"}
    module.register_buffer("index", np.zeros(1), persistent=False)
    assert module.index.shape == (1,) and "index" not in module.state_dict()
    with pytest.raises(TypeError, match="register_buffer: 'sizes' needs an array"):
        module.register_buffer("sizes", (2, 3))


NO_SHAPE = "shape must be a tuple of integers"
test_a_parameter_says_what_it_takes_when_it_is_made = lab.refusals(
    (lambda: nn.Parameter(np.ones(3), nn.init.Zeros()), TypeError, NO_SHAPE),
    (lambda: nn.Parameter(np.ones((2, 2), np.int64), nn.init.Zeros()), TypeError, NO_SHAPE),
    (lambda: nn.Parameter(3, nn.init.Zeros()), TypeError, NO_SHAPE),
    (lambda: nn.Parameter((2.0, 3), nn.init.Zeros()), TypeError, NO_SHAPE),
    (lambda: nn.Parameter("34", nn.init.Zeros()), TypeError, NO_SHAPE),
    (lambda: nn.Parameter(np.zeros(3)), TypeError, "values come from `init`, or are set afterwards"),
    (
        lambda: nn.Parameter((3,)),
        TypeError,
        r"init must be a rule, such as nn\.init\.Normal\(0\.0, 0\.02\), got None",
    ),
    (lambda: nn.Parameter((3,), nn.init.Zeros), TypeError, "got the class Zeros: call it"),
    (lambda: nn.Parameter((3,), 0.5), TypeError, "got 0.5"),
    (lambda: nn.Parameter((3,), np.zeros(3)), TypeError, "init must be a rule"),
)


def test_values_that_were_made_before_the_name_was_complete_are_reported_once():
    shardrt.manual_seed(1)
    early, late = nn.Linear(3, 3), nn.Linear(3, 3)
    values = early.weight.data.copy()
    early(Tensor(np.ones((1, 3), np.float32)))
    with pytest.warns(UserWarning, match="'0.weight' was read or used when it was called 'weight'") as seen:
        model = nn.Sequential(early, late)
    assert len(seen) == 1
    np.testing.assert_array_equal(model[0].weight.data, values)
    with pytest.warns(UserWarning, match="'body.0.weight'"):
        nn.Module().body = model


def test_values_that_do_not_depend_on_the_name_or_were_changed_are_not_reported():
    changed, norm, copied = nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3)
    for parameter in changed.parameters():
        parameter.data += 1
    norm(Tensor(np.ones((1, 3), np.float32)))
    twin = copy.deepcopy(copied)
    assert twin.weight.data.any() and copied.weight.data.any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.Sequential(changed, norm, copied, twin, copy.deepcopy(twin))


class Nest(nn.Module):
    """`depth` modules in one another."""

    def __init__(self, depth):
        super().__init__()
        self.inner = Nest(depth - 1) if depth else nn.Linear(1, 1)


def test_a_name_takes_one_look_at_each_module_above(monkeypatch):
    parent, looks = nn.Module.parent, []
    monkeypatch.setattr(nn.Module, "parent", property(lambda self: looks.append(1) or parent.fget(self)))
    for depth in (8, 150):  # the second would not be made in a lifetime if a name cost 2 ** depth
        model = Nest(depth)
        weight = next(iter(model.parameters()))
        looks.clear()
        assert weight.name == ".".join(["inner"] * (depth + 1) + ["weight"])
        assert len(looks) <= depth + 2


def test_slices_share_their_modules():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))
    tail = model[1:]
    assert isinstance(tail, nn.Sequential) and list(tail) == list(model)[1:]
    assert names(tail) == ["2.weight", "2.bias"], "as PyTorch's, and as those in the whole"
    assert tail[1].weight.name == "2.weight" and tail(np.ones((1, 3), np.float32)).shape == (1, 4)
    tail.append(nn.Linear(4, 1))
    assert names(tail) == ["2.weight", "2.bias", "3.weight", "3.bias"]
    blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
    assert isinstance(blocks[::2], nn.ModuleList) and list(blocks[::2]) == [blocks[0], blocks[2]]
    assert blocks[-1] is list(blocks)[3]


def test_lists_of_modules_change():
    first, second, third = nn.Linear(1, 1), nn.Linear(2, 2), nn.Linear(3, 3)
    model = nn.ModuleList([first]).extend([third])
    model.insert(1, second)
    assert list(model) == [first, second, third] and third.name == "2"
    del model[0]
    assert list(model) == [second, third]
    assert names(model)[0] == second.weight.name == "0.weight"
    model[-1] = first
    assert list(model) == [second, first] and third.name == ""
    with pytest.raises(TypeError, match="ModuleList: each must be a Module, got int"):
        model.append(3)


def test_dictionaries_of_modules_and_parameters():
    heads = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 3)})
    scales = nn.ParameterList(nn.Parameter((n,), nn.init.Ones()) for n in (1, 2))
    table = nn.ParameterDict({"x": nn.Parameter((2,), nn.init.Ones())})
    model = nn.Sequential({"heads": heads, "scales": scales, "table": table})
    expected = ["heads.a.weight", "heads.a.bias", "heads.b.weight", "heads.b.bias"]
    assert names(model) == [*expected, "scales.0", "scales.1", "table.x"]
    assert [p.name for p in model.parameters()] == names(model)
    assert list(heads) == ["a", "b"] and "a" in heads and len(heads) == 2 and heads["b"] is model[0]["b"]
    assert [p.shape for p in scales] == [(1,), (2,)] and scales[-1] is scales[1] and len(scales[:1]) == 1
    assert list(table.items()) == [("x", table["x"])] and "y" not in table
    head = heads.pop("a")
    assert head.name == "" and list(heads.keys()) == ["b"]
    del table["x"]
    assert len(table) == 0
    model.load_state_dict(model.state_dict())
    for container in (heads, table):
        for name in ("keys", "a.b", "", 3):
            with pytest.raises(ValueError, match="name"):
                container[name] = head if container is heads else scales[0]
    with pytest.raises(TypeError, match="ParameterList: each must be a Parameter, got Linear"):
        scales.append(head)
    with pytest.raises(KeyError):
        heads["c"]


LAYERS = {
    "Identity": ((), lambda x: x),
    "ReLU": ((True,), F.relu),
    "GELU": (("tanh",), lambda x: F.gelu(x, "tanh")),
    "SiLU": ((), F.silu),
    "ELU": ((2.0,), lambda x: F.elu(x, 2.0)),
    "LeakyReLU": ((0.3,), lambda x: F.leaky_relu(x, 0.3)),
    "Tanh": ((), F.tanh),
    "Sigmoid": ((), F.sigmoid),
    "Softplus": ((), F.softplus),
    "Softmax": ((1,), lambda x: F.softmax(x, 1)),
    "LogSoftmax": ((), F.log_softmax),
    "Flatten": ((2,), lambda x: x.reshape(2, 4, 12)),
    "MaxPool2d": ((2, 1), lambda x: F.max_pool2d(x, 2, 1)),
    "AvgPool2d": ((2,), lambda x: F.avg_pool2d(x, 2)),
    "AdaptiveAvgPool2d": ((1,), lambda x: x.mean((2, 3), keepdims=True)),
    "GroupNorm": ((2, 4), lambda x: F.group_norm(x, 2)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_the_function_of_its_name(name):
    arguments, function = LAYERS[name]
    x = Tensor(np.random.default_rng(0).standard_normal((2, 4, 4, 3)).astype(np.float32))
    np.testing.assert_allclose(getattr(nn, name)(*arguments)(x), function(x), rtol=1e-6)


def test_losses_are_modules_and_a_1d_convolution_is_a_layer():
    x = Tensor(np.random.default_rng(0).standard_normal((2, 4, 5)).astype(np.float32))
    target = np.ones((2, 4, 5), np.float32)
    assert nn.MSELoss("sum")(x, target).item() == F.mse_loss(x, target, reduction="sum").item()
    assert nn.CrossEntropyLoss()(x, np.zeros((2, 4), int)).item() == F.cross_entropy(x, [[0] * 4] * 2).item()
    layer = nn.Conv1d(4, 6, 3, padding=1, groups=2)
    assert layer(x).shape == (2, 6, 5) and layer.weight.shape == (6, 2, 3)
    np.testing.assert_array_equal(layer(x), F.conv1d(x, layer.weight, layer.bias, 1, 1, 1, 2))


def test_who_wants_parameters_says_so_when_given_a_module_or_names():
    model = chain()
    for given, kind in (
        (model, "Linear"),
        (model[0], "Linear"),
        (model.named_parameters(), "tuple"),
        ([np.zeros(3)], "ndarray"),
    ):
        given = list(given) if kind == "tuple" else given
        for name, wants in (
            ("optimizer", lambda p: optim.AdamW(p, lr=0.1)),
            ("clip_grad_norm_", lambda p: nn.utils.clip_grad_norm_(p, 1.0)),
            ("clip_grad_value_", lambda p: nn.utils.clip_grad_value_(p, 1.0)),
            ("grad_norm", lambda p: nn.utils.grad_norm(p)),
        ):
            with pytest.raises(
                TypeError, match=f"{name}: must be Parameters, .*model.parameters.*got {kind}"
            ):
                wants(given)
    assert nn.utils.grad_norm(model[0].weight) == 0
