"""Trains a GPT whose training state is 8 times a rank's memory limit, which the kernel enforces.

    mpirun -n 4 python -m models.beyond_memory                # trains
    mpirun -n 4 python -m models.beyond_memory --unsharded    # the same without sharding: out of memory
    mpirun -n 4 python -m models.beyond_memory --in-memory    # no limit, nothing saved: for comparison

States are parameters, gradients and AdamW's two moments: 16 bytes per parameter. docs/howto/fit_in_memory.md
says which switch frees what. Linux only.
"""

import argparse
import ctypes
import gc
import hashlib
import resource
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

import shardrt
from shardrt import device, optim
from shardrt import functional as F
from shardrt.comm import DeviceMesh, init_device_mesh
from shardrt.device import StreamError, host
from shardrt.fsdp import CPUOffloadPolicy, fully_shard, memory_plan
from shardrt.recompute import checkpoint

from .gpt import GPT, GPTConfig

TIMES = 8  # states over limit
BATCH = 2  # sequences per rank
SHAPE = GPTConfig(n_layer=20, n_head=4, n_embd=256, block_size=64, vocab_size=256)
TINY = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=256)
_STACK = 1 << 19  # bytes of a stream's thread; the limit counts all of it, used or not


def main() -> None:
    """One run. Exits with code 1 if memory does not suffice."""
    parser = argparse.ArgumentParser("models.beyond_memory", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=8, help="updates of the weights")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on a disk")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--unsharded", action="store_true", help="all else equal: fails for lack of memory")
    mode.add_argument("--in-memory", action="store_true", help="no limit, no offload, no recomputation")
    arguments = parser.parse_args()

    threading.stack_size(_STACK)
    shardrt.use_deterministic_algorithms(
        True
    )  # else trying which library multiplies faster takes memory, too
    mesh = init_device_mesh("auto", communicator="mpi")  # shared memory would not count
    train(build(TINY, mesh, arguments), mesh, steps=2)  # compiles, and loads what training will need
    baseline = settle()
    model = build(SHAPE, mesh, arguments)
    budget = 16 * sum(parameter.size for parameter in model.parameters()) // TIMES
    say(
        mesh, f"{describe(model)}; a rank may hold {mb(budget)}, above {mb(baseline)} of Python and libraries"
    )
    say(mesh, str(memory_plan(model, step=lambda: loss_of(model, mesh, 0).backward())))
    if not arguments.in_memory:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (baseline + budget, hard))
    try:
        run(model, mesh, arguments.steps, baseline, budget)
    except (MemoryError, StreamError) as error:
        if not isinstance(error, MemoryError) and not isinstance(error.__cause__, MemoryError):
            raise
        say(mesh, f"out of memory: {mb(budget)} per rank do not suffice: {error}", sys.stderr)
        sys.exit(1)


def build(shape: GPTConfig, mesh: DeviceMesh, arguments: argparse.Namespace) -> GPT:
    """The model, each block a unit that is recomputed in backward, with all states in files."""
    shardrt.manual_seed(0)
    policy = None if arguments.in_memory else CPUOffloadPolicy(step="host", directory=arguments.directory)
    strategy = "NO_SHARD" if arguments.unsharded else "FULL_SHARD"
    model = GPT(shape)
    for block in model.blocks:
        if not arguments.in_memory:
            checkpoint(block)
        fully_shard(block, mesh=mesh, strategy=strategy, offload_policy=policy)
    return fully_shard(model, mesh=mesh, strategy=strategy, offload_policy=policy)


def train(model: GPT, mesh: DeviceMesh, steps: int) -> list[float]:
    """The losses, each the mean over all ranks. A unit's gradient is used up as soon as it is reduced."""
    optimizer = optim.AdamW(model.parameters(), lr=3e-4, in_backward=True)
    losses = []
    for step in range(steps):
        loss = loss_of(model, mesh, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(np.mean(over_ranks(mesh, float(loss.item())))))
        if model.config is SHAPE:
            say(mesh, f"step {step + 1:3}/{steps}  loss {losses[-1]:.4f}")
    return losses


def loss_of(model: GPT, mesh: DeviceMesh, step: int) -> shardrt.Tensor:
    """The loss of this rank's sequences, where each of 32 words is the one before plus 1, 2 or 3."""
    random = np.random.default_rng([step, mesh.rank])
    steps = random.integers(1, 4, (BATCH, model.config.block_size + 1))
    text = (random.integers(0, 32, (BATCH, 1)) + steps.cumsum(axis=1)) % 32
    return F.cross_entropy(model(text[:, :-1]), text[:, 1:])


def run(model: GPT, mesh: DeviceMesh, steps: int, baseline: int, budget: int) -> None:
    """Train, and report memory and time."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak of what is resident counts from now
    resident = status("VmRSS")
    losses = train(model, mesh, steps)
    counted = max(over_ranks(mesh, status("VmData") - baseline))
    peak = max(over_ranks(mesh, status("VmHWM") - resident))
    say(mesh, f"per rank: {mb(counted)} count against the limit of {mb(budget)}")
    say(mesh, f"per rank: {mb(peak)} resident at most, mapped pages of files included")
    say(mesh, f"loss fell from {losses[0]:.4f} to {losses[-1]:.4f}")
    say(mesh, f"parameters: sha256 {digest(model, mesh)}")


def describe(model: GPT) -> str:
    """How many parameters, and what their states take."""
    count = sum(parameter.size for parameter in model.parameters())
    return f"{count / 1e6:.1f} M parameters; with gradients and optimizer state {mb(16 * count)}"


def digest(model: GPT, mesh: DeviceMesh) -> str:
    """A hash of all bytes of all parameters, in the order in which this number of ranks holds them."""
    own = hashlib.sha256()
    for parameter in model.parameters():
        own.update(parameter.shard)
        host.drop(parameter.shard)
    words = np.frombuffer(own.digest(), np.int64)
    return hashlib.sha256(np.array([over_ranks(mesh, word) for word in words])).hexdigest()[:16]


def over_ranks(mesh: DeviceMesh, value: float) -> np.ndarray:
    """Every rank's value. Collective."""
    values = np.zeros(mesh.size, np.asarray(value).dtype)
    values[mesh.rank] = value
    mesh.communicator("control").all_gather(values, stream=device.current().current_stream)
    return values


def settle() -> int:
    """Bytes of private writable memory of this process, which the limit counts; what is free goes first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status("VmData")


def status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().split("\n") if line.startswith(name))
    return 1024 * int(line.split()[1])


def say(mesh: DeviceMesh, text: str, file: object = None) -> None:
    """Print on one rank."""
    if mesh.rank == 0:
        print(text, file=file, flush=True)


def mb(nbytes: float) -> str:
    """In 10^6 bytes."""
    return f"{nbytes / 1e6:.1f} MB"


if __name__ == "__main__":
    main()
