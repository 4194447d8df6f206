"""Times Muon's step next to AdamW's, and next to the sum of its parts, alternating in one process and thread.

    export NUMBA_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
    python -m bench.muon --config models/configs/default.toml

The parts: a full matmul for each of Newton-Schulz's (kernels.matmul.matmul, so none is spared for symmetry),
AdamW's step for the parameters that it updates, and a copy of as many bytes as the elementwise passes move.
The last line is one JSON object. docs/reference/results.md has results.
"""

import shardrt  # noqa: F401  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import json
import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from time import thread_time

import numpy as np

from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from shardrt import device, nn, optim
from shardrt.optim.muon import newton_schulz

from . import workload as w
from .harness.command_line import Parser

Shape = tuple[int, int]
# Bytes of float32 that pass per element of a matrix: direction 16, in 8, norm 12, scale 8, out 8, apply 12.
PASSES = 64
GRAM_PASSES = 12  # per element of the square matrices and step


def model_of(path: Path) -> nn.Module:
    """The model of a training configuration, with random weights and gradients."""
    recipe = tomllib.loads(path.read_text())
    make, config = (Llama, LlamaConfig) if recipe.get("architecture") == "llama" else (GPT, GPTConfig)
    model = make(config(**recipe["model"]))
    random = np.random.default_rng(0)
    for parameter in model.parameters():
        gradient, *_ = parameter._gradient_target()
        gradient[...] = random.standard_normal(parameter.shape, np.float32)
    return model


def matmuls_of(shape: Shape) -> Callable[[], None]:
    """Newton-Schulz's matmuls of one matrix, without the rest."""
    low, high = sorted(shape)
    random = np.random.default_rng(0)
    x, y = random.standard_normal((low, high), np.float32), np.empty((low, high), np.float32)
    gram, square = (np.empty((low, low), np.float32) for _ in range(2))
    matmul = device.get("cpu").kernels.matmul.matmul

    def run() -> None:
        for _ in range(newton_schulz.STEPS):
            matmul(x, x.T, gram)
            matmul(gram, gram, square)
            matmul(square, x, y)

    return run


def copy_of(nbytes: int) -> Callable[[], None]:
    """A copy that reads half of the bytes and writes the other half, 256 KiB at a time."""
    source, target = (np.zeros(1 << 15, np.float32) for _ in range(2))

    def run() -> None:
        for _ in range(nbytes // (2 * source.nbytes)):
            np.copyto(target, source)

    return run


def measure(path: Path, rounds: int) -> dict[str, float]:
    """Milliseconds of each step and part, which take turns: medians of `rounds` rounds; of ratios too."""
    model, other = model_of(path), model_of(path)
    muon, adamw = optim.Muon(groups := optim.muon_groups(model, 0.1)), optim.AdamW(other.parameters())
    shapes = Counter(parameter.shape for parameter in groups[0]["params"])
    rest = optim.AdamW([p for group in optim.muon_groups(model_of(path), 0.1)[1:] for p in group["params"]])
    sides = {shape: min(shape) ** 2 for shape in shapes}
    nbytes = sum(
        count * (PASSES * shape[0] * shape[1] + newton_schulz.STEPS * GRAM_PASSES * sides[shape])
        for shape, count in shapes.items()
    )
    matmuls = {shape: matmuls_of(shape) for shape in shapes}
    copy = copy_of(nbytes)

    def all_matmuls() -> None:
        for shape, count in shapes.items():
            for _ in range(count):
                matmuls[shape]()

    calls = {"muon": muon.step, "matmuls": all_matmuls, "adamw": adamw.step}
    calls |= {"others": rest.step, "passes": copy}
    rows = []
    for _ in range(rounds + 1):
        row = {name: _time(call) for name, call in calls.items()}
        row["formula"] = row["others"] + row["matmuls"] + row["passes"]
        rows.append(row | {"ratio": row["muon"] / row["formula"]})
    return {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}


def _time(call: Callable[[], None]) -> float:
    began = thread_time()
    call()
    return 1e3 * (thread_time() - began)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each configuration, and all as JSON."""
    parser = Parser(prog="python -m bench.muon", description="Times Muon's step next to AdamW's.")
    configs = [Path("models/configs") / name for name in ("default.toml", "gpt-small.toml")]
    parser.add_argument("--config", nargs="+", type=Path, default=configs, metavar="FILE")
    parser.add_argument("--rounds", type=w.positive, default=20, metavar="N", help="rounds (20)")
    options: argparse.Namespace = parser.parse_args(arguments)
    found = {}
    for path in options.config:
        found[path.stem] = measure(path, options.rounds)
        cells = ", ".join(f"{name} {value:.2f}" for name, value in found[path.stem].items())
        print(f"{path.stem}: {cells} (ms; ratio is muon over formula)", flush=True)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
