"""RegNetY and ViT trained on the CUDA device, on the GPU emulator, and on the CPU."""

import numpy as np
import pytest

import shardrt
from models.regnet import RegNet, RegNetConfig
from models.vit import ViT, ViTConfig
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard
from tests import lab

REGNET = RegNetConfig((1,), (8,), 4, (2,), 4, 1, channels=1, classes=3)
VIT = ViTConfig(1, 2, 8, 8, 4, 2, 1, 3)


def train(name, kind, config, precision=None):
    """(losses, parameters and buffers at the end) of this rank."""
    mesh = init_device_mesh(name)
    shardrt.manual_seed(0)
    model = nn.synchronise_batch_norm(kind(config), mesh)
    kept = (nn.BatchNorm2d, nn.LayerNorm)
    policy = None
    if precision:
        policy = MixedPrecisionPolicy(precision, "float32", "float32", full_precision=kept)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer, losses = optim.SGD(model.parameters(), lr=0.05), []
    for step in range(2):
        random = np.random.default_rng((step, mesh.rank))
        images = shardrt.Tensor(mesh.device.asarray(random.normal(size=(2, 1, 4, 4)).astype("float32")))
        if kind is RegNet:
            images = F.avg_pool2d(F.max_pool2d(images, 3, 1, 1), 3, 1, 1)
        loss = F.cross_entropy(model(images), random.integers(0, 3, 2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    losses.append(F.sum(model(images)).item())
    return losses, full_state_dict(model)


@pytest.mark.parametrize(
    ("kind", "config", "precision"),
    [(RegNet, REGNET, None), (RegNet, REGNET, "bfloat16"), (ViT, VIT, "bfloat16")],
    ids=["regnet, float32", "regnet, bfloat16", "vit, bfloat16"],
)
def test_it_trains_as_on_the_cpu(gpu, kind, config, precision):
    expected = thread.run(2, train, "cpu", kind, config)
    found = thread.run(2, train, "cuda", kind, config, precision)
    tolerance = 2e-2 if precision else 1e-5
    lab.assert_close(found, expected, atol=5 * tolerance)
