"""Times shardrt beside PyTorch FSDP2 in one run, the contestants by turns: A B A B.

Every run is a set of fresh processes, one thread each, that start from the same weights and see the same
tokens; so the losses must agree, or the times mean nothing. Ratios are taken within a round.

    python -m bench.compare --size small --ranks 2 --repeats 3 --tcmalloc
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import workload as w
from bench.peers.launch import launch, one_thread

TOLERANCE = 1e-4  # of the losses, relative, over all steps
DISTURBED = 0.1  # cores that other processes used; beyond it a run's times are doubtful


@dataclass(frozen=True)
class Contestant:
    """A program that prints the figures of one run as its last line."""

    name: str
    module: str
    strategy: str
    preload: str = ""

    def run(self, arguments: list[str], ranks: int) -> dict:
        """The figures of one run. Raises RuntimeError if it fails."""
        words = ["-m", self.module, *arguments, "--strategy", self.strategy, "--json"]
        environment = one_thread()
        if self.preload:
            environment["LD_PRELOAD"] = self.preload
        if self.module == "bench.step":
            output = mpirun(words, ranks, environment)
        else:
            output = launch(words, ranks, environment)
        return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description="Times shardrt beside PyTorch FSDP2, by turns."
    )
    parser.add_argument("--size", choices=sorted(w.SIZES), default="small")
    parser.add_argument("--ranks", type=w.positive, default=2, metavar="N", help="ranks of one thread (2)")
    parser.add_argument("--repeats", type=w.positive, default=3, metavar="R", help="rounds (3)")
    parser.add_argument("--steps", type=w.positive, default=8, metavar="N", help="timed steps per run (8)")
    parser.add_argument("--strategy", default="FULL_SHARD", help="shardrt's (FULL_SHARD)")
    parser.add_argument(
        "--tcmalloc", nargs="?", const="", metavar="LIBRARY", help="PyTorch under tcmalloc as well"
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
    options = parser.parse_args()
    if options.output and options.output.exists():
        parser.error(f"--output: {options.output} exists")

    contestants = entrants(options, parser)
    runs = compare(contestants, w.SIZES[options.size], options)
    result = summary(contestants, runs)
    result |= {"size": options.size, "repeats": options.repeats, "command": " ".join(sys.argv[1:])}
    print(json.dumps(result) if options.json else table(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    if result["loss_difference"] > TOLERANCE:
        raise SystemExit(f"bench.compare: the losses differ by {result['loss_difference']:.1e} of their size")


def entrants(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Contestant]:
    """Who takes part; shardrt is first."""
    found = [
        Contestant(f"shardrt {options.strategy}", "bench.step", options.strategy),
        Contestant("torch FSDP2", "bench.peers.torch_step", "fsdp2"),
    ]
    if options.tcmalloc is not None:
        library = options.tcmalloc or find_library("tcmalloc_minimal") or find_library("tcmalloc")
        if not library:
            parser.error("--tcmalloc: not found; install libtcmalloc-minimal4 or name the library's file")
        found.append(Contestant("torch FSDP2 tcmalloc", "bench.peers.torch_step", "fsdp2", library))
    if options.unsharded:
        found.append(Contestant("shardrt unsharded", "bench.step", "NONE"))
    return found


def compare(
    contestants: list[Contestant], workload: w.Workload, options: argparse.Namespace
) -> list[list[dict]]:
    """The figures by round and contestant."""
    with tempfile.TemporaryDirectory(prefix="bench-") as weights:
        common = [*workload.arguments(), "--weights", weights]
        mpirun(["-m", "bench.step", *workload.arguments(), "--save", weights], 1, one_thread())
        # Once untimed: compiles what is not in the caches yet.
        contestants[0].run([*common, "--steps", "1", "--warmup", "0"], options.ranks)
        arguments = [*common, "--steps", str(options.steps), "--warmup", "2"]
        rounds = []
        for number in range(options.repeats):
            rounds.append(
                [
                    watched(contestant, arguments, options.ranks, options.patience)
                    for contestant in contestants
                ]
            )
            figures = ", ".join(f"{run['step_ms_median']:.0f}" for run in rounds[-1])
            print(f"round {number + 1} of {options.repeats}: {figures} ms per step", file=sys.stderr)
        return rounds


def watched(contestant: Contestant, arguments: list[str], ranks: int, patience: float) -> dict:
    """The figures of one run, with `other_load`: the cores that other processes used meanwhile.

    Waits for the machine to be idle and repeats a run that was disturbed, for up to `patience` seconds.
    """
    end = time.monotonic() + patience
    while True:
        while time.monotonic() < end and load_of_others(lambda: time.sleep(1))[0] > DISTURBED:
            pass
        load, figures = load_of_others(lambda: contestant.run(arguments, ranks))
        if load <= DISTURBED or time.monotonic() >= end:
            return figures | {"other_load": load}


def load_of_others(action: Callable[[], Any]) -> tuple[float, Any]:
    """(cores that processes other than this one's children used during `action`, its result)."""
    start, busy, own = time.monotonic(), busy_seconds(), children_seconds()
    result = action()
    others = (busy_seconds() - busy) - (children_seconds() - own)
    return max(0.0, others / (time.monotonic() - start)), result


def busy_seconds() -> float:
    """Processor time that all processes of this machine have used, over all cores."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _wait, irq, softirq, *_ = (
            int(word) for word in file.readline().split()[1:]
        )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def children_seconds() -> float:
    """Processor time that this process's children, now ended, have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def mpirun(words: list[str], ranks: int, environment: dict[str, str], timeout: float = 1800) -> str:
    """What `mpirun -n ranks python *words` prints. Raises RuntimeError with its errors if it fails."""
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    if launcher is None:
        raise RuntimeError("mpirun was not found beside python or on PATH: pip install mpich")
    command = [launcher, "-n", str(ranks), sys.executable, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout


def summary(contestants: list[Contestant], rounds: list[list[dict]]) -> dict:
    """Medians over rounds; how much faster the first is than each, round by round; how far losses differ."""
    entries = []
    for position, contestant in enumerate(contestants):
        runs = [figures[position] for figures in rounds]
        times = [run["step_ms_median"] for run in runs]
        ratios = [one / rounds[r][0]["step_ms_median"] for r, one in enumerate(times)]
        entries.append(
            {
                "contestant": contestant.name,
                "step_ms_median": statistics.median(times),
                "step_ms": times,
                "tokens_per_s": statistics.median(run["tokens_per_s"] for run in runs),
                "peak_rss_mb": statistics.median(run["peak_rss_mb"] for run in runs),
                "ratio": statistics.median(ratios),
                "ratios": ratios,
                "other_load": max(run["other_load"] for run in runs),
                "losses": runs[0]["losses"],
                "settings": runs[0]["settings"],
                "versions": runs[0]["versions"],
            }
        )
    trained_together = [e for c, e in zip(contestants, entries, strict=True) if c.strategy != "NONE"]
    first = rounds[0][0]
    return {
        "contestants": entries,
        "loss_difference": max(difference(entries[0]["losses"], e["losses"]) for e in trained_together),
        "workload": first["workload"],
        "ranks": first["world_size"],
        "parameters": first["parameters"],
        "cores": os.cpu_count(),
    }


def difference(losses: list[float], others: list[float]) -> float:
    """The largest relative difference at any step."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))


def table(result: dict) -> str:
    """The summary for a reader."""
    job = result["workload"]
    entries = result["contestants"]
    lines = [
        f"GPT {job['layers']} x {job['dim']}, {result['parameters'] / 1e6:.1f} M parameters, T {job['seq']}, "
        f"batch {job['batch']} per rank, vocab {job['vocab']}, fp32; {result['ranks']} ranks x 1 thread",
        f"{'':<22} {'ms/step':>9} {'min':>8} {'max':>8} {'tokens/s':>9} {'MB/rank':>8}  "
        f"time over {entries[0]['contestant']}'s",
    ]
    for entry in entries:
        times, ratios = entry["step_ms"], entry["ratios"]
        spread = f"{entry['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(
            f"{entry['contestant']:<22} {entry['step_ms_median']:9.1f} {min(times):8.1f} {max(times):8.1f} "
            f"{entry['tokens_per_s']:9.0f} {entry['peak_rss_mb']:8.0f}  {spread}"
        )
    lines.append(f"shardrt's matrix products: {entries[0]['versions']['blas']}")
    lines.append(f"losses agree to {result['loss_difference']:.1e} of their size (limit {TOLERANCE:.0e})")
    disturbed = [entry["contestant"] for entry in entries if entry["other_load"] > DISTURBED]
    if disturbed:
        lines.append(f"doubtful, other processes were busy meanwhile: {', '.join(disturbed)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
