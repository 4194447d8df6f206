"""Times kernels of the CPU beside PyTorch's, forward and both gradients, one thread each, in turns.

    python -m bench.kernels conv2d attention --json bench/results/kernels.json

A line per shape: ours and PyTorch's milliseconds, how much faster ours is, how far the results lie apart.
"""

import shardrt  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
from threadpoolctl import threadpool_limits

from shardrt import Tensor
from shardrt import functional as F
from shardrt.kernels import cpu

# batch, channels, outputs, window, stride, padding, groups, height and width
CONVOLUTIONS = {
    "ResNet-50 stem": (8, 3, 64, 7, 2, 3, 1, 224),
    "ResNet-50 stage 1, 3 x 3": (8, 64, 64, 3, 1, 1, 1, 56),
    "ResNet-50 stage 1, widen": (8, 64, 256, 1, 1, 0, 1, 56),
    "ResNet-50 stage 1, narrow": (8, 256, 64, 1, 1, 0, 1, 56),
    "ResNet-50 stage 2, stride": (8, 128, 128, 3, 2, 1, 1, 56),
    "ResNet-50 stage 2, shortcut": (8, 256, 512, 1, 2, 0, 1, 56),
    "ResNet-50 stage 2, 3 x 3": (8, 128, 128, 3, 1, 1, 1, 28),
    "ResNet-50 stage 3, 3 x 3": (8, 256, 256, 3, 1, 1, 1, 14),
    "ResNet-50 stage 3, narrow": (8, 1024, 256, 1, 1, 0, 1, 14),
    "ResNet-50 stage 4, 3 x 3": (8, 512, 512, 3, 1, 1, 1, 7),
    "RegNetY-16GF stage 1": (8, 224, 224, 3, 1, 1, 2, 56),
    "RegNetY-16GF stage 2": (8, 448, 448, 3, 1, 1, 4, 28),
    "RegNetY-3.2GF stage 2": (8, 216, 216, 3, 1, 1, 9, 28),
    "RegNetY-800MF stage 2": (8, 144, 144, 3, 1, 1, 9, 28),
    "RegNetY-800MF stage 4": (8, 784, 784, 3, 1, 1, 49, 7),
    "RegNetY-400MF stage 2": (8, 104, 104, 3, 1, 1, 13, 28),
    "depthwise": (8, 128, 128, 3, 1, 1, 128, 28),
    "depthwise, stride": (8, 144, 144, 3, 2, 1, 144, 56),
    "depthwise, 7 x 7": (8, 960, 960, 3, 1, 1, 960, 7),
}
# batch, heads, time, head_dim, causal
ATTENTIONS = {
    "small GPT": (8, 6, 256, 64, True),
    "GPT-2": (2, 12, 1024, 64, True),
    "ViT-B/16": (8, 12, 197, 64, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="+", choices=["conv2d", "attention"])
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="timed calls of each (9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    cpu.set_threads(1)
    rows = []
    with threadpool_limits(1):
        for kernel in arguments.kernels:
            for name, shape in (CONVOLUTIONS if kernel == "conv2d" else ATTENTIONS).items():
                ours, theirs = CONTESTANTS[kernel](shape)
                rows.append(
                    {"kernel": kernel, "name": name, "shape": shape} | race(ours, theirs, arguments.repeats)
                )
                print(LINE.format(**rows[-1]), flush=True)
    if arguments.json:
        versions = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": numba.__version__,
            "torch": torch.__version__,
            "shardrt": shardrt.__version__,
        }
        found = {"versions": versions, "repeats": arguments.repeats, "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


LINE = "{kernel:9} {name:28} {ours_ms:8.2f} ms  PyTorch {torch_ms:8.2f} ms  x{ratio:.2f}  off by {apart:.0e}"


def race(ours: Callable, theirs: Callable, repeats: int) -> dict:
    """Medians of calls in turns, their ratio, and the largest difference relative to the largest number.

    Either gives a list of arrays: the result and all gradients.
    """
    apart = max(
        float(np.abs(one - other).max() / np.abs(other).max())
        for one, other in zip(ours(), theirs(), strict=True)
    )
    seconds: tuple[list, list] = ([], [])
    for _ in range(repeats):
        for contestant, taken in zip((ours, theirs), seconds, strict=True):
            began = time.perf_counter()
            contestant()
            taken.append(time.perf_counter() - began)
    mine, other = (1e3 * statistics.median(taken) for taken in seconds)
    return {"ours_ms": mine, "torch_ms": other, "ratio": other / mine, "apart": apart}


def convolution(shape: tuple[int, ...]) -> tuple[Callable, Callable]:
    """(ours, PyTorch's)."""
    import torch

    batch, channels, outputs, window, stride, padding, groups, size = shape
    shapes = (batch, channels, size, size), (outputs, channels // groups, window, window)
    how = {"stride": stride, "padding": padding, "groups": groups}
    return contestants(
        shapes,
        lambda x, w: F.conv2d(x, w, **how),
        lambda x, w: torch.nn.functional.conv2d(x, w, **how),
    )


def attention(shape: tuple) -> tuple[Callable, Callable]:
    """(ours, PyTorch's)."""
    import torch

    *sizes, causal = shape
    return contestants(
        [tuple(sizes)] * 3,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal),
    )


CONTESTANTS = {"conv2d": convolution, "attention": attention}


def contestants(shapes: list, ours: Callable, theirs: Callable) -> tuple[Callable, Callable]:
    """Both as functions that run forward and backward on the same numbers."""
    import torch

    random = np.random.default_rng(0)
    arrays = [random.standard_normal(shape, np.float32) for shape in shapes]
    dy = random.standard_normal(ours(*arrays).shape, np.float32)
    their_dy = torch.from_numpy(dy)

    def run_ours() -> list[np.ndarray]:
        inputs = [Tensor(array, requires_grad=True) for array in arrays]
        y = ours(*inputs)
        y.backward(dy)
        return [y.data, *(tensor.grad for tensor in inputs)]

    def run_theirs() -> list[np.ndarray]:
        inputs = [torch.from_numpy(array).requires_grad_() for array in arrays]
        y = theirs(*inputs)
        y.backward(their_dy)
        return [y.detach().numpy(), *(tensor.grad.numpy() for tensor in inputs)]

    return run_ours, run_theirs


if __name__ == "__main__":
    main()
