"""NCCL in software, called without CuPy: what reductions give."""

import numpy as np
import pytest

from shardrt.comm import thread, world
from tests.softgpu import nccl, ring, rooms
from tests.softgpu.cuda import CUDA

KINDS = {kind.name: number for number, kind in enumerate(ring.TYPES)}


def on_ranks(size, call, nbytes=1 << 14):
    """`call(communicator, send, recv, stream)` on each rank, with device memory; what it gives, by rank."""
    cuda, key = CUDA("random", 3), rooms.new_key(False)
    cuda.visible = tuple(range(size))

    def rank():
        cuda.setDevice(world.current().rank)
        stream = cuda.streamCreateWithPriority(1, 0)
        communicator = nccl.NcclCommunicator(size, key, world.current().rank)
        return call(communicator, cuda.malloc(nbytes), cuda.malloc(nbytes), stream)

    with pytest.MonkeyPatch.context() as patch:  # other tests of this process have a CUDA of their own
        patch.setattr(nccl.NcclCommunicator, "cuda", cuda, raising=False)
        return thread.run(size, rank)


def values(rank, count, kind):
    numbers = np.random.default_rng(rank).standard_normal(count) * 8
    return numbers.astype(ring.TYPES[KINDS[kind]])


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int32", "int64"])
@pytest.mark.parametrize("op", [ring.SUM, ring.MAX, ring.MIN])
def test_reductions_are_near_float64s(op, kind):
    size, count, number = 3, 7, KINDS[kind]

    def rank(communicator, send, recv, stream):
        mine = values(communicator._rank, size * count, kind)
        ring.view(send, size * count, number)[:] = mine
        communicator.reduceScatter(send, recv, count, number, op, stream)
        communicator.cuda.streamSynchronize(stream)
        scattered = ring.view(recv, count, number).copy()
        communicator.allReduce(send, send, size * count, number, op, stream)
        communicator.cuda.streamSynchronize(stream)
        return scattered, ring.view(send, size * count, number).copy()

    found = on_ranks(size, rank)
    parts = np.array([values(r, size * count, kind).astype(np.float64) for r in range(size)])
    expected = {ring.SUM: np.sum, ring.MAX: np.max, ring.MIN: np.min}[op](parts, 0)
    near = {"float16": 2e-3, "bfloat16": 2e-2}.get(kind, 1e-6)
    for r, (scattered, everywhere) in enumerate(found):
        assert everywhere.dtype == scattered.dtype == ring.TYPES[number]
        np.testing.assert_allclose(everywhere.astype(np.float64), expected, near, 16 * near)
        assert everywhere.tobytes() == found[0][1].tobytes()
        assert scattered.tobytes() == everywhere[r * count : (r + 1) * count].tobytes()


def test_each_hop_rounds_to_the_type_of_the_buffer():
    """1 + 2**-11 is 1 in float16, and 1 + 3 * 2**-11 is 1 + 2**-9."""
    kind = KINDS["float16"]

    def rank(communicator, send, recv, stream):
        ring.view(send, 4, kind)[:] = 1 if communicator._rank == 1 else 2.0**-11
        communicator.reduceScatter(send, recv, 1, kind, ring.SUM, stream)
        communicator.cuda.streamSynchronize(stream)
        return float(ring.view(recv, 1, kind)[0])

    assert on_ranks(4, rank)[:2] == [
        1,
        1 + 2.0**-9,
    ]  # the slice of rank 0 begins at rank 1


def test_two_ranks_on_one_gpu_are_refused(monkeypatch):
    monkeypatch.setattr(CUDA, "setDevice", lambda cuda, index: None)
    with pytest.raises(nccl.NcclError, match="INVALID_USAGE"):
        on_ranks(2, lambda *_: None)


def test_a_result_over_what_is_sent_is_refused():
    def rank(communicator, send, recv, stream):
        communicator.reduceScatter(send, send + 4, 8, KINDS["float32"], ring.SUM, stream)

    with pytest.raises(AssertionError, match="overlap"):
        on_ranks(2, rank)
