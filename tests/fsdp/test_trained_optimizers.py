"""One optimizer over parameters that are frozen, unfrozen and left unused: the numbers of PyTorch's."""

import numpy as np
import pytest

from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh
from shardrt.fsdp import CPUOffloadPolicy, fully_shard, set_find_unused_parameters
from tests import lab

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

# Beginnings of the names that are frozen in a step, and which layers a step uses on rank 0, on rank 1.
STEPS = [
    (("layers.1",), (0, 1, 2), (0, 1, 2)),
    ((), (0, 2), (0, 2)),
    (("layers.0.weight", "layers.2"), (0, 1), (1,)),
    ((), (2,), (1,)),
    (("layers",), (0,), (1,)),
    ((), (0, 1, 2), (0,)),
    ((), (1,), (1,)),
]
X = np.random.default_rng(0).normal(size=(len(STEPS), 4, 3)).astype(np.float32)


class Choosing(nn.Module):
    """A head, before it the layers that are to be used."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.head = nn.Linear(3, 3)
        self.use = ()

    def forward(self, x):
        for index in self.use:
            x = x + self.layers[index](x)
        return self.head(x)


def sharded(make_optimizer, **settings):
    model, mesh = lab.seeded(Choosing), init_device_mesh("auto")
    model.layers[1].requires_grad_(False)
    fully_shard(model, mesh=mesh, **settings)
    set_find_unused_parameters(model)
    optimizer = make_optimizer(optim, model.parameters())
    for (frozen, *uses), x in zip(STEPS, X, strict=True):
        for name, parameter in model.named_parameters():
            parameter.requires_grad = not name.startswith(frozen or "nothing")
        model.use = uses[mesh.rank]
        y = model(*lab.rows(mesh, x))
        (y * y).mean().backward()
        lab.update(optimizer)
    return full_state_dict(model)


def by_torch(make_optimizer):
    """The mean of two ranks' losses, on one."""
    values = {name: torch.tensor(np.array(p.data)) for name, p in lab.seeded(Choosing).named_parameters()}
    parameters = {name: torch.nn.Parameter(value) for name, value in values.items()}
    optimizer = make_optimizer(torch.optim, parameters.values())
    for (frozen, *uses), x in zip(STEPS, X, strict=True):
        for name, parameter in parameters.items():
            parameter.requires_grad_(not name.startswith(frozen or "nothing"))
        loss = 0
        for rank, use in enumerate(uses):
            y = torch.tensor(x[2 * rank : 2 * rank + 2])
            for index in use:
                y = y + y @ parameters[f"layers.{index}.weight"].T + parameters[f"layers.{index}.bias"]
            y = y @ parameters["head.weight"].T + parameters["head.bias"]
            loss = loss + (y * y).mean() / 2
        loss.backward()
        lab.update(optimizer)
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}


OPTIMIZERS = {
    "AdamW": lambda o, parameters: o.AdamW(parameters, lr=0.05, weight_decay=0.1),
    "SGD": lambda o, parameters: o.SGD(parameters, lr=0.05, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"strategy": "NO_SHARD"}, {"offload_policy": CPUOffloadPolicy()}],
    ids=["FULL_SHARD", "NO_SHARD", "offload"],
)
def test_an_optimizer_leaves_alone_what_that_of_torch_leaves_alone(settings, name):
    found = lab.first(2, sharded, OPTIMIZERS[name], **settings)
    lab.assert_close(found, by_torch(OPTIMIZERS[name]), rtol=1e-4, atol=1e-5)
