"""Times a mixture of experts on several ranks, by turns with PyTorch's, and with all experts on each rank.

Both in one run and in the same processes, from the same weights and tokens; outputs and all gradients are
compared before anything is timed. PyTorch's is bench/peers/torch_moe.py on gloo, in two ways, of which each
line takes the faster.

layer: router, dispatch, all_to_all of counts and rows, products, and back; forward and backward. products:
those of the experts' first layer alone. replicated: a training step of a small Llama whose experts are spread
over the ranks, beside the same with all experts on each: the ratio is the first over the second.

Routing is "balanced", or "skewed": about 90 % of the rows go to the last rank, most of them to its first
expert. Times are of the last rank that is done; processor time is that of all ranks.

    python -m bench.experts --ranks 2
"""

import shardrt  # noqa: F401  isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.beside_gloo import joined, over_ranks
from bench.command_line import Parser, add_forms, check_known, words
from bench.environment import write_result
from bench.quiet import DISTURBED
from bench.table import as_csv
from models.llama import Llama, LlamaConfig
from shardrt import Tensor, autograd, device, nn, optim
from shardrt import functional as F
from shardrt.comm import DeviceMesh, init_device_mesh, world
from shardrt.fsdp import fully_shard, set_gradient_divide_factor
from shardrt.parallel import ExpertParallel, most_rows, parallelize_module
from shardrt.train.errors import USAGE, one_line

KINDS = ("layer", "products", "replicated")
ROUTINGS = ("balanced", "skewed")
CLOSE = 2e-5  # of the largest number of a result
_TILT = 0.75  # how much more the last rank's experts get of every token, in deviations of a logit
_BALANCE = 0.01


@dataclass(frozen=True)
class Size:
    """tokens: of a rank. hidden: inside of an expert. k: experts of a token, of `experts`."""

    tokens: int
    width: int
    hidden: int
    experts: int
    k: int


SIZES = {
    "recipe": Size(1024, 192, 256, 8, 2),  # models/configs/moe-small.toml
    "few": Size(1024, 512, 1024, 8, 2),  # as Mixtral has them, an eighth as wide
    "many": Size(1024, 512, 256, 64, 8),  # as OLMoE has them, a quarter as wide
    "tiny": Size(32, 64, 16, 4, 2),  # to see that it runs
}


@dataclass(frozen=True)
class Contestant:
    """call: what is timed; clear: what comes behind it, untimed. results: what the call made, by name."""

    name: str
    call: Callable[[], Any]
    clear: Callable[[], Any]
    results: Callable[[], dict[str, np.ndarray]]


def arguments() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.experts", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="start so many (2)")
    parser.add_argument("--kinds", type=words, default=[*KINDS], metavar="NAME,...", help=", ".join(KINDS))
    parser.add_argument(
        "--sizes", type=words, default=[*SIZES][:3], metavar="NAME,...", help=", ".join(SIZES)
    )
    parser.add_argument("--routings", type=words, default=[*ROUTINGS], metavar="NAME,...")
    parser.add_argument("--rounds", type=int, default=11, metavar="N", help="of each, by turns (11)")
    parser.add_argument(
        "--patience", type=float, default=60, metavar="SECONDS", help="for an idle machine (60)"
    )
    add_forms(parser)
    return parser


def main() -> None:
    with one_line(USAGE):
        options = arguments().parse_args()
        for name, known in (("kinds", KINDS), ("sizes", SIZES), ("routings", ROUTINGS)):
            check_known(f"--{name}", getattr(options, name), known)
        if min(options.ranks, options.rounds) < 1:
            raise ValueError("--ranks and --rounds must be positive")
        uneven = [name for name in options.sizes if SIZES[name].experts % options.ranks]
        if uneven:
            raise ValueError(f"--ranks {options.ranks} does not divide the experts of {', '.join(uneven)}")
    result = over_ranks("bench.experts", options, lambda: list(measured(options)))
    if result is not None:
        show(result, options)


def measured(options: argparse.Namespace) -> Iterator[dict]:
    """The figures of each case on rank 0, nothing elsewhere. Collective."""
    mesh = init_device_mesh("cpu", (world.current().size,), ("dp_shard",))
    device.get("cpu").warm_up()
    theirs = joined(mesh.communicator("control"))
    for about, contestants, more in cases(options, mesh):
        found = compared(contestants, mesh, options.rounds)
        if mesh.rank == 0:
            yield about | found | more()
    theirs.destroy_process_group()


