"""Muon next to torch.optim.Muon, and on several ranks."""

import numpy as np
import pytest

from shardrt import dtypes, nn, optim

SHAPES = ((12, 40), (40, 12), (24, 24), (12, 40))


def pairs(steps, seed=0):
    rng = np.random.default_rng(seed)
    start = [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]
    return start, [[rng.normal(size=shape).astype(np.float32) for shape in SHAPES] for _ in range(steps)]


def by_shardrt(start, gradients, **how):
    layers = [nn.Linear(shape[1], shape[0], bias=False) for shape in SHAPES]
    for layer, values in zip(layers, start, strict=True):
        layer.weight.data[...] = values
    optimizer = optim.Muon([layer.weight for layer in layers], **how)
    for step in gradients:
        for layer, values in zip(layers, step, strict=True):
            layer.weight._gradient_target()[0][...] = values
        optimizer.step()
        optimizer.zero_grad()
    return [np.array(layer.weight.data) for layer in layers]


def by_torch(start, gradients, **how):
    torch = pytest.importorskip("torch")
    weights = [torch.nn.Parameter(torch.tensor(values)) for values in start]
    optimizer = torch.optim.Muon(weights, **how)
    for step in gradients:
        for weight, values in zip(weights, step, strict=True):
            weight.grad = torch.tensor(values)
        optimizer.step()
    return [weight.detach().numpy() for weight in weights]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_its_weights_are_those_of_torch_in_float32(nesterov, adjust, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's own lines, unrounded
    how = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust}
    start, gradients = pairs(50)
    for found, expected in zip(by_shardrt(start, gradients, **how), by_torch(start, gradients, **how), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_its_bfloat16_is_that_of_torch():
    start, gradients = pairs(1)
    found = by_shardrt(start, gradients, lr=1.0, weight_decay=0.0, ns_dtype=dtypes.bfloat16)
    exact = by_shardrt(start, gradients, lr=1.0, weight_decay=0.0)
    for own, expected, other in zip(found, by_torch(start, gradients, lr=1.0, weight_decay=0.0), exact, strict=True):
        print(np.abs(own - expected).max(), np.abs(other - expected).max())
