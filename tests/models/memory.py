"""Under mpirun: what one rank's memory grows by while a model is exported and read again, in bytes.

mpirun -n 2 python -m tests.models.memory KIND DIRECTORY writes a line of JSON per rank.
"""

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from models.gpt import GPT, GPTConfig
from models.gpt import Block as GPTBlock
from models.hub import load_pretrained, save_pretrained
from models.llama import Block as LlamaBlock
from models.llama import Llama, LlamaConfig
from shardrt.comm import init_device_mesh
from shardrt.fsdp import by_class, units, wrap
from shardrt.kernels.cpu._warm_up import call_all

KINDS = {
    "gpt2": lambda: GPT(GPTConfig(n_layer=6, n_head=8, n_embd=512, block_size=256, vocab_size=16384)),
    "llama": lambda: Llama(LlamaConfig(n_layer=6, n_head=8, n_embd=512, n_hidden=1536, vocab_size=16384)),
}


def resident(peak: bool = False) -> int:
    """Bytes of this process in memory now, or at most since the last `forget_peak`."""
    wanted = "VmHWM:" if peak else "VmRSS:"
    with open("/proc/self/status", encoding="ascii") as file:
        return 1024 * int(next(line.split()[1] for line in file if line.startswith(wanted)))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def grown(function) -> int:
    """What `function()` takes at most, beyond what was there before."""
    gc.collect()
    forget_peak()
    before = resident()
    function()
    return resident(peak=True) - before


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.models.memory", description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("directory", help="where the model is exported to; it must not exist")
    options = parser.parse_args(arguments)
    mesh = init_device_mesh("auto")
    call_all()  # kernels: from here on they are loaded
    first = KINDS[options.kind]()
    wrap(first, by_class(GPTBlock, LlamaBlock), mesh=mesh)
    _ = next(first.parameters()).shard  # built: from here on only what saving takes
    saving = grown(lambda: save_pretrained(first, options.directory))
    model = load_pretrained(options.directory)
    wrap(model, by_class(GPTBlock, LlamaBlock), mesh=mesh)
    loading = grown(lambda: next(model.parameters()).shard)
    line = {
        "saving": saving,
        "loading": loading,
        "shard": sum(group.shard.nbytes for unit in units(model) for group in unit.groups),
        "model": sum(4 * p.size for p in model.parameters()),
        "largest tensor": max(4 * p.size for p in model.parameters()),
        "largest unit": max(sum(4 * p.size for p in unit.parameters) for unit in units(model)),
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
