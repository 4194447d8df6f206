"""Small trainings, each a combination of features, and one hash of all that it computes; see bench/bits.py.

    python -P bench/bits_cases.py NAME ...           # on threads
    mpirun -n 2 python -P bench/bits_cases.py NAME ...

The shardrt that is on the path may be that of another commit, so this file imports nothing else of the
repository but `models`, and calls only what both have.
"""

import shardrt  # isort: skip  before NumPy: it sets the threads of BLAS

import hashlib
import sys
from contextlib import nullcontext
from dataclasses import dataclass, fields
from itertools import product

import numpy as np

import shardrt.checkpoint
from models.gpt import GPT, GPTConfig
from shardrt import Tensor, nn, optim
from shardrt import functional as F
from shardrt.activation_offload import offload_activations
from shardrt.comm import DeviceMesh, init_device_mesh, thread, world
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, no_sync, set_world_invariant
from shardrt.nn.utils import clip_grad_norm_
from shardrt.recompute import checkpoint

STEPS = 20
TOGETHER = 4  # micro-batches of a world-invariant step on all ranks

FLAT = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPT", "NO_SHARD")
HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP")
PRECISIONS = {
    "float32": None,
    "bf16": MixedPrecisionPolicy("bfloat16", output_dtype="float32"),
    "fp16": MixedPrecisionPolicy("float16", "float32", "float32", full_precision=(nn.LayerNorm,)),
}
OFFLOADS = ("resident", "offload", "host_update")
RECOMPUTATIONS = ("kept", "recompute", "recompute_but_matmul", "offload_activations")
BACKWARDS = ("one", "two", "no_sync", "invariant", "in_backward")  # see `Case`


@dataclass(frozen=True)
class Case:
    """One training.

    backward: one a step; two, each reducing; the first without reduction; in world-invariant mode; or one
    that updates. launch: how the ranks are started.
    """

    ranks: int
    strategy: str
    precision: str = "float32"
    offload: str = "resident"
    recomputation: str = "kept"
    backward: str = "one"
    net: str = "net"
    prefetch: int = 1
    optimizer: str = "adamw"
    launch: str = "threads"

    @property
    def name(self) -> str:
        """What differs from the defaults."""
        parts = [str(self.ranks), self.strategy]
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(value if isinstance(value, str) else f"{field.name}{value}")
        return "/".join(parts)

    @property
    def fits(self) -> bool:
        """Whether there is such a training."""
        if self.backward == "invariant" and (self.ranks == 3 or self.offload == "host_update"):
            return False
        return not (self.backward == "in_backward" and self.precision == "fp16")  # nothing left to unscale


def cases() -> dict[str, Case]:
    """By name. Of all combinations of five features every eleventh, so chosen that any two still meet."""
    found = []
    for ranks in (1, 2, 3, 4):
        strategies = FLAT if ranks % 2 else FLAT + HYBRID
        kinds = (strategies, tuple(PRECISIONS), OFFLOADS, RECOMPUTATIONS, BACKWARDS)
        for numbers in product(*(range(len(kind)) for kind in kinds)):
            if sum(factor * n for factor, n in zip((1, 2, 3, 1, 2), numbers, strict=True)) % 11 == 0:
                found.append(Case(ranks, *(kind[n] for kind, n in zip(kinds, numbers, strict=True))))
        for strategy in strategies:
            found += [Case(ranks, strategy, net=net) for net in ("gpt", "convolutions", "twice")]
            found += [Case(ranks, strategy, prefetch=0), Case(ranks, strategy, prefetch=2)]
            found.append(Case(ranks, strategy, optimizer="sgd"))
    for ranks in (2, 4):
        for strategy in ("FULL_SHARD", "SHARD_OPT", "HYBRID_SHARD"):
            found += [Case(ranks, strategy, p, net="gpt", launch="mpirun") for p in ("float32", "bf16")]
        found.append(Case(ranks, "FULL_SHARD", "bf16", "offload", backward="no_sync", launch="mpirun"))
        found.append(Case(ranks, "FULL_SHARD", net="convolutions", launch="mpirun"))
    return {case.name: case for case in found if case.fits}


# -- models


class Block(nn.Module):
    """Linear, GELU, linear, with odd widths so that nothing divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 13), nn.Linear(13, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Embedding, blocks, norm, and a head tied to the embedding; one block and one bias are frozen."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 7), nn.LayerNorm(7)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.order = order
        for parameter in (*self.blocks[1].parameters(), self.blocks[0].up.bias):
            parameter.requires_grad = False

    def forward(self, tokens: np.ndarray) -> Tensor:
        x = self.embed(tokens)
        for number in self.order:
            x = self.blocks[number](x)
        return F.linear(self.norm(x), self.embed.weight)


class Convolutions(nn.Module):
    """Two convolutions with batch norm over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, 5, 3, padding=1), nn.BatchNorm2d(5)) for channels in (1, 5)
        )
        self.head = nn.Linear(5, 11)

    def forward(self, tokens: np.ndarray) -> Tensor:
        x = Tensor(tokens[:, None, :, None].astype(np.float32))
        for block in self.blocks:
            x = F.relu(block(x))
        return self.head(F.permute(x, (0, 2, 3, 1)))


