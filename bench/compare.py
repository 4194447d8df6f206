"""Times shardrt next to PyTorch's FSDP2, FSDP1 and DDP in one run, alternating contestants: A B A B.

Every run is a set of fresh processes, one thread each, that start from the same weights and see the same
batches; so losses must agree, or a contestant gets no figures. Ratios are taken within a round. A peer
whose first step takes as long as HOPELESS of ours is left out. On the CPU; on a GPU: `python -m bench.gpu`.

    python -m bench.compare --size small --against fsdp2,fsdp1,ddp --repeats 3 --tcmalloc
    python -m bench.compare --strategy TP --against tp --beside FULL_SHARD,TP_SP
    python -m bench.compare --strategy PP_1F1B --against pp-1f1b,pp-zb,pp-zbv --beside PP_ZBVZeroBubble
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path

from . import ranks
from . import workload as w
from .harness.command_line import Parser, words
from .harness.environment import facts, write_result
from .peers.launch import Alarm, launch, one_thread
from .peers.torch_step import STRATEGIES as PEERS
from .quiet import DISTURBED, announce, watched

TOLERANCE = 1e-5  # of the losses, relative, over all steps
# In bfloat16, where PyTorch's few steps happen to be near to its float32: the error of a loss, one number, is
# small by chance as often as not (bench/results/measurements.md, "How near bfloat16 is").
ROUNDING = 1e-4
HOPELESS = 20  # steps of ours: PyTorch's in bfloat16 takes 100 where a processor has no instructions for it
SET_UP = 5000.0  # ms that any first step may take, in which PyTorch sets up what it needs
EXACT, ROUNDED = "fsdp2", "fsdp2-bf16"  # whose losses say how far those in bfloat16 may be apart


@dataclass(frozen=True)
class Contestant:
    """A program that prints the figures of one run as its last line."""

    name: str
    module: str
    strategy: str
    preload: str = ""

    @property
    def low(self) -> bool:
        """Whether it computes in bfloat16."""
        return self.strategy.endswith("bf16")

    @property
    def equal_losses(self) -> int | None:
        """How many of its losses are those of the others; None: all."""
        return 1 if self.strategy == "NONE" else None  # trains on a rank's batches: equal until it updates

    def tolerance(self, first: "Contestant", rounding: float) -> float:
        """How far its losses may be from those of the first.

        rounding: how far PyTorch's in bfloat16 are from its own in float32; twice that, or twice ROUNDING,
        where one of the two computes in bfloat16: each may be as far to another side.
        """
        return 2 * max(rounding, ROUNDING) if self.low or first.low else TOLERANCE

    @property
    def ours(self) -> bool:
        """Whether it is shardrt."""
        return self.module == "bench.step"

    def run(self, arguments: list[str], count: int, first_step: float = 0.0) -> dict:
        """The figures of one run on so many ranks.

        first_step: ms that a peer's may take, 0: any. Raises Alarm where it takes more, RuntimeError where
        the run fails.
        """
        command = ["-m", self.module, *arguments, "--strategy", self.strategy, "--json"]
        command += [] if self.ours else ["--first-step", str(first_step)]
        environment = one_thread()
        if self.preload:
            environment["LD_PRELOAD"] = self.preload
        start = ranks.mpirun if self.ours else launch
        return json.loads(start(command, count, environment).splitlines()[-1])


def main() -> None:
    """Time all contestants, alternating, and print a table of the ratios."""
    with ranks.refusal():
        options = arguments().parse_args()
        workload = w.workload_of(options)
        if options.output and options.output.exists():
            raise ValueError(f"--output: {options.output} exists")
        if not installed("torch"):
            raise ValueError("PyTorch is not installed: pip install torch")
        contestants = entrants(options)
        rounds, left_out, rounding = compare(contestants, workload, options)
    result = summary(contestants, rounds, rounding, [*left_out.values()]) | facts(
        " ".join(["python -m bench.compare", *sys.argv[1:]])
    )
    print(json.dumps(result) if options.json else table(result, str(workload)))
    if options.output:
        write_result(options.output, result)
    if any("step_ms" not in each for each in result["contestants"]):
        raise SystemExit(1)


def arguments() -> argparse.ArgumentParser:
    """The options of python -m bench.compare."""
    parser = Parser(
        prog="python -m bench.compare", description="Times shardrt next to PyTorch, alternating, on the CPU."
    )
    w.add_shape(parser)
    w.add_micro_batches(parser)
    parser.add_argument("--device", type=w.cpu, default="cpu", help="cpu; on a GPU: python -m bench.gpu")
    known = ", ".join(_SHARDING)
    parser.add_argument(
        "--against", type=peers, default=["fsdp2"], metavar="PEER,...", help=f"of {known} (fsdp2)"
    )
    parser.add_argument("--ranks", type=w.positive, default=2, metavar="N", help="ranks of one thread (2)")
    parser.add_argument("--repeats", type=w.positive, default=3, metavar="R", help="rounds (3)")
    parser.add_argument("--steps", type=w.positive, default=8, metavar="N", help="timed steps per run (8)")
    parser.add_argument("--strategy", default="FULL_SHARD", help="shardrt's (FULL_SHARD)")
    parser.add_argument(
        "--tcmalloc", nargs="?", const="", metavar="LIBRARY", help="PyTorch under tcmalloc as well"
    )
    parser.add_argument(
        "--beside", type=words, default=[], metavar="STRATEGY,...", help="more of shardrt's strategies"
    )
    parser.add_argument("--unsharded", action="store_true", help="shardrt unsharded as well, same threads")
    parser.add_argument(
        "--patience",
        type=float,
        default=60,
        metavar="SECONDS",
        help="per run, to wait for an idle machine and repeat what others disturbed (60)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON object to FILE as well")
    return parser


_SHARDING = tuple(name for name in PEERS if name != "single")


def installed(package: str) -> bool:
    """Whether a package can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # sys.modules says that it is not to be found
        return False


