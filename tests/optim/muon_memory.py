"""mpirun -n 2 python -m tests.optim.muon_memory says what memory of Muon's step is planned and taken."""

import shardrt  # noqa: F401  # isort: skip  before NumPy: it sets the threads of BLAS

import json

from shardrt import device, optim
from shardrt.comm import objects
from shardrt.fsdp import memory_plan
from shardrt.parallel.muon_memory import muon_plan
from tests import lab


class Large(lab.Net):
    """Its matrices are large enough for the pool of the CPU's memory."""

    def __init__(self):
        super().__init__(blocks=2, width=3000)


def planned_and_taken(strategy):
    """(the mesh, bytes of Muon's step and of its state: in the plan, and on this rank)."""
    model, mesh = lab.build(Large, strategy=strategy)
    groups = optim.muon_groups(model, 0.1)
    plan = muon_plan(memory_plan(model), model, groups[0]["params"]).device
    optimizer, here = optim.Muon(groups, lr=0.02), device.current()
    lab.backward(model, mesh)
    here.reset_peak()
    before = here.peak_bytes()
    lab.update(optimizer)
    taken = here.peak_bytes() - before
    state = sum(array.nbytes for piece in optimizer.slices for array in piece.state.values())
    return mesh, [[plan["matrices of Muon"], plan["optimizer state"]], [taken, state]]


def main():
    """One line for each rank and strategy, from rank 0."""
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        mesh, message = planned_and_taken(strategy)
        everyone = objects.all_gather_object(mesh.communicator("control"), message)
        if mesh.rank == 0:
            print("\n".join(map(json.dumps, everyone)))


if __name__ == "__main__":
    main()
