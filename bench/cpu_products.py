"""Rates of products on the CPU: BLAS, oneDNN and PyTorch, in float32 and bfloat16, on all ranks at once.

The three products of a linear layer, of each shape rows x inputs x outputs: forward, gradient of the input,
and of the weight, which is added to what is there (PyTorch's is written). Each is checked against float64.

    python -m bench.cpu_products
    mpirun -n 2 python -m bench.cpu_products -o products.json
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import figures as f
from bench.command_line import Parser
from bench.compare import installed
from bench.training import gathered
from shardrt.comm import init_device_mesh
from shardrt.kernels import cpu as K
from shardrt.kernels import onednn
from shardrt.kernels.cpu.matmul import _by_blas, _by_onednn, blas_told, widened

Array = Any
Contestant = tuple[str, Callable[[], None], Callable[[], Array], Array]

SHAPES = ("2048x384x1152", "2048x384x1536", "2048x1536x384", "512x768x3072", "2048x768x3072", "512x768x50304")
KINDS = ("forward", "input", "weight")
LIMIT = 1e-2  # of the largest value: results of PyTorch's bfloat16 are rounded to it


def arguments() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.cpu_products", description="Rates of matrix products on the CPU.")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="rows x inputs x outputs, with commas")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each product of each library (0.3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the JSON object there, too")
    return parser


def main() -> None:
    options = arguments().parse_args()
    mesh, rows = init_device_mesh("cpu"), []
    for shape in options.shapes.split(","):
        sizes = tuple(map(int, shape.split("x")))
        for kind in KINDS:
            rates = {}
            for name, work, result, exact in contestants(kind, sizes):
                work()  # what is added to is 0 before
                error = float(np.abs(result() - exact).max() / np.abs(exact).max())
                if not error < LIMIT:
                    raise RuntimeError(f"{name}, {kind} of {shape}: off by {error:.1e} of the largest value")
                gathered([0.0], mesh)  # all ranks begin together
                rates[name] = 2e-9 * sizes[0] * sizes[1] * sizes[2] / seconds(work, options.seconds)
            mean = gathered(rates.values(), mesh).mean(0).round(1).tolist()
            rows.append({"shape": shape, "product": kind, "gflops": dict(zip(rates, mean, strict=True))})
    if mesh.rank == 0:
        library = onednn.library()
        versions = {"blas": blas_told(), "onednn": "" if library is None else library.version}
        f.show({"products": rows, "ranks": mesh.size, "libraries": versions}, table(rows), options)


def contestants(kind: str, sizes: tuple[int, int, int]) -> Iterator[Contestant]:
    """(name, what computes the product, what gives it then, the exact one) of each library and type."""
    random, shapes = np.random.default_rng(0), of(kind, sizes)
    given = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    low = [np.empty(x.shape, np.uint16) for x in given]
    for x, y in zip(given, low, strict=True):
        K.cast.pack(x.reshape(-1), y.reshape(-1), "bfloat16")
    turned = {"forward": (False, True), "input": (False, False), "weight": (True, False)}[kind]
    for name, arrays in (("float32", given), ("bfloat16", low)):
        a, b = (x.T if t else x for x, t in zip(arrays, turned, strict=True))
        numbers = [widened(x) if name == "bfloat16" else x for x in (a, b)]
        exact = numbers[0].astype(np.float64) @ numbers[1]
        out = np.zeros(exact.shape, np.float32)
        ways = {"BLAS": _by_blas} if name == "float32" else {}
        if onednn.library() is not None:
            ways["oneDNN"] = _by_onednn
        for library, way in ways.items():
            out.fill(0)
            work = partial(way, a, b, None, out, kind == "weight")
            yield f"{library} {name}", work, lambda out=out: out, exact
        if installed("torch"):
            yield f"PyTorch {name}", *of_torch(numbers, name), exact


def of(kind: str, sizes: tuple[int, int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the two operands, as they lie."""
    rows, inputs, outputs = sizes
    x, weight, y = (rows, inputs), (outputs, inputs), (rows, outputs)
    return {"forward": (x, weight), "input": (y, weight), "weight": (y, x)}[kind]


def of_torch(numbers: list[Array], name: str) -> tuple[Callable[[], None], Callable[[], Array]]:
    """The same in PyTorch: what comes out of bfloat16 is bfloat16."""
    import torch

    torch.set_num_threads(K.threads())
    a, b = (torch.from_numpy(x).to(getattr(torch, name)) for x in numbers)
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
    return lambda: torch.mm(a, b, out=out), lambda: out.float().numpy()


def seconds(work: Callable[[], None], limit: float) -> float:
    """The median of as many calls as fit, three at least."""
    times, end = [], time.perf_counter() + limit
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def table(rows: list[dict]) -> list[str]:
    """The rates for a reader."""
    names = list(rows[0]["gflops"])
    told = [f"{'GFLOP/s':<16}{'product':<9}" + "".join(f"{name:>18}" for name in names)]
    told += [
        f"{row['shape']:<16}{row['product']:<9}" + "".join(f"{row['gflops'][name]:18.0f}" for name in names)
        for row in rows
    ]
    return told


if __name__ == "__main__":
    main()
