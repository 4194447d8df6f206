"""DiLoCo on the GPU as on the CPU. Ranks are threads that share it."""

import numpy as np
import pytest

from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import fully_shard
from shardrt.parallel import DiLoCo, HubExchange
from tests.parallel.test_hub import serving

pytestmark = pytest.mark.gpu


def trained(name, address=None, **settings):
    """The weights of two hosts of a rank each after four steps."""
    mesh = init_device_mesh(name, (2, 1), mesh_dim_names=("diloco", "dp_shard"))
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    for layer in model:
        fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    hosts = mesh["diloco"]
    if address:
        hosts = HubExchange(address, mesh.rank, 2, mesh["dp_shard"])
    outer = DiLoCo(optimizer, hosts, [[layer] for layer in model], **settings)
    if address:
        outer.join(0)
    for step in range(8):
        x = np.random.default_rng([step, mesh.rank]).standard_normal((4, 8), np.float32)
        (model(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step(step + 1)
    return full_state_dict(model)


@pytest.mark.parametrize("through_hub", [False, True])
@pytest.mark.parametrize("should_quantize", [False, True])
def test_outer_steps_are_those_of_the_cpu(should_quantize, through_hub):
    settings = {"sync_every": 4, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5}
    settings |= {"should_quantize": should_quantize}
    with serving() as (address, _):
        ours = thread.run(2, trained, "cuda", address if through_hub else None, **settings)
    theirs = thread.run(2, trained, "cpu", **settings)
    for host, weights in enumerate(theirs):
        for name, values in weights.items():
            np.testing.assert_allclose(ours[host][name], values, rtol=0, atol=1e-5)
