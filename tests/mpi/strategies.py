"""Every strategy, precision and offload over MPI processes gives the bits of FULL_SHARD; run under mpirun."""

import sys

import numpy as np

import shardrt
from shardrt import optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.fsdp.nets import Net, batches, loss_of, shard

STEPS = 6


def weights(mesh, **settings):
    shardrt.manual_seed(3)
    model = Net()
    shard(model, mesh, **settings)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for tokens, targets in batches(STEPS):
        rows = len(tokens) // mesh.size
        mine = slice(mesh.rank * rows, (mesh.rank + 1) * rows)
        loss_of(model, tokens[mine], targets[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state_dict(model)


def main(backend):
    flat = init_device_mesh("auto", communicator=backend)
    cases = [(flat, {"strategy": name}) for name in ("NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP")]
    cases.append((flat, {"offload_policy": CPUOffloadPolicy()}))
    if flat.size == 4:
        pairs = init_device_mesh("auto", (2, 2), communicator=backend)
        cases += [(pairs, {"strategy": name}) for name in ("HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP")]
    for policy in (None, MixedPrecisionPolicy("bfloat16")):
        expected = weights(flat, mp_policy=policy)
        for mesh, settings in cases:
            found = weights(mesh, mp_policy=policy, **settings)
            for name in expected:  # rank 0 only
                assert np.array_equal(found[name], expected[name]), (settings, policy, name)
    if flat.rank == 0:
        print("all equal")


if __name__ == "__main__":
    main(sys.argv[1])
