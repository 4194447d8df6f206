"""models/vit.py and models/regnet.py beside PyTorch: gradients, curves of 20 steps, sharded; sizes."""

from math import prod

import numpy as np
import pytest

import shardrt
from models.regnet import SIZES as REGNETS
from models.regnet import RegNet, RegNetConfig
from models.vit import SIZES as VITS
from models.vit import ViT, ViTConfig
from shardrt import Tensor, nn, optim
from shardrt import functional as F
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
from tests import lab
from tests.ranks import run_ranks

STEPS, BATCH, SIZE, CLASSES = 20, 8, 8, 5
VIT = ViTConfig(2, 2, 16, 24, SIZE, 4, 3, CLASSES, init_std=0.2)
MEAN = ViTConfig(1, 2, 16, 24, SIZE, 2, 3, CLASSES, pool="mean", init_std=0.2)
REGNET = RegNetConfig((1, 2), (16, 32), 8, (1, 2), 8, 1, channels=3, classes=CLASSES)
CASES = [(ViT, VIT), (ViT, MEAN), (RegNet, REGNET)]
IDS = ["vit", "vit-mean", "regnet"]


def data(step):
    random = np.random.default_rng(step)
    return random.normal(size=(BATCH, 3, SIZE, SIZE)).astype("float32"), random.integers(0, CLASSES, BATCH)


def peer_of(kind, config, state):
    torch = pytest.importorskip("torch")
    from tests.parity import torch_vision

    peer = getattr(torch_vision, kind.__name__)(config)
    found = peer.load_state_dict({n: torch.from_numpy(np.array(v)) for n, v in state.items()}, strict=False)
    assert not found.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in found.missing_keys)
    return torch, peer


@pytest.mark.torch
@pytest.mark.parametrize(("kind", "config"), CASES, ids=IDS)
def test_logits_and_every_gradient_are_those_of_pytorch(kind, config):
    shardrt.manual_seed(1)
    model = kind(config)
    torch, peer = peer_of(kind, config, model.state_dict())
    images, labels = data(0)
    x, their_x = Tensor(images, requires_grad=True), torch.tensor(images, requires_grad=True)
    logits, expected = model(x), peer(their_x)
    np.testing.assert_allclose(logits.data, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    F.cross_entropy(logits, labels).backward()
    torch.nn.functional.cross_entropy(expected, torch.from_numpy(labels)).backward()
    theirs = {name: p.grad.numpy() for name, p in peer.named_parameters()} | {"images": their_x.grad.numpy()}
    ours = {name: p.grad for name, p in model.named_parameters()} | {"images": x.grad}
    lab.assert_near(ours, theirs, rtol=1e-4, atol=1e-10)
    buffers = {name: values.numpy() for name, values in peer.named_buffers()}
    for name, values in model.named_buffers():
        lab.assert_close(values, buffers[name], name, rtol=1e-5, atol=1e-6)
    model.eval(), peer.eval()
    np.testing.assert_allclose(model(images).data, peer(their_x).detach().numpy(), rtol=1e-4, atol=1e-5)


def curve(kind, config, state):
    """(losses, weights at the end) of this rank's part of each batch, sharded over all ranks."""
    shardrt.manual_seed(1)
    model, mesh = kind(config), init_device_mesh("auto")
    model.load_state_dict(state)
    nn.synchronise_batch_norm(model, mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses, share = [], BATCH // mesh.size
    for step in range(STEPS):
        images, labels = (part[mesh.rank * share :][:share] for part in data(step))
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, full_state_dict(model)


@pytest.mark.torch
@pytest.mark.parametrize(("kind", "config"), [CASES[0], CASES[2]], ids=["vit", "regnet"])
def test_a_training_curve_is_that_of_pytorch_at_1_2_and_4_ranks(kind, config):
    """At 4 ranks a batch norm sees 2 images: only with the statistics of all ranks it is PyTorch's with 8."""
    shardrt.manual_seed(1)
    state = {name: np.array(values) for name, values in kind(config).state_dict().items()}
    torch, peer = peer_of(kind, config, state)
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-3, weight_decay=0.1)
    expected = []
    for step in range(STEPS):
        images, labels = map(torch.from_numpy, data(step))
        loss = torch.nn.functional.cross_entropy(peer(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for size in (1, 2, 4):
        results = run_ranks(size, curve, kind, config, state)
        losses = np.mean([losses for losses, _ in results], axis=0)
        np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)
        weights = results[0][1]
        assert weights.keys() == state.keys()
        for name, values in peer.named_buffers():
            if name in weights:
                np.testing.assert_allclose(weights[name], values.numpy(), rtol=1e-3, atol=1e-4, err_msg=name)


def count(model):
    return sum(prod(p.shape) for p in model.parameters())


def test_named_sizes_have_the_parameters_that_are_published():
    """To the last one those of the libraries that have these models. Nothing is allocated."""
    assert count(ViT(VITS["vit-b16"])) == 86_567_656
    assert count(ViT(VITS["vit-s16"])) == 22_050_664
    assert count(ViT(VITS["vit-l16"])) == 304_326_632
    assert count(RegNet(REGNETS["regnety-400mf"])) == 4_344_144
    assert count(RegNet(REGNETS["regnety-800mf"])) == 6_432_512
    assert count(RegNet(REGNETS["regnety-16gf"])) == 83_590_140
    assert REGNETS["regnety-16gf"] == RegNetConfig()


test_bad_sizes_are_refused = lab.refusals(
    (lambda: ViTConfig(n_embd=100, n_head=3), "n_embd must be a multiple of n_head, got 100 and 3"),
    (lambda: ViTConfig(image_size=30), "image_size must be a multiple of patch_size, got 30 and 16"),
    (lambda: ViTConfig(pool="max"), "pool must be 'class' or 'mean', got 'max'"),
    (lambda: ViTConfig(classes=0), "classes must be at least 1, got 0"),
    (lambda: RegNetConfig(depths=(1,)), "one number per stage"),
    (lambda: RegNetConfig(widths=(224, 448, 1232, 3000)), "multiples of group_width 112"),
    (lambda: RegNetConfig(classes=0), "at least 1"),
    (lambda: ViT(VIT)(np.zeros((1, 3, 9, 8), "float32")), r"images: must be .batch, 3, 8, 8."),
    (lambda: RegNet(REGNET)(np.zeros((1, 1, 8, 8), "float32")), "images: must be .batch, 3, height, "),
)
