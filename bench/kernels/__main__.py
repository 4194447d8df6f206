"""Times kernels, each pass next to PyTorch and the roofline of this machine, one thread each.

    python -m bench.kernels
    python -m bench.kernels --op attention,conv2d -o kernels.json
    python -m bench.kernels --device cuda --dtype bfloat16

Exit code 1 where a result of ours was wrong, 2 for options that make no sense. docs/howto/benchmarks.md has
the columns.
"""

import shardrt  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import os
import sys

from threadpoolctl import threadpool_limits

from shardrt import device as devices
from shardrt.train.errors import USAGE, one_line

from ..harness import environment
from ..harness.table import Output
from . import report
from .case import Maker
from .measure import Judge, keep_freed_memory
from .ops import OPS
from .options import parse

SIDE = 2048  # of the product that is the ceiling; less where rows of products are fewer


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    with one_line(USAGE):
        options = parse(arguments)
        if options.output is not None:
            options.output.touch()  # now, not after the measurement
    devices.set_current(devices.get(options.device))
    if options.device == "cpu":
        keep_freed_memory()
        shardrt.set_threads(1)
    with threadpool_limits(1):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    import torch

    torch.set_num_threads(1)
    judge = Judge(options.dtype, options.rounds, torch)
    ceilings = judge.ceilings(options.elements, min(SIDE, options.multiplied))
    facts = environment.facts(options.given) | {
        "torch": torch.__version__,
        "load average": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "copy": f"{ceilings.copied / 1e9:.2f} GB/s, read and written",
        "product": f"{ceilings.multiplied / 1e9:.1f} GFLOP/s, {options.dtype}",
    }
    output = Output(options, facts, report.HEAD)
    make = Maker(options.sizes, options.dtype)
    for case in (case for name in options.op for case in OPS[name](make)):
        line = judge.line(case, ceilings)
        output.add(line, report.text(line))
    output.facts["load average, after"] = " ".join(f"{load:.1f}" for load in os.getloadavg())
    verdict = report.verdict(output.lines)
    output.say(verdict)
    output.close(verdict=verdict.strip("# "))
    return int(any("ours" in line["wrong"] for line in output.lines))


if __name__ == "__main__":
    sys.exit(main())
