"""Runs the sections one after the other, each in a process; prints their rows, writes JSON and a picture.

python -m bench.gpu                       # all, in five minutes; what does not fit says so
python -m bench.gpu --only ceilings --only kernels
python -m bench.gpu --only gpt2-xl --budget 900
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from bench.environment import write_result
from bench.gpu import needs, report
from bench.gpu.contestant import ROOT
from bench.gpu.state import Run, read

# name -> (function's module and name, seconds that it may take)
SECTIONS: dict[str, tuple[str, str, float]] = {
    "ceilings": ("bench.gpu.ceilings", "measure", 60),
    "kernels": ("bench.gpu.kernels", "measure", 90),
    "products": ("bench.gpu.products", "measure", 90),
    "launches": ("bench.gpu.host", "measure", 45),
    "training": ("bench.gpu.training", "beside_torch", 180),
    "sharding": ("bench.gpu.training", "sharded", 90),
    "offload": ("bench.gpu.training", "offloaded", 90),
    "convolution": ("bench.gpu.convolution", "measure", 60),
    "gpt2-xl": ("bench.gpu.training", "beside_torch", 240),
}
LEAST = 5.0  # seconds, below which no section is begun
_EXTRA = {"gpt2-xl": {"size": "gpt2-xl"}}


def main() -> None:
    options = arguments().parse_args()
    if options.section:
        child(options)
        return
    found = needs.find()
    if options.check or not found.benchmarks:
        for line in found.lines():
            print(f"bench.gpu: {line}")
        raise SystemExit(0 if found.tests else 1 if found.benchmarks else 2)
    chosen = options.only or list(SECTIONS)
    if "ceilings" not in chosen:
        chosen.insert(0, "ceilings")  # nothing is shown without what it is compared with
    raise SystemExit(run(chosen, options))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Benchmarks on one NVIDIA GPU.")
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    parser.add_argument(
        "--only", action="append", choices=list(SECTIONS), metavar="NAME", help=f"of {', '.join(SECTIONS)}"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR", help="(runs/gpu)")
    parser.add_argument("--budget", type=float, default=300, metavar="SECONDS", help="in all (300)")
    parser.add_argument(
        "--check",
        action="store_true",
        help="only say what is missing; exit code 1: tests/gpu can't run, 2: neither can the benchmarks",
    )
    for hidden in ("--section", "--rows", "--ceilings"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    return parser


def run(chosen: list[str], options: argparse.Namespace) -> int:
    """All sections; the exit code. What does not fit into the budget is a row that says so."""
    start = time.monotonic()
    rows: list[report.Row] = []
    ceilings: dict[str, float] = {}
    for name in chosen:
        left = options.budget - (time.monotonic() - start)
        new, found = section(name, ceilings, options.quick, min(left, SECTIONS[name][2]))
        rows += new
        ceilings |= found
        print(report.table(new), end="\n\n", flush=True)
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python -m bench.gpu", *sys.argv[1:]]),
        "machine": needs.machine(),
        "seconds": round(time.monotonic() - start, 1),
        "ceilings": ceilings,
        "rows": [row.as_json() for row in rows],
    }
    write(result, rows, options.out)
    print(report.summary(rows))
    return 1 if any(row.error for row in rows) else 0


def section(
    name: str, ceilings: dict[str, float], quick: bool, limit: float
) -> tuple[list[report.Row], dict[str, float]]:
    """(rows, ceilings) of one section, run in a process that is ended at `limit` seconds."""
    if limit < LEAST:
        return [report.Row(name, name, error="not run: the time is over (--budget)")], {}
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        rows = Path(folder) / "rows"
        words = ["--section", name, "--rows", str(rows), "--ceilings", json.dumps(ceilings)]
        trouble = ended([*words, *(["--quick"] if quick else [])], limit)
        new, found = read(rows)
    if trouble or not new:
        new.append(report.Row(name, name, error=trouble or "measured nothing"))
    return new, found


def ended(words: list[str], limit: float) -> str:
    """Run this module with `words`, and whatever it starts; "" or what went wrong."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu", *words], cwd=ROOT, stderr=errors, start_new_session=True
        )
        trouble = ""
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code, trouble = -1, f"ended after {limit:.0f} s"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # contestants that it left behind
            except ProcessLookupError:
                pass
            process.wait()
        if not code:
            return ""
        errors.seek(0)
        told = errors.read().strip()
        print(told[-4000:], file=sys.stderr)
        last = told.splitlines()[-1] if told else ""
        return f"{trouble or f'exit code {code}'}: {last}"


def child(options: argparse.Namespace) -> None:
    """One section, in this process."""
    import importlib

    module, function, _ = SECTIONS[options.section]
    work: Callable = getattr(importlib.import_module(module), function)
    this = Run(options.section, Path(options.rows), options.quick, json.loads(options.ceilings))
    work(this, **_EXTRA.get(options.section, {}))


def write(result: dict, rows: list[report.Row], folder: Path) -> None:
    """gpu.json, gpu.txt and gpu.png."""
    folder.mkdir(parents=True, exist_ok=True)
    write_result(folder / "gpu.json", result)
    (folder / "gpu.txt").write_text(report.table(rows) + "\n")
    title = f"{result['machine'].get('name', 'GPU')}, {result['date']}"
    drawn = report.draw(rows, title, folder / "gpu.png")
    print(f"written: {folder}/gpu.json, gpu.txt{', gpu.png' if drawn else ''}")


if __name__ == "__main__":
    main()
