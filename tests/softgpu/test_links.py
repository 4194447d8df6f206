"""Links on the GPU in software: each way to carry messages, however late streams are."""

import pytest

from shardrt.comm import init_device_mesh, thread
from tests import links
from tests.cuda.test_ipc import processes
from tests.softgpu.scheduler import MODES

__all__ = ["processes"]  # threads pass for them, which ipc wants


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
    if (kind, mode) != ("nccl", "at once")
]


@pytest.mark.parametrize(("kind", "mode"), HOW)
def test_two_ranks_with_links_both_ways_train_to_the_bits_of_one(gpu, software, kind, mode):
    for chunks in (1, 2):
        software.choose(mode, seed=3)
        links.check(run(2, kind, chunks), 2 * chunks)


@pytest.mark.parametrize("kind", ["nccl", "staged"])
def test_a_chain_of_ranks_trains_to_the_bits_of_one(gpu, software, kind):
    for seed in range(2):
        software.choose("random", seed=seed)
        links.check(run(4, kind), 4)