def cases(
    options: argparse.Namespace, mesh: DeviceMesh
) -> Iterator[tuple[dict, list[Contestant], Callable[[], dict]]]:
    """What a case is, who takes part, and what else is known at its end."""
    for kind in options.kinds:
        for size in options.sizes:
            for routing in options.routings if kind != "replicated" else ["balanced"]:
                about = {"kind": kind, "size": size, "routing": routing}
                made = {"layer": layers, "products": products, "replicated": replicated}[kind]
                yield from made(about, SIZES[size], mesh)


# The layer


def layers(about: dict, size: Size, mesh: DeviceMesh) -> Iterator[tuple]:
    """Forward and backward of the whole layer."""
    given = Given(size, about["routing"], mesh)
    layer, ours = layer_of(given, mesh)
    contestants = [ours, *(their_layer(given, way) for way in _ways())]
    yield about, contestants, lambda: {"most_rows": round(most_rows(layer)["experts"], 3)}


class Given:
    """Weights that all ranks draw alike, and this rank's tokens."""

    def __init__(self, size: Size, routing: str, mesh: DeviceMesh) -> None:
        self.size, self.ranks = size, mesh.size
        draw, own = np.random.default_rng(0), np.random.default_rng(1 + mesh.rank)
        scale = size.width**-0.5
        self.router = draw.standard_normal((size.experts, size.width), np.float32) * np.float32(scale)
        self.up = _even(draw, scale, size.experts, 2 * size.hidden, size.width)
        self.down = _even(draw, size.hidden**-0.5, size.experts, size.width, size.hidden)
        self.x, self.dy = own.standard_normal((2, size.tokens, size.width), np.float32)
        self.x[:, 0] = 1  # what a router has there is added to every token's logits
        self.router[:, 0] = 0
        if routing == "skewed":
            self.router[-(size.experts // mesh.size) :, 0] = 2 * _TILT
            self.router[-(size.experts // mesh.size), 0] = 4 * _TILT
        each = size.experts // mesh.size
        self.own = slice(mesh.rank * each, (mesh.rank + 1) * each)


def _even(draw: np.random.Generator, bound: float, *shape: int) -> np.ndarray:
    return ((2 * draw.random(shape, np.float32) - 1) * bound).astype(np.float32)


def layer_of(given: Given, mesh: DeviceMesh) -> tuple[nn.MoE, Contestant]:
    """Ours, and a call of forward and backward."""
    size, fold = given.size, mesh.fold("ep", mesh.size, over=("dp_shard",))
    router = nn.TopKRouter(size.width, size.experts, size.k)
    layer = nn.MoE(router, nn.Experts(size.experts, size.width, size.hidden))
    parallelize_module(layer, fold["ep"], {"experts": ExpertParallel()})
    fully_shard(layer.experts, mesh=fold["efsdp"])
    fully_shard(layer, mesh=mesh, strategy="NO_SHARD")
    set_gradient_divide_factor(layer, 1)  # sums over the ranks, as PyTorch's
    layer.load_state_dict({"router.weight": given.router, "experts.up": given.up, "experts.down": given.down})
    one, state = np.array(_BALANCE, np.float32), {}

    def call() -> None:
        state["x"] = x = Tensor(given.x, requires_grad=True)
        y, loss = layer(x)
        state["y"] = y.data
        autograd.backward([y, loss], [given.dy, one])

    def results() -> dict[str, np.ndarray]:
        parameters = {"up": layer.experts.up, "down": layer.experts.down, "router": layer.router.weight}
        found = {f"gradient of {name}": parameter.grad for name, parameter in parameters.items()}
        return {"output": state["y"], "gradient of x": state["x"].grad, **found}

    return layer, Contestant("shardrt", call, layer.zero_grad, results)


def their_layer(given: Given, way: str) -> Contestant:
    """PyTorch's."""
    import torch

    from bench.peers import torch_moe

    weights = [
        torch.from_numpy(array) for array in (given.router, given.up[given.own], given.down[given.own])
    ]
    layer = torch_moe.MoE(*weights, given.size.k, way)
    x, dy = torch.from_numpy(given.x).requires_grad_(), torch.from_numpy(given.dy)
    one, state = torch.tensor(_BALANCE), {}

    def call() -> None:
        x.grad = None
        y, loss = layer(x)
        state["y"] = y.detach()
        torch.autograd.backward([y, loss], [dy, one])
        layer.sum_router_gradient()

    def results() -> dict[str, np.ndarray]:
        own = {"up": layer.experts.up.gradient(), "down": layer.experts.down.gradient()}
        own["router"] = layer.router.grad
        found = {f"gradient of {name}": gradient.numpy() for name, gradient in own.items()}
        return {"output": state["y"].numpy(), "gradient of x": x.grad.numpy(), **found}

    return Contestant(f"PyTorch, {way}", call, layer.zero_grad, results)


# Products alone


def products(about: dict, size: Size, mesh: DeviceMesh) -> Iterator[tuple]:
    """Forward, then backward, of the experts' first layer: the rows that come to this rank, if all do."""
    given = Given(size, about["routing"], mesh)
    rows = size.tokens * size.k
    counts = _counts(rows, size.experts // mesh.size, about["routing"])
    draw = np.random.default_rng(mesh.rank)
    x = draw.standard_normal((rows, size.width), np.float32)
    dy = draw.standard_normal((rows, 2 * size.hidden), np.float32)
    weight = given.up[given.own]
    for which, backward in (("forward", False), ("backward", True)):
        contestants = [product_of(x, weight, dy, counts, backward)]
        contestants += [their_product(x, weight, dy, counts, way, backward) for way in _ways()]
        yield about | {"which": which}, contestants, dict


def _counts(rows: int, experts: int, routing: str) -> list[int]:
    """Even, or half of the rows for the first expert."""
    first = rows // 2 if routing == "skewed" and experts > 1 else rows // experts
    edges = np.linspace(first, rows, experts).astype(int)
    return [first, *np.diff(edges).tolist()]


def product_of(
    x: np.ndarray, weight: np.ndarray, dy: np.ndarray, counts: list[int], backward: bool
) -> Contestant:
    leaves = Tensor(x, requires_grad=True), Tensor(weight, requires_grad=True)
    return _product(
        "shardrt",
        lambda: F.grouped_linear(*leaves, counts),
        lambda y: autograd.backward([y], [dy]),
        lambda y: y.data,
        lambda: (leaves[0].grad, leaves[1].grad),
        lambda: [setattr(leaf, "grad", None) for leaf in leaves],
        backward,
    )


def their_product(
    x: np.ndarray, weight: np.ndarray, dy: np.ndarray, counts: list[int], way: str, backward: bool
) -> Contestant:
    import torch

    from bench.peers import torch_moe

    layer, given = torch_moe.Grouped(torch.from_numpy(weight), way), torch.from_numpy(x).requires_grad_()
    upper = torch.from_numpy(dy)

    def clear() -> None:
        given.grad = None
        layer.zero_grad()

    return _product(
        f"PyTorch, {way}",
        lambda: layer(given, counts),
        lambda y: y.backward(upper),
        lambda y: y.detach().numpy(),
        lambda: (given.grad.numpy(), layer.gradient().numpy()),
        clear,
        backward,
    )


def _product(
    name: str,
    forward: Callable,
    gradients: Callable,
    value: Callable,
    found: Callable,
    clear: Callable,
    backward: bool,
) -> Contestant:
    """Forward is timed, or backward, for which a forward comes before each call, untimed."""
    made = [forward() if backward else None]

    def call() -> None:
        if backward:
            gradients(made[0])
        else:
            made[0] = forward()

    def results() -> dict[str, np.ndarray]:
        if not backward:
            return {"output": value(made[0])}
        dx, dweight = found()
        return {"gradient of x": dx, "gradient of the weights": dweight}

    def again() -> None:
        clear()
        made[0] = None
        if backward:
            made[0] = forward()

    return Contestant(name, call, again, results)


# Beside copies of all experts


def replicated(about: dict, size: Size, mesh: DeviceMesh) -> Iterator[tuple]:
    """Steps of a Llama of two blocks: experts on the ranks, and all on each, which sums their gradients."""
    contestants = [step_of(name, size, mesh) for name in ("spread", "replicated")]
    yield about, contestants, dict


def step_of(name: str, size: Size, mesh: DeviceMesh) -> Contestant:
    shardrt.manual_seed(0)
    time_ = min(128, size.tokens)
    config = LlamaConfig(
        n_layer=2,
        n_head=size.width // 64,
        n_kv_head=size.width // 64,
        n_embd=size.width,
        n_hidden=size.hidden,
        block_size=time_,
        vocab_size=256,
        experts=size.experts,
        experts_per_token=size.k,
        balance_loss=_BALANCE,
    )
    model = Llama(config)
    if name == "spread":
        fold = mesh.fold("ep", mesh.size, over=("dp_shard",))
        parallelize_module(model, fold["ep"], {"blocks.*.mlp.experts": ExpertParallel()})
        for block in model.blocks:
            fully_shard(block.mlp.experts, mesh=fold["efsdp"], strategy="NO_SHARD")
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, strategy="NO_SHARD")
    set_gradient_divide_factor(model, 1)  # as models.train
    optimizer = optim.AdamW(model.parameters(), lr=1e-5)
    tokens = np.random.default_rng(mesh.rank).integers(0, 256, (size.tokens // time_, time_ + 1))
    state: dict[str, float] = {}

    def call() -> None:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state["loss"] = loss.item()

    return Contestant(name, call, lambda: None, lambda: {"loss": np.array(state["loss"])})


# By turns


def _ways() -> tuple[str, ...]:
    from bench.peers.torch_moe import WAYS

    return WAYS


def compared(contestants: list[Contestant], mesh: DeviceMesh, rounds: int) -> dict:
    """Figures of the first contestant and of the faster of the others, which gave the same. Collective."""
    expected: dict[str, np.ndarray] = {}
    for each in contestants:
        each.call()
        found = each.results()
        for name, values in found.items():
            truth = expected.setdefault(name, values.copy())
            off = float(np.abs(values.reshape(truth.shape) - truth).max() / max(np.abs(truth).max(), 1e-30))
            if not off < CLOSE:
                raise RuntimeError(f"{each.name}: {name} is off by {off:.1e} on rank {mesh.rank}")
        each.clear()
    found = np.zeros((rounds + 1, len(contestants), 2))
    for number, place in np.ndindex(found.shape[:2]):
        turn = (number + place) % len(contestants)  # each comes first in its turn
        found[number, turn] = timed(contestants[turn], mesh)
    seconds, used = found[1:, :, 0], found[1:, :, 1]  # (rounds, contestants); the first is a warm-up
    peer = 1 + int(np.median(seconds[:, 1:], axis=0).argmin())
    ms = (1e3 * np.median(seconds, axis=0)).round(3).tolist()
    quarter, ratio, most = np.percentile(seconds[:, 0] / seconds[:, peer], (25, 50, 75)).round(3).tolist()
    return {
        "ms": ms[0],
        "peer": contestants[peer].name,
        "peer_ms": ms[peer],
        "ratio": ratio,
        "quartiles": [quarter, most],
        "processor_ratio": round(float(np.median(used[:, 0] / used[:, peer])), 3),
        "others_ms": {each.name: ms[i] for i, each in enumerate(contestants) if i not in (0, peer)},
    }


def timed(contestant: Contestant, mesh: DeviceMesh) -> tuple[float, float]:
    """(seconds of a call, from a start that ranks share to the last's end; their processor time)."""
    control, stream = mesh.communicator("control"), device.current().current_stream
    control.barrier(stream=stream)
    stream.synchronize()
    start, used = time.perf_counter(), time.process_time()
    contestant.call()
    seconds = np.array([time.perf_counter() - start])
    used = np.array([time.process_time() - used])
    contestant.clear()
    control.all_reduce(seconds, op="max", stream=stream)
    control.all_reduce(used, stream=stream)
    stream.synchronize()
    return float(seconds[0]), float(used[0])


def show(result: dict, options: argparse.Namespace) -> None:
    rows = result["rows"]
    if options.json:
        print(json.dumps(result))
    elif options.csv:
        print(as_csv([*rows[0], "which", "most_rows"], rows))
    else:
        print(f"{'':<34}{'ms':>10}{'other':>10}{'ratio':>8}{'processor':>11}")
        for row in rows:
            name = ", ".join(row[key] for key in ("kind", "which", "size", "routing") if key in row)
            times = f"{row['ms']:>10}{row['peer_ms']:>10}{row['ratio']:>8}{row['processor_ratio']:>11}"
            print(f"{name:<34}{times}  {row['peer']}")
        if result["other_load"] > DISTURBED:
            print(f"others used {result['other_load']:.1f} cores meanwhile")
    if options.output is not None:
        write_result(options.output, result)


if __name__ == "__main__":
    main()
