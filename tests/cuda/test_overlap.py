"""The benchmark of overlap on the GPU emulator: collectives in one stream, matmuls in another, both right."""

import pytest

from bench.collectives.started import InStream
from bench.overlap import PLACES, Matmuls, Pair, case_of
from shardrt.comm import create, init_device_mesh, thread

pytestmark = pytest.mark.usefixtures("processes")


@pytest.mark.parametrize("kind", ["staged", "nccl", "ipc"])
def test_both_results_are_right(gpu, kind):
    def rank():
        mesh = init_device_mesh("cuda", communicator=kind, reduction="tree")
        control, matmuls = create("auto"), Matmuls(mesh.device, 8)
        library = InStream(mesh.communicator("gather"), mesh.device, 1 << 10)
        for name in PLACES:
            pair = Pair(case_of(name, 1 << 10, 2), library, matmuls, control)
            pair.count = 3
            pair.serial()
            assert pair.check(1) == pair.check(2) == 0, name

    thread.run(2, rank)
