"""mpirun -n 2 python -m tests.optim.muon_memory says what memory of Muon's step is planned and taken."""

import shardrt  # noqa: F401  # isort: skip  before NumPy: it sets the threads of BLAS

import json
from functools import partial

from models.gpt import GPT, GPTConfig
from shardrt import device, optim
from shardrt.comm import objects
from shardrt.fsdp import memory_plan
from shardrt.parallel.muon_memory import muon_plan
from tests import lab
from tests.parallel import pipes
from tests.parallel.staged import SMALL, mesh_of, own_of, text


class Large(lab.Net):
    """Its matrices are large enough for the pool of the CPU's memory."""

    def __init__(self):
        super().__init__(blocks=2, width=3000)


def sharded(strategy):
    """(model, mesh, a function that makes gradients)."""
    model, mesh = lab.build(Large, strategy=strategy)
    return model, mesh, lambda: lab.backward(model, mesh)


def staged():
    """The same of a model in two stages."""
    model = lab.seeded(lambda: GPT(GPTConfig(n_layer=2, **SMALL | {"n_embd": 320})))
    mesh = mesh_of(2)
    stages = own_of(model, mesh)
    return model, mesh, lambda: pipes.run(stages, mesh["pp"], text())


def planned_and_taken(model, mesh, backward):
    """Bytes of Muon's step and of its state: in the plan, and on this rank."""
    groups = optim.muon_groups(model, 0.1)
    plan = muon_plan(memory_plan(model), model, groups[0]["params"]).device
    optimizer, here = optim.Muon(groups, lr=0.02), device.current()
    backward()
    here.reset_peak()
    before = here.peak_bytes()
    lab.update(optimizer)
    taken = here.peak_bytes() - before
    state = sum(array.nbytes for piece in optimizer.slices for array in piece.state.values())
    return [[plan["matrices of Muon"], plan["optimizer state"]], [taken, state]]


def main():
    """One line for each rank and each way to spread the model, from rank 0."""
    for make in (partial(sharded, "FULL_SHARD"), partial(sharded, "NO_SHARD"), staged):
        model, mesh, backward = make()
        message = planned_and_taken(model, mesh, backward)
        everyone = objects.all_gather_object(mesh.communicator("control"), message)
        if mesh.rank == 0:
            print("\n".join(map(json.dumps, everyone)))


if __name__ == "__main__":
    main()