def peers(text: str) -> list[str]:
    """An argparse type: PyTorch's strategies by name, with commas."""
    names = text.split(",")
    for name in names:
        if name not in _SHARDING:
            raise argparse.ArgumentTypeError(f"unknown peer {name!r}; known are {', '.join(_SHARDING)}")
    return names


def entrants(options: argparse.Namespace) -> list[Contestant]:
    """The contestants; shardrt is first. Raises ValueError where tcmalloc is asked for and not found."""
    found = [Contestant(f"shardrt {options.strategy}", "bench.step", options.strategy)]
    preloads = [""]
    if options.tcmalloc is not None:
        library = options.tcmalloc or find_library("tcmalloc_minimal") or find_library("tcmalloc")
        if not library:
            raise ValueError("--tcmalloc: not found; install libtcmalloc-minimal4 or name the library's file")
        preloads.append(library)
    for peer in options.against:
        for preload in preloads:
            name = f"torch {PEERS[peer]}{' tcmalloc' if preload else ''}"
            found.append(Contestant(name, "bench.peers.torch_step", peer, preload))
    found += [Contestant(f"shardrt {name}", "bench.step", name) for name in options.beside]
    if options.unsharded:
        found.append(Contestant("shardrt unsharded", "bench.step", "NONE"))
    return found


def compare(
    contestants: list[Contestant], workload: w.Job, options: argparse.Namespace
) -> tuple[list[list[dict]], dict[Contestant, dict], float]:
    """As `rounds_of`; and how far PyTorch's losses in bfloat16 are from those in float32."""
    with tempfile.TemporaryDirectory(prefix="bench-") as weights:
        common = [*workload.arguments(), "--weights", weights, "--micro-batches", str(options.micro_batches)]
        ranks.mpirun(["-m", "bench.step", *workload.arguments(), "--save", weights], 1)
        # Once untimed: compiles what is not in the caches yet.
        contestants[0].run([*common, "--steps", "1", "--warmup", "0"], options.ranks)
        arguments = [*common, "--steps", str(options.steps), "--warmup", "2"]

        def run(contestant: Contestant, first_step: float) -> dict:
            return contestant.run(arguments, options.ranks, first_step)

        announce(options.repeats * len(contestants), options.patience)
        rounds, left_out = rounds_of(
            contestants, options.repeats, lambda *each: watched(lambda: run(*each), options.patience)
        )
        return rounds, left_out, rounding_of(contestants, rounds[0], left_out, run)