def made(case: Case, mesh: DeviceMesh) -> nn.Module:
    """The sharded model of a case."""
    shardrt.manual_seed(3)
    if case.net == "gpt":
        model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=12, block_size=5, vocab_size=11))
    elif case.net == "convolutions":
        model = nn.synchronise_batch_norm(Convolutions(), mesh)
    else:
        model = Net((0, 1, 0, 2) if case.net == "twice" else (0, 1, 2))
    settings = {"mesh": mesh, "strategy": case.strategy, "prefetch": case.prefetch}
    settings["mp_policy"] = PRECISIONS[case.precision]
    if case.offload != "resident":
        step = "host" if case.offload == "host_update" else "device"
        settings["offload_policy"] = CPUOffloadPolicy(gradients=case.backward != "invariant", step=step)
    for block in model.blocks:
        if case.recomputation.startswith("recompute"):
            checkpoint(block, "matmul" if "matmul" in case.recomputation else "full")
        elif case.recomputation == "offload_activations":
            offload_activations(block)
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


# -- training


def train(case: Case) -> list[tuple]:
    """(kind, name, first element, array) of what this rank knows of the result."""
    shape = (2, world.current().size // 2) if case.strategy in HYBRID else None
    mesh = init_device_mesh("auto", shape)
    model = made(case, mesh)
    micro_batches = 1 if case.backward in ("one", "in_backward") else 2
    if case.backward == "invariant":
        set_world_invariant(model, TOGETHER)
        micro_batches = TOGETHER // mesh.size
    how = {"in_backward": case.backward == "in_backward"}
    if case.optimizer == "sgd":
        optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9, **how)
    else:
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **how)
    # So large that the first steps overflow and are left out.
    scaler = optim.GradScaler(init_scale=2.0**20, backoff_factor=0.25, enabled=case.precision == "fp16")
    figures = []
    for step in range(STEPS):
        for number in range(micro_batches):
            waits = case.backward == "no_sync" and number < micro_batches - 1
            with no_sync(model) if waits else nullcontext():
                loss = loss_of(model, case, step, number * mesh.size + mesh.rank) * (1 / micro_batches)
                scaler.scale(loss).backward()
            figures.append(float(loss.item()))
        if case.backward != "in_backward":
            scaler.unscale_(optimizer)
            figures.append(clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    known = [("figures", "", mesh.rank, np.array(figures))]
    known += [("weight", name, 0, array) for name, array in shardrt.checkpoint.full_state_dict(model).items()]
    return known + optimizer_state(model, optimizer)


def loss_of(model: nn.Module, case: Case, step: int, number: int) -> Tensor:
    """Of micro-batch `number` of all ranks' of a step."""
    tokens, targets = np.random.default_rng((step, number)).integers(0, 11, (2, 3, 5))
    if case.net == "gpt":
        return model(tokens, targets)
    logits = model(tokens)
    return F.cross_entropy(logits if case.net != "convolutions" else F.reshape(logits, (3, 5, 11)), targets)


def optimizer_state(model: nn.Module, optimizer: optim.Optimizer) -> list[tuple]:
    """As `train`."""
    whole = shardrt.checkpoint.get_optimizer_state_dict(model, optimizer)
    return [
        (kind, name, 0, np.asarray(values))
        for name, entry in whole.get("state", {}).items()
        for kind, values in entry.items()
    ]


def digest(known: list[list[tuple]]) -> str:
    """One hash of what all ranks know."""
    whole: dict[tuple[str, str], list] = {}
    for kind, name, _, array in sorted((row for rank in known for row in rank), key=lambda row: row[:3]):
        whole.setdefault((kind, name), []).append(array)
    hashed = hashlib.sha256()
    for key, arrays in sorted(whole.items()):
        flat = np.concatenate([array.reshape(-1) for array in arrays])
        hashed.update(f"{key} {flat.dtype} {flat.size}".encode() + flat.tobytes())
    return hashed.hexdigest()[:16]


def main() -> None:
    """Train each case that is asked for, and print the hash of its weights."""
    shardrt.set_threads(1)
    chosen = [cases()[name] for name in sys.argv[1:]]
    for case in chosen:
        if case.launch == "threads":
            known = thread.run(case.ranks, train, case)
        else:
            from mpi4py import MPI

            known = MPI.COMM_WORLD.gather(train(case))
        if known is not None:
            print(case.name, digest(known), flush=True)


if __name__ == "__main__":
    main()
