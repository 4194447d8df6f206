"""One rank of bench.gpu.ranks: trains, then times the collectives of the same communicators.

mpirun -n 8 python -m bench.gpu.rank '{"job": {"layers": 12, ...}, "warmup": 4, "steps": 8, "nbytes": 1024}'
"""

from .ours import Trainer  # isort: skip  before NumPy: shardrt sets the threads of BLAS

import json
import sys
import time
from collections.abc import Callable

import numpy as np

from shardrt.comm import DeviceMesh
from shardrt.device import Stream


def main(given: dict) -> None:
    """Train, measure the collectives of the same communicators, and let rank 0 print the findings."""
    trainer = Trainer(given["job"])
    trainer.steps(given["warmup"])
    found = trainer.about() | trainer.steps(given["steps"])
    mesh = trainer.mesh
    found["carriers"] = [type(mesh.communicator(role)).__name__ for role in ("gather", "reduce")]
    found["collectives"] = collectives(mesh, given["nbytes"]) if given["nbytes"] else {}
    if mesh.rank == 0:
        print(json.dumps(found), flush=True)


def collectives(mesh: DeviceMesh, nbytes: int) -> dict[str, tuple[float, int, bool]]:
    """Map name to (seconds of a call, bytes, whether the numbers are right), of FULL_SHARD's calls."""
    gather, gathers = mesh.communicator("gather"), mesh.stream("gather")
    reduce, reduces = mesh.communicator("reduce"), mesh.stream("reduce")
    here, part = mesh.device, nbytes // 4 // mesh.size
    gathered = gather.allocate(2 * part * mesh.size, np.uint16, shared=True)  # the bits of bfloat16
    gathered.fill(mesh.rank + 1)
    gradients = reduce.allocate(part * mesh.size, np.float32, shared=True)
    gradients.fill(mesh.rank + 1)
    total = reduce.allocate(part, np.float32, shared=False)
    here.current_stream.synchronize()
    times = (
        _seconds(gathers, lambda: gather.all_gather(gathered, stream=gathers)),
        _seconds(reduces, lambda: reduce.reduce_scatter(total, gradients, stream=reduces)),
    )
    slices = here.to_numpy(gathered).reshape(mesh.size, -1) == 1 + np.arange(mesh.size)[:, None]
    sums = here.to_numpy(total) == mesh.size * (mesh.size + 1) / 2
    return {
        "all-gather": (times[0], gathered.nbytes, bool(slices.all())),
        "reduce-scatter": (times[1], gradients.nbytes, bool(sums.all())),
    }


def _seconds(stream: Stream, work: Callable[[], None], calls: int = 20) -> float:
    """Of one of so many calls, one after the other, by the host's clock; after one that is not timed."""
    work()
    stream.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    stream.synchronize()
    return (time.perf_counter() - start) / calls


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
