"""A second start compiles nothing: every kernel that training needs is found on disk."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

COUNT = """
import sys
from numba.core.dispatcher import Dispatcher
from shardrt.kernels import cpu
cpu.warm_up()
found = {
    id(kernel): kernel
    for name, module in list(sys.modules.items()) if name.startswith("shardrt.kernels.cpu")
    for kernel in vars(module).values() if isinstance(kernel, Dispatcher)
}
hits = sum(sum(kernel.stats.cache_hits.values()) for kernel in found.values())
misses = sum(sum(kernel.stats.cache_misses.values()) for kernel in found.values())
print(hits, misses)
"""


def start():
    """(kernels loaded from the cache, kernels compiled) by a fresh process."""
    command = [sys.executable, "-c", "import shardrt\n" + COUNT]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=250).stdout
    return tuple(map(int, output.split()))


def test_a_second_start_compiles_nothing():
    start()
    hits, misses = start()
    assert misses == 0
    assert hits > 20
