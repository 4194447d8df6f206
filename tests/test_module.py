"""nn/module.py: the tree of modules as attributes are set, replaced and deleted."""

import numpy as np
import pytest

from shardrt import Tensor, nn


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


@pytest.mark.parametrize("shape", [np.ones(3), np.ones((2, 2), np.int64), 3, (2.0, 3), "34"], ids=str)
def test_a_shape_is_integers(shape):
    with pytest.raises(TypeError, match="shape must be a tuple of integers"):
        nn.Parameter(shape, nn.init.Zeros())
