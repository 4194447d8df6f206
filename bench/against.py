"""Whether a change of the code changed the time of a step: runs bench.step here and at another commit.

The runs alternate. Prints a ratio per round of two runs, then median and range over rounds: of the fastest
step, the median step, and processor time, which says more than the clock if others use the cores.

    python -m bench.against 5ce4055 --size small --rounds 6 --steps 8
"""

import json
import statistics
import sys

from . import ranks
from . import workload as w
from .bits import ROOT, other_tree
from .harness.command_line import Parser
from .peers.launch import one_thread

FIGURES = {
    "fastest step": lambda message: min(message["step_ms"]),
    "median step": lambda message: message["step_ms_median"],
    "processor": lambda message: message["processor_ms"],
}


def main() -> None:
    """Time this tree against another commit, alternating, and print the ratio."""
    parser = Parser(prog="python -m bench.against", description="Times a step here and at another commit.")
    parser.add_argument("commit", metavar="COMMIT")
    w.add_shape(parser)
    parser.add_argument("--steps", type=w.positive, default=8, metavar="N", help="timed steps per run (8)")
    parser.add_argument("--ranks", type=w.positive, default=2, metavar="N", help="ranks of one thread (2)")
    parser.add_argument("--rounds", type=w.positive, default=6, metavar="R", help="of a run each (6)")
    with ranks.refusal():
        options = parser.parse_args()
        workload = w.workload_of(options)
        words = ["-m", "bench.step", *workload.arguments(), "--json"]
        words += ["--steps", str(options.steps), "--warmup", "2"]
        with other_tree(options.commit) as other:
            found = [
                [step(tree, words, options.ranks) for tree in (ROOT, other)] for _ in range(options.rounds)
            ]
    print(f"{workload}; {options.ranks} ranks; {options.rounds} rounds of {options.steps} steps")
    for name, figure in FIGURES.items():
        here, there = zip(*(map(figure, pair) for pair in found), strict=True)
        ratios = [a / b for a, b in zip(here, there, strict=True)]
        print(
            f"{name:<13} {statistics.median(here):9.2f} ms here, {statistics.median(there):9.2f} ms at "
            f"{options.commit}; ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to "
            f"{max(ratios):.3f}), of the least {min(here) / min(there):.3f}"
        )


def step(tree, words: list[str], count: int) -> dict:
    """The figures of one run of the code of `tree`."""
    environment = one_thread() | {"PYTHONPATH": str(tree)}
    figures = json.loads(ranks.mpirun(["-P", *words], count, environment).splitlines()[-1])
    print(f"{tree.name:<8} {min(figures['step_ms']):9.2f} {figures['processor_ms']:9.2f}", file=sys.stderr)
    return figures


if __name__ == "__main__":
    main()
