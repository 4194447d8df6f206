"""Experts on the GPU emulator, by CuPy and the kernels of CUDA: as on the CPU."""

import pytest

import shardrt
from shardrt import Tensor, nn, optim
from shardrt import functional as F
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard
from shardrt.recompute import checkpoint
from tests import lab
from tests.parallel import routed
from tests.test_moe import ROUTERS, Stack, batch, routers

BFLOAT16 = MixedPrecisionPolicy("bfloat16", "float32")


def trained(name, router, policy=None, ranks=1):
    """Loads, biases, losses and weights of two steps."""
    shardrt.manual_seed(2)
    mesh, model = init_device_mesh(name), Stack(router)
    settings = {} if policy is None else {"mp_policy": policy}
    for block in model.blocks:
        checkpoint(block)
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    optimizer, losses, loads = optim.SGD(model.parameters(), lr=1e-2), [], []
    for step in range(2):
        x = Tensor(mesh.device.asarray(batch(10 * step + mesh.rank).data))
        y, balance = model(x)
        loss = F.cast((y * y).mean(), "float32") + balance.sum()
        loss.backward()
        optimizer.step()
        loads.append(nn.expert_load(model))
        nn.update_expert_bias(model, rate=0.1)
        optimizer.zero_grad()
        losses.append(loss.item())
    biases = [router.expert_bias for router in routers(model) if hasattr(router, "expert_bias")]
    biases = [mesh.device.to_numpy(bias) for bias in biases if bias is not None]
    return loads, biases, losses, full_state_dict(model)


def near(found, expected, tolerance):
    lab.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def compare(found, expected):
    lab.assert_equal([each[:2] for each in found], [each[:2] for each in expected])
    near([each[2:] for each in found], [each[2:] for each in expected], 1e-5)


@pytest.mark.parametrize("router", ROUTERS)
def test_each_router_trains_as_on_the_cpu(gpu, router):
    compare(*(thread.run(1, trained, name, router) for name in ("cuda", "cpu")))


def test_two_ranks_move_one_bias(gpu):
    compare(*(thread.run(2, trained, name, "deepseek") for name in ("cuda", "cpu")))


def test_in_16_bits_the_router_has_32(gpu):
    found, expected = (thread.run(1, trained, name, "capacity", BFLOAT16)[0] for name in ("cuda", "cpu"))
    near(found[2:], expected[2:], 2e-2)


def on_ranks_of_their_own(name, policy, **router):
    """Losses and weights of two steps, of experts on 2 ranks."""
    model, data = routed.spread(
        1, 2, model=routed.make(**router), name=name, before=checkpoint, mp_policy=policy
    )
    optimizer, losses = optim.SGD(model.parameters(), lr=1e-2), []
    for step in range(2):
        loss = model(Tensor(data.device.asarray(routed.tokens_of(2, data.rank, step))))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, full_state_dict(model)


@pytest.mark.parametrize(
    ("policy", "router"),
    [(None, {"capacity_factor": 0.75}), (BFLOAT16, {})],
    ids=["float32, a capacity", "bfloat16, all rows"],
)
def test_experts_on_two_ranks_train_as_on_the_cpu(gpu, policy, router):
    found, expected = (
        thread.run(2, on_ranks_of_their_own, name, policy, **router) for name in ("cuda", "cpu")
    )
    near(found, expected, 1e-5 if policy is None else 2e-2)