def rounds_of(
    contestants: list[Contestant], repeats: int, run: Callable[[Contestant, float], dict]
) -> tuple[list[list[dict]], dict[Contestant, dict]]:
    """The figures by round and contestant, printed on stderr as they come; and which were left out, and why.

    contestants: loses those whose first step in the first round takes too long beside a step of the first.
    run: gives the figures of one run, whose first step may take so many ms. Raises Alarm, RuntimeError.
    """
    rounds: list[list[dict]] = []
    left_out: dict[Contestant, dict] = {}
    for number in range(1, repeats + 1):
        rounds.append([])
        for contestant in [*contestants]:
            limit = longest_step(rounds[-1][0]) if number == 1 and rounds[-1] else 0.0
            try:
                rounds[-1].append(run(contestant, limit))
            except Alarm:
                contestants.remove(contestant)
                ratio = limit / rounds[-1][0]["step_ms_median"]
                left_out[contestant] = {"contestant": contestant.name, "first_step_ms": limit, "ratio": ratio}
                message = reason(left_out[contestant])
            else:
                message = progress(contestant, rounds[-1][-1], rounds[-1][0])
            print(f"round {number} of {repeats}: {contestant.name}: {message}", file=sys.stderr, flush=True)
    return rounds, left_out


def longest_step(first: dict) -> float:
    """Milliseconds that a peer's first step may take, next to such a run of the first contestant."""
    return max(HOPELESS * first["step_ms_median"], SET_UP)


def progress(contestant: Contestant, run: dict, first: dict) -> str:
    """One run's time, beside that of the first contestant in the same round, whose losses it must have."""
    message = f"{run['step_ms_median']:.1f} ms per step"
    if run is first:
        return message
    ratio = run["step_ms_median"] / first["step_ms_median"]
    off = difference(first["losses"], run["losses"], contestant.equal_losses)
    return f"{message}, {ratio:.2f} times the first's; losses differ by {off:.1e}"


def reason(left_out: dict) -> str:
    """What is said of a contestant that is left out."""
    took = f"left out: its first step takes more than {left_out['first_step_ms']:.0f} ms"
    return f"{took}, {left_out['ratio']:.0f} times a step of the first"


def rounding_of(
    contestants: list[Contestant],
    runs: list[dict],
    left_out: Iterable[Contestant],
    run: Callable[[Contestant, float], dict],
) -> float:
    """How far PyTorch's losses in bfloat16 are from its own in float32, over the same steps.

    0 where all compute in float32, or where PyTorch's bfloat16 is hopeless. Whose losses are not among these
    runs is run once more, untimed.
    """
    if not any(contestant.low for contestant in contestants) or ROUNDED in {c.strategy for c in left_out}:
        return 0.0
    losses = {c.strategy: message["losses"] for c, message in zip(contestants, runs, strict=True)}
    try:
        for peer in {EXACT, ROUNDED} - losses.keys():
            missing = Contestant(peer, "bench.peers.torch_step", peer)
            losses[peer] = run(missing, longest_step(runs[0]))["losses"]
    except Alarm:
        return 0.0
    return difference(losses[EXACT], losses[ROUNDED])


def summary(
    contestants: list[Contestant],
    rounds: list[list[dict]],
    rounding: float = 0.0,
    left_out: Sequence[dict] = (),
) -> dict:
    """Medians over rounds; how much faster the first is than each, round by round. See `entry`."""
    first = rounds[0][0]
    limits = [contestant.tolerance(contestants[0], rounding) for contestant in contestants]
    return {
        "contestants": [
            entry(contestant, [each[at] for each in rounds], [each[0] for each in rounds], limits[at])
            for at, contestant in enumerate(contestants)
        ],
        "left_out": list(left_out),
        "workload": first["workload"],
        "ranks": first["world_size"],
        "parameters": first["parameters"],
        "repeats": len(rounds),
        "load_average": list(os.getloadavg()),
    }


def entry(contestant: Contestant, runs: list[dict], firsts: list[dict], limit: float) -> dict:
    """One contestant's figures; where its losses are further than `limit` from the first's, only how far."""
    off = max(difference(firsts[0]["losses"], run["losses"], contestant.equal_losses) for run in runs)
    result = {
        "contestant": contestant.name,
        "loss_difference": off,
        "loss_tolerance": limit,
        "settings": runs[0]["settings"],
    }
    if off > limit:
        return result
    times = [run["step_ms_median"] for run in runs]
    ratios = [one / first["step_ms_median"] for one, first in zip(times, firsts, strict=True)]
    used = [r["processor_ms"] / first["processor_ms"] for r, first in zip(runs, firsts, strict=True)]
    besides = [beside_products(run) for run in runs]
    medians = [name for name in _MEDIANS if name in runs[0]]
    return result | {
        "step_ms_median": statistics.median(times),
        "step_ms": times,
        **{name: statistics.median(run[name] for run in runs) for name in medians},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "processor_ratio": statistics.median(used),
        "beside_products_ms": statistics.median(besides),
        "other_load": max(run["other_load"] for run in runs),
        "losses": runs[0]["losses"],
        "versions": runs[0]["versions"],
        **{name: runs[0][name] for name in ("parts_ms", "streams_ms") if name in runs[0]},
    }


