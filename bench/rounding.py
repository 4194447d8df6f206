"""How far gradients and losses in bfloat16 are from PyTorch's in float32, ours and PyTorch's own.

The same weights, one rank, several batches. A loss is one number, whose error is as often small by chance as
large; the errors of a parameter's gradient are as many as it has elements, so they say which of the two
computes more accurately.

    python -m bench.rounding --size llama-100m --batches 4
"""

import shardrt  # isort: skip  before NumPy: it sets the threads of BLAS

import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

import shardrt.checkpoint
from bench import workload as w
from bench.command_line import Parser
from bench.environment import facts, write_result
from bench.training import LOW, Training, loss_of
from shardrt.comm import init_device_mesh

STRATEGY = "FULL_SHARD"
Found = tuple[float, dict[str, np.ndarray]]  # a loss, and the gradients of parameters, by name


def ours(workload: w.Job, strategy: str, weights: Path, batch: tuple[np.ndarray, np.ndarray]) -> Found:
    """By shardrt."""
    model = Training(workload, init_device_mesh("cpu"), strategy).model
    shardrt.checkpoint.load(weights, model)
    loss = loss_of(model, *batch)
    loss.backward()
    return loss.item(), {name: np.asarray(each.grad).reshape(-1) for name, each in model.named_parameters()}


def theirs(workload: w.Job, low: bool, weights: Path, batch: tuple[np.ndarray, np.ndarray]) -> Found:
    """By PyTorch, whose FSDP2 computes with parameters and inputs in bfloat16 likewise."""
    import torch
    from safetensors.torch import load_model

    from bench.peers.torch_step import network

    torch.set_num_threads(1)
    model = network(workload)
    load_model(model, str(weights / "model.safetensors"))
    inputs, targets = map(torch.from_numpy, batch)
    if low:
        model = model.to(torch.bfloat16)
        inputs = inputs.to(torch.bfloat16) if inputs.is_floating_point() else inputs
    logits = model(inputs).flatten(0, -2).float()
    loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
    loss.backward()
    return loss.item(), {
        name: each.grad.float().numpy().reshape(-1) for name, each in model.named_parameters()
    }


def errors(found: Found, exact: Found) -> tuple[float, dict[str, float]]:
    """Of the loss, relative; of each gradient, the norm of the difference over that of the gradient."""
    (loss, gradients), (true, truths) = found, exact
    wide = {name: truth.astype(np.float64) for name, truth in truths.items()}
    return loss / true - 1, {
        name: float(np.linalg.norm(gradients[name] - truth) / np.linalg.norm(truth))
        for name, truth in wide.items()
    }


def measure(workload: w.Job, batches: int) -> dict:
    """For float32 and bfloat16, ours and PyTorch's: errors of losses, and of gradients over all batches."""
    who: dict[str, Callable[..., Found]] = {
        "exact": partial(theirs, workload, False),
        "shardrt float32": partial(ours, workload, STRATEGY),
        "shardrt bfloat16": partial(ours, workload, STRATEGY + LOW),
        "torch bfloat16": partial(theirs, workload, True),
    }
    seen: dict[str, list[tuple[float, dict[str, float]]]] = {name: [] for name in who}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        shardrt.checkpoint.save(folder, Training(workload, init_device_mesh("cpu"), STRATEGY).model)
        for number in range(batches):
            batch = workload.batch_of(number, 0)
            found = {name: compute(Path(folder), batch) for name, compute in who.items()}
            for name, each in found.items():
                seen[name].append(errors(each, found["exact"]))
    del seen["exact"]
    ratios = sorted(
        one / other
        for (_, mine), (_, their) in zip(seen["shardrt bfloat16"], seen["torch bfloat16"], strict=True)
        for one, other in zip(mine.values(), their.values(), strict=True)
    )
    return {
        "workload": workload.facts(),
        "losses": {name: [loss for loss, _ in each] for name, each in seen.items()},
        "gradients": {
            name: statistics.median(error for _, found in each for error in found.values())
            for name, each in seen.items()
        },
        "gradient_ratios": [ratios[0], statistics.median(ratios), ratios[-1]],
    }


def table(result: dict) -> str:
    """The figures for a reader."""
    lines = [f"{'':<18} {'gradients, median':>18}  losses, 1e-6 of their size"]
    for name, error in result["gradients"].items():
        losses = " ".join(f"{1e6 * loss:7.1f}" for loss in result["losses"][name])
        lines.append(f"{name:<18} {error:18.1e}  {losses}")
    low, middle, high = result["gradient_ratios"]
    told = f"{middle:.2f} ({low:.2f} to {high:.2f} over all parameters and batches)"
    return "\n".join([*lines, f"error of a gradient in bfloat16, ours over PyTorch's: {told}"])


def main() -> None:
    parser = Parser(prog="python -m bench.rounding", description=__doc__.splitlines()[0])
    w.add_shape(parser)
    parser.add_argument("--batches", type=w.positive, default=4, metavar="N", help="(4)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the figures there, as JSON")
    options = parser.parse_args()
    workload = w.workload_of(options)
    result = measure(workload, options.batches)
    print(f"{workload}\n{table(result)}")
    if options.output:
        write_result(options.output, facts(" ".join(["python", *sys.orig_argv[1:]])) | result)


if __name__ == "__main__":
    main()
