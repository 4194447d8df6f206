"""Features of tests/fsdp/test_pairs.py on ranks that are processes with a GPU each: near the CPU's numbers.

mpirun -n 2 python -m tests.softgpu.run -m tests.softgpu.pairs_of_processes FOLDER

It trains each set of features that fits this number of ranks, in float32: pairs.py has the rest, on threads.
Rank 0 prints JSON: {features: [how far losses are off, how far weights are]}.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np

from shardrt.comm import world
from tests.fsdp import paired
from tests.fsdp import test_pairs as pairs


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    sets = [names for names in pairs.TOGETHER if not pairs.LOW & set(names)]
    fitting = [names for names in sets if pairs.ranks_for(names, 2) == world.current().size]
    found = {pairs.readable(names): compared(names, folder) for names in fitting}
    if world.first():
        print(json.dumps(found), flush=True)


def compared(names: tuple, folder: str) -> list[float]:
    """How far losses of this rank are off, and weights."""
    options, runs = pairs.options_of(names), []
    for device in ("cpu", "cuda"):
        made = tempfile.mkdtemp(dir=folder) if world.first() else ""
        shared = world.current().root.bcast(made)
        runs.append(paired.train(options, Path(shared), device))
    (losses, weights), (expected, others) = runs
    apart = max((np.abs(weights[name] - others[name]).max() for name in weights or ()), default=0.0)
    return [float(np.abs(np.array(losses) - np.array(expected)).max()), float(apart)]


if __name__ == "__main__":
    main(*sys.argv[1:])