def beside_products(run: dict) -> float:
    """Milliseconds of a step, less those of its operations at the rate of its matmuls; not below 0."""
    return max(0.0, run["step_ms_median"] * (1 - run["gflops_per_rank"] / run["product_gflops"]))


_MEDIANS = (
    "tokens_per_s",
    "images_per_s",
    "processor_ms",
    "peak_rss_mb",
    "peak_pss_mb",
    "job_pss_mb",
    "gflops_per_rank",
    "product_gflops",
)


def difference(losses: list[float], others: list[float], count: int | None = None) -> float:
    """The largest relative difference at any of the first `count` steps; infinite for what is no number."""
    pairs = list(zip(losses, others, strict=True))[:count]
    return max(abs(a - b) / abs(b) if isfinite(a + b) else inf for a, b in pairs)


def table(result: dict, workload: str) -> str:
    """The summary for a reader."""
    entries = result["contestants"]
    unit = "images" if "images_per_s" in entries[0] else "tokens"
    size = f"{result['parameters'] / 1e6:.1f} M parameters"
    lines = [
        f"{workload}, {size}, fp32 but where said; {result['ranks']} ranks, 1 thread",
        f"processor: {result['processor']}",
        f"{'':<22} {'ms/step':>9} {'min':>8} {'max':>8} {unit + '/s':>9} {'RSS MB':>8} {'PSS MB':>8} "
        f"{'GFLOP/s':>8} {'beside':>8}  time over {entries[0]['contestant']}'s, processors' likewise",
    ]
    for each in entries:
        if "step_ms" not in each:
            message = f"no figures: LOSSES DIFFER by {each['loss_difference']:.1e}"
            lines.append(f"{each['contestant']:<22} {message}")
            continue
        times, ratios = each["step_ms"], each["ratios"]
        spread = (
            f"{each['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {each['processor_ratio']:.2f}"
        )
        lines.append(
            f"{each['contestant']:<22} {each['step_ms_median']:9.1f} {min(times):8.1f} {max(times):8.1f} "
            f"{each[unit + '_per_s']:9.1f} {each['peak_rss_mb']:8.0f} {each['peak_pss_mb']:8.0f} "
            f"{each['product_gflops']:8.0f} {each['beside_products_ms']:8.0f}  {spread}"
        )
    lines += [f"{each['contestant']:<22} {reason(each)}" for each in result["left_out"]]
    message = {each["contestant"].split()[0]: each["versions"] for each in entries if "versions" in each}
    lines += [f"matmuls of {name}: {products_of(versions)}" for name, versions in message.items()]
    lines.append(f"GFLOP/s: a matmul of {w.SIDE} x {w.SIDE} in the contestant's type, all ranks at once")
    lines.append("beside: ms of a step without the time that its operations would take at that rate")
    for limit in sorted({each["loss_tolerance"] for each in entries}):
        off = max(each["loss_difference"] for each in entries if each["loss_tolerance"] == limit)
        own = f", twice PyTorch's from float32, at least {2 * ROUNDING:.0e}"
        types, why = ("", "") if limit == TOLERANCE else (" in bfloat16", own)
        lines.append(f"losses{types} differ by at most {off:.1e} of their size (limit {limit:.1e}{why})")
    lines.append("RSS counts a page that ranks share once for each, PSS once; the largest rank's peaks")
    disturbed = [each["contestant"] for each in entries if each.get("other_load", 0) > DISTURBED]
    if disturbed:
        lines.append(f"doubtful, other processes were busy meanwhile: {', '.join(disturbed)}")
    return "\n".join(lines)


def products_of(versions: dict) -> str:
    """The libraries that compute matmuls."""
    ours = f"; oneDNN {versions['onednn']} where faster" if "onednn" in versions else ""
    return versions["blas"] + ours


if __name__ == "__main__":
    main()
