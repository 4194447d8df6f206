"""Collectives on the tape, on the GPU emulator by NCCL's calls: both ways with the CPU's bits."""

import ml_dtypes
import numpy as np
import pytest

from shardrt import Tensor
from shardrt.comm import init_device_mesh, thread
from tests.functional.test_collective import ALONG_AN_AXIS, OPS, values

DTYPES = (np.float32, ml_dtypes.bfloat16)
CASES = [(name, axis) for name in OPS for axis in ((0, -1) if name in ALONG_AN_AXIS else (0,))]


def found(place, dtype):
    """(op, axis) -> y and dx, of every rank of two, which add the same pairs on every backend."""

    def rank():
        mesh = init_device_mesh(place, communicator="nccl" if place == "cuda" else "auto")
        here, comm = mesh.device, mesh.communicator("tensor")
        return {case: one(*case, comm, here, dtype) for case in CASES}

    return thread.run(2, rank)


def one(name, axis, comm, here, dtype):
    into, out, op, _ = OPS[name]
    given = here.asarray(values(into, (4, 2, 6), comm.rank, 10).astype(dtype))
    x = Tensor(given * 2, requires_grad=True)  # what a kernel has just written
    y = op(x * 1, comm, axis)
    gradient = here.asarray(values(out, y.shape, comm.rank, 50).astype(dtype))
    (y * 3).backward(gradient * 2)
    return [np.array(here.to_numpy(array)) for array in (y.data * 1, x.grad * 1)]


def differing(some, others):
    return {
        case
        for one, other in zip(some, others, strict=True)
        for case in CASES
        if any(a.tobytes() != b.tobytes() for a, b in zip(one[case], other[case], strict=True))
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["late", "side first"])
def test_each_op_is_the_cpus_in_two_orders_of_streams(software, mode, dtype):
    expected = found("cpu", dtype)
    software.choose(mode)
    assert differing(found("cuda", dtype), expected) == set()
