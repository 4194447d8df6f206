"""Links on the GPU emulator: each way to carry messages, however late streams are."""

from collections import Counter

import numpy as np
import pytest

from shardrt.comm import init_device_mesh, thread
from shardrt.comm.links import Links
from tests import links
from tests.softgpu.scheduler import MODES

pytestmark = pytest.mark.usefixtures("processes")


def run(ranks, kind, chunks=1):
    def rank():
        program = links.Program(init_device_mesh("cuda", communicator=kind), chunks=chunks)
        found = program.run()
        program.links.close()
        return found

    return thread.run(ranks, rank)[0]


# Where work is done when it is launched, as by CUDA_LAUNCH_BLOCKING=1, two ranks that send to each other over
# NCCL wait for each other.
HOW = [
    (kind, mode)
    for kind in ("nccl", "staged", "ipc")
    for mode in MODES
    if mode != "random" and (kind, mode) != ("nccl", "at once")
]


@pytest.mark.parametrize(("kind", "mode"), HOW)
def test_two_ranks_with_links_both_ways_train_to_the_bits_of_one(gpu, software, kind, mode):
    for chunks in (1, 2) if mode == "late" else (2,):
        software.choose(mode, seed=3)
        links.check(run(2, kind, chunks), 2 * chunks)


@pytest.mark.parametrize("kind", ["nccl", "staged"])
def test_a_chain_of_ranks_trains_to_the_bits_of_one(gpu, software, kind):
    for seed in range(2):
        software.choose("random", seed=seed)
        links.check(run(4, kind), 4)


@pytest.mark.parametrize(("kind", "mode"), HOW)
def test_a_slot_is_written_again_only_when_what_reads_it_has_run(gpu, software, kind, mode):
    """All is sent at once, into two slots, and nothing goes back that would hold the sender up."""
    software.choose(mode, seed=3)

    def rank():
        mesh = init_device_mesh("cuda", communicator=kind)
        made, here, found = Links(mesh, {(0, 1, "F")}), mesh.device, []
        for m in range(6):
            what = f"F{m}"
            if mesh.rank == 0:
                made.send("F", 1, (here.asarray(np.full(1000, m, np.float32)),), tag=what)
            else:
                made.expect("F", 0, tag=what)
                got = made.receive("F", 0, tag=what)
                found.append(got.arrays[0] * np.float32(2))
                got.free()
        made.finish()
        numbers = [here.to_numpy(each)[[0, -1]].tolist() for each in found]
        made.close()
        return numbers

    assert thread.run(2, rank)[1] == [[2 * m, 2 * m] for m in range(6)]


@pytest.mark.parametrize("kind", ["nccl", "staged", "ipc"])
def test_what_links_take_is_planned_to_the_byte(gpu, software, allocated, kind):
    software.choose("late")

    def rank():
        mesh = init_device_mesh("cuda", communicator=kind)
        made, peer = (
            Links(mesh, {(0, 1, "F"), (1, 0, "B")}, slots={(0, 1, "F"): 3, (1, 0, "B"): 1}),
            1 - mesh.rank,
        )
        sends, receives = ("F", "B") if mesh.rank == 0 else ("B", "F")
        arrays = [mesh.device.zeros(shape, np.float32) for shape in ((3, 1000), (), (70,))]
        made.send(sends, peer, arrays, tag="x")
        made.expect(receives, peer, tag="x")
        made.receive(receives, peer, tag="x").free()
        made.finish()
        mesh.device.current_stream.synchronize()
        shapes = [(array.shape, "float32") for array in arrays]
        plan = made.plan({(0, 1, "F"): [shapes], (1, 0, "B"): [shapes]})
        made.close()
        return plan

    plans, taken = thread.run(2, rank), sum(allocated.values(), Counter())
    assert [sum(plan) for plan in zip(*plans, strict=True)] == [taken["buffer"], taken["pinned"]]
    assert taken["buffer"] == 4 * (12_032 + 256 + 512)
    assert taken["pinned"] == (0 if kind == "nccl" else 4 * 12_032)
