"""Digests of what each strategy trains, by rank 0: `mpirun -n 4 python -m tests.hosts.strategies PRECISION`.

As `tests/mpi/test_training.py` trains them, so that runs on hosts in other layouts can be compared.
PRECISION: float32, bfloat16, or of what is gathered and of what is reduced, float32-bfloat16.
"""

import hashlib
import os
import sys

from shardrt.comm import init_device_mesh
from shardrt.fsdp import MixedPrecisionPolicy
from tests.mpi.test_training import weights


def main(*precisions: str) -> None:
    flat = init_device_mesh("auto")
    pairs = init_device_mesh("auto", (2, flat.size // 2))
    names = ("NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP")
    for precision in precisions:
        param, _, reduce = precision.partition("-")
        policy = MixedPrecisionPolicy(param, reduce or None) if precision != "float32" else None
        for name in names:
            mesh = pairs if name.startswith("HYBRID") else flat
            found = weights(mesh, strategy=name, mp_policy=policy)
            if flat.rank == 0:
                digest = hashlib.sha256(b"".join(found[key].tobytes() for key in sorted(found)))
                kind = type(flat.communicator("reduce")).__name__
                os.write(1, f"{precision} {name} {kind} {digest.hexdigest()}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
