"""Strong and weak scaling on one machine: the same step on 1, 2, 4, 8 ranks of one thread each.

Weak: the batch per rank stays. Strong: the batch of all ranks stays. A machine is no faster than its cores:
efficiency is the speed over that of one rank, divided by the cores that the ranks can have. Where ranks share
cores (more than 1 rank per core) the table can only show what that costs, and says so.

    python -m bench.scaling --size small --ranks 1,2,4,8
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from bench import ranks
from bench import workload as w
from bench.command_line import Parser
from bench.environment import facts, write_result
from bench.quiet import DISTURBED, announce, watched


def main() -> None:
    with ranks.refusal():
        options = arguments().parse_args()
        workload = w.workload_of(options)
        jobs = planned(workload, options.ranks, options.only)
        if options.output and options.output.exists():
            raise ValueError(f"--output: {options.output} exists")
        cores = len(os.sched_getaffinity(0))
        steps = ["--steps", str(options.steps), "--warmup", "2", "--strategy", options.strategy]
        runs: list[list[dict]] = [[] for _ in jobs]
        announce(options.repeats * len(jobs), options.patience)
        for number in range(options.repeats):
            for (_, count, job), own in zip(jobs, runs, strict=True):
                words = [*job.arguments(), *steps]
                own.append(watched(lambda w=words, n=count: ranks.step(w, n), options.patience))
            print(f"round {number + 1} of {options.repeats} is over", file=sys.stderr)
        rows: list[dict] = []
        for (kind, _, job), own in zip(jobs, runs, strict=True):
            rows.append(row(kind, typical(own), job, cores, rows))
    result = {"cores": cores, "strategy": options.strategy, "rows": rows}
    result |= facts(" ".join(["python -m bench.scaling", *sys.argv[1:]]))
    result["load_average"] = list(os.getloadavg())
    print(json.dumps(result) if options.json else table(result, workload))
    if options.output:
        write_result(options.output, result)


def arguments() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.scaling", description="The same step on more and more ranks.")
    w.add_shape(parser)
    parser.add_argument(
        "--ranks", type=counts, default=[1, 2, 4, 8], metavar="N,...", help="one thread each (1,2,4,8)"
    )
    parser.add_argument("--only", choices=("strong", "weak"), help="one kind of scaling (both)")
    parser.add_argument("--steps", type=w.positive, default=6, metavar="N", help="timed steps (6)")
    parser.add_argument("--repeats", type=w.positive, default=1, metavar="R", help="rounds over all (1)")
    parser.add_argument(
        "--patience", type=float, default=60, metavar="SECONDS", help="per run, for an idle machine (60)"
    )
    parser.add_argument("--strategy", default="FULL_SHARD", metavar="NAME", help="(FULL_SHARD)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON object to FILE as well")
    return parser


def counts(text: str) -> list[int]:
    """An argparse type: numbers of ranks, growing."""
    found = [w.positive(word) for word in text.split(",")]
    if found != sorted(set(found)):
        raise argparse.ArgumentTypeError(f"must grow, got {text}")
    return found


def planned(workload: w.Job, sizes: list[int], only: str | None) -> list[tuple[str, int, w.Job]]:
    """(kind, ranks, their job). Raises ValueError for a batch that the ranks can't share."""
    jobs: list[tuple[str, int, w.Job]] = []
    if only != "weak":
        for size in sizes:
            if workload.batch % size:
                raise ValueError(
                    f"--batch {workload.batch}, which in strong scaling is that of all ranks, is not "
                    f"divided by {size} ranks: take another --batch or --ranks, or --only weak"
                )
            jobs.append(("strong", size, replace(workload, batch=workload.batch // size)))
    if only != "strong":
        jobs += [("weak", size, workload) for size in sizes]
    return jobs


def typical(runs: list[dict]) -> dict:
    """The run whose step is the median; the faster of the two in the middle."""
    return sorted(runs, key=lambda figures: figures["step_ms_median"])[(len(runs) - 1) // 2]


def row(kind: str, figures: dict, job: w.Job, cores: int, before: list[dict]) -> dict:
    """One line of the table; speed counts from the first of its kind."""
    size, rate = figures["world_size"], figures[f"{job.UNIT}_per_s"]
    first = next((each for each in before if each["kind"] == kind), None)
    base = first["rate"] / min(first["ranks"], cores) if first else rate / min(size, cores)
    return {
        "kind": kind,
        "ranks": size,
        "ranks_per_core": size / cores,
        "batch_per_rank": job.batch,
        "step_ms": figures["step_ms_median"],
        "rate": rate,
        "speedup": round(rate / (first["rate"] if first else rate), 4),
        "possible": min(size, cores) / (min(first["ranks"], cores) if first else min(size, cores)),
        "efficiency": round(rate / (base * min(size, cores)), 4),
        "received_mb": figures["received_mb"],
        "formula_mb": figures["formula_mb"],
        "peak_rss_mb": figures["peak_rss_mb"],
        "peak_pss_mb": figures["peak_pss_mb"],
        "job_pss_mb": figures["job_pss_mb"],
        "exposed_ms": figures["exposed_ms"],
        "loss": figures["loss"],
        "other_load": figures["other_load"],
    }


def table(result: dict, workload: w.Job) -> str:
    """For a reader."""
    cores = result["cores"]
    lines = [
        f"{workload} (strong: in all), {result['strategy']}, fp32, ranks of 1 thread on {cores} cores",
        f"{'':<7}{'ranks':>6}{'per core':>9}{'batch':>6}{'ms/step':>10}{workload.UNIT + '/s':>10}{'speed':>7}"
        f"{'possible':>9}{'efficiency':>11}{'exposed ms':>11}{'MB sent':>9}{'formula':>9}{'PSS MB':>8}"
        f"{'of all':>8}",
    ]
    for each in result["rows"]:
        lines.append(
            f"{each['kind']:<7}{each['ranks']:6d}{each['ranks_per_core']:9.2g}{each['batch_per_rank']:6d}"
            f"{each['step_ms']:10.1f}{each['rate']:10.1f}{each['speedup']:7.2f}{each['possible']:9.2f}"
            f"{100 * each['efficiency']:10.1f}%{each['exposed_ms']:11.1f}{each['received_mb']:9.2f}"
            f"{each['formula_mb']:9.2f}{each['peak_pss_mb']:8.0f}{each['job_pss_mb']:8.0f}"
        )
    shared = [each["ranks"] for each in result["rows"] if each["ranks"] > cores]
    lines.append("sent: per rank and step, as much received; possible: by the cores that there are")
    if shared:
        lines.append(
            f"from {min(shared)} ranks on several share one of the {cores} cores, so they can't be faster "
            f"than {cores} ranks: what those lines show is what sharing costs"
        )
    disturbed = [f"{e['kind']} {e['ranks']}" for e in result["rows"] if e["other_load"] > DISTURBED]
    if disturbed:
        lines.append(f"doubtful, other processes were busy meanwhile: {', '.join(disturbed)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
