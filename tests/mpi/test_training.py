"""What tests/fsdp hold on threads holds for processes, over shared memory and MPI; see test_backends."""

import pytest

from shardrt import optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, mpi_world
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from tests import lab
from tests.mpi import memory, readers

SIZE = mpi_world.of_mpi().size
SHARED = "shm" if mpi_world.of_mpi().local_size == SIZE else "auto"


def weights(mesh, **settings):
    model = lab.shard(lab.seeded(), mesh, **settings)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for batch in lab.batches(3):
        lab.backward(model, mesh, batch)
        lab.update(optimizer)
    return full_state_dict(model)


@pytest.mark.skipif(SIZE % 2, reason="for 2 and 4 ranks")
@pytest.mark.parametrize("backend", [SHARED, "mpi"] if SIZE == 2 else [SHARED])
def test_every_strategy_precision_and_offload_gives_the_same_bits(backend):
    flat = init_device_mesh("auto", communicator=backend)
    cases = [(flat, {"strategy": name}) for name in ("NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP")]
    cases.append((flat, {"offload_policy": CPUOffloadPolicy()}))
    if SIZE == 4:
        pairs = init_device_mesh("auto", (2, 2), communicator=backend)
        cases += [(pairs, {"strategy": name}) for name in ("HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP")]
    for policy in (None, MixedPrecisionPolicy("bfloat16")):
        expected = weights(flat, mp_policy=policy)
        for mesh, settings in cases:
            found = weights(mesh, mp_policy=policy, **settings)
            if mesh.rank == 0:  # which alone has them
                lab.assert_equal(found, expected, (settings, policy))


@pytest.mark.skipif(SIZE != 2, reason="for 2 ranks")
@pytest.mark.parametrize("backend", [SHARED, "mpi"])
def test_late_readers_and_several_models_on_one_mesh(backend):
    readers.main(backend)


@pytest.mark.skipif(SIZE % 2, reason="for 2 and 4 ranks")
def test_training_holds_what_the_plan_said():
    memory.main(SHARED)
