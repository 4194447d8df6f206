"""Eight meshes of 1 to 8 ranks, four with stages beside, and models that are spread over any of them.

mpirun -n N python -m tests.parallel.meshes NET MESH STEPS FILE trains; rank 0 writes what it has to FILE.npz.
"""

import shardrt  # isort: skip  before NumPy: it sets the threads of BLAS

import sys
from dataclasses import dataclass

import numpy as np

from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from models.plans import plan_of
from shardrt import device, nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, objects
from shardrt.fsdp import fully_shard
from shardrt.nn.overlaps import put
from shardrt.parallel import parallelize_module, pipeline_stages, sum_tied
from tests import lab
from tests.parallel import pipes

BATCH, TIME, VOCAB = 12, 8, 13


@dataclass(frozen=True)
class Mesh:
    """How many ranks there are along each axis, and how a model is spread over them."""

    copies: int = 1
    shards: int = 1
    tp: int = 1
    sequence: bool = False
    strategy: str | None = None
    pp: int = 1

    @property
    def ranks(self) -> int:
        return self.pp * self.copies * self.shards * self.tp

    @property
    def sizes(self) -> dict[str, int]:
        """By name, without axes of one rank."""
        axes = {"pp": self.pp, "dp_replicate": self.copies, "dp_shard": self.shards, "tp": self.tp}
        return {name: size for name, size in axes.items() if size > 1} or {"dp_shard": 1}


MESHES = {
    "1": Mesh(),
    "dp 3": Mesh(shards=3),
    "tp 2": Mesh(tp=2),
    "tp 4, sp": Mesh(tp=4, sequence=True),
    "dp 2, tp 2": Mesh(shards=2, tp=2, sequence=True),
    "copies 2, dp 2, tp 2": Mesh(2, 2, 2, sequence=True),
    "copies 2, tp 2": Mesh(copies=2, tp=2, sequence=True, strategy="NO_SHARD"),
    "dp 3, tp 2": Mesh(shards=3, tp=2, strategy="SHARD_GRAD_OP"),
}
STAGED = {
    "pp 2": Mesh(pp=2),
    "pp 2, dp 2": Mesh(pp=2, shards=2),
    "pp 4, dp 2": Mesh(pp=4, shards=2),
    "pp 2, tp 2": Mesh(pp=2, tp=2, sequence=True),
}


def gpt(dropout=0.0):
    return GPT(GPTConfig(n_layer=2, n_head=4, n_embd=8, block_size=TIME, vocab_size=VOCAB, dropout=dropout))


def llama():
    """Where tp is 4, two ranks compute a head of keys and values together."""
    return Llama(
        LlamaConfig(
            n_layer=2,
            n_head=4,
            n_kv_head=2,
            n_embd=16,
            n_hidden=12,
            block_size=TIME,
            vocab_size=VOCAB,
            tied=False,
        )
    )


NETS = {"gpt": gpt, "llama": llama}


def spread(model: nn.Module, on: Mesh):
    """Cut and shard a new model; gives the mesh, and the part of it that has the data, or None.

    model.own: this rank's stages, where there are any.
    """
    sizes = on.sizes
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if on.tp > 1:
        parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=on.sequence))
    wholes = [model]
    if on.pp > 1:
        wholes = model.own = pipeline_stages(model, mesh["pp"])
    names = tuple(name for name in sizes if name not in ("pp", "tp"))
    data = mesh[names] if names else None
    if data is not None:
        for module in (module for whole in wholes for module in (*whole.blocks, whole)):
            fully_shard(module, mesh=data, strategy=on.strategy)
    return mesh, data


def batch(step=0):
    """(tokens, targets) of all ranks together."""
    text = np.random.default_rng(step).integers(0, VOCAB, (BATCH, TIME + 1))
    return text[:, :-1], text[:, 1:]


def whole_gradients(model):
    """Name -> whole gradient, on every rank: what the ranks have of it, put together."""
    found = {}
    for name, parameter in model.named_parameters():
        whole = np.zeros(parameter.whole_shape, parameter.dtype)
        communicators = []
        if parameter.counts:
            put(parameter.extents, whole, parameter.grad.reshape(-1))
            communicators.append(parameter.storage.communicator)
        communicators += [] if parameter.pipeline is None else [parameter.pipeline.control]
        for communicator in filter(None, communicators):
            communicator.all_reduce(whole.reshape(-1), stream=device.current().current_stream)
        found[name] = whole
    return found


def learn(model, mesh, tokens, targets):
    """Forward and backward; the loss, on ranks of the last stage, and 0 on others."""
    if "pp" not in mesh.mesh_dim_names:
        loss = model(tokens, targets)
        loss.backward()
        return loss.item()
    losses = pipes.run(model.own, mesh["pp"], [{"tokens": tokens, "targets": targets}])
    sum_tied(model)
    return sum(losses)


def adamw(model):
    return optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(net, on: Mesh, steps):
    """Losses of all ranks, gradients and weights after some steps with AdamW, on the first; {} elsewhere."""
    shardrt.manual_seed(3)
    model = NETS[net]()
    mesh, data = spread(model, on)
    optimizer, losses = adamw(model), []
    for step in range(steps):
        losses.append(learn(model, mesh, *lab.rows(data, *batch(step))))
        gradients = whole_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    everyones = np.array(objects.all_gather_object(mesh.communicator("control"), losses))
    weights = {f"weight/{name}": values for name, values in full_state_dict(model).items()}
    if mesh.rank > 0:
        return {}
    return weights | {"losses": everyones} | {f"gradient/{key}": values for key, values in gradients.items()}


if __name__ == "__main__":
    net, name, steps, path = sys.argv[1:]
    if found := train(net, MESHES[name], int(steps)):
        np.savez(path, **found)
