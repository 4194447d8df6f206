"""Quantised collectives between processes: the bits of every backend, and of threads (tests/fsdp)."""

import pytest

from shardrt import optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, mpi_world
from shardrt.fsdp import MixedPrecisionPolicy
from shardrt.fsdp.options.quantisation import Quantisation
from tests import lab

SIZE = mpi_world.of_mpi().size


def weights(mesh, how):
    model = lab.shard(
        lab.seeded(), mesh, mp_policy=MixedPrecisionPolicy("bfloat16", "float32", quantised=how)
    )
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for batch in lab.batches(3):
        lab.backward(model, mesh, batch)
        lab.update(optimizer)
    return full_state_dict(model)


@pytest.mark.skipif(SIZE % 2, reason="for 2 and 4 ranks")
@pytest.mark.parametrize("host_size", [1, 2] if SIZE == 4 else [1])
def test_backends_give_the_same_bits(host_size):
    how = {"gather_bits": 4, "reduce_bits": 8, "block": 32, "host_size": host_size, "error_feedback": True}
    shared, mpi = (init_device_mesh("auto", communicator=name) for name in ("auto", "mpi"))
    expected = weights(shared, Quantisation(**how))
    for mesh, more in ((mpi, {}), (shared, {"secondary": True})):
        found = weights(mesh, Quantisation(**how, **more))
        if mesh.rank == 0:  # which alone has them
            lab.assert_equal(found, expected, more)
