"""Tests and measures on a GPU, section by section, each in a process; writes a table, JSON and a picture.

python -m bench.gpu                       # all, in nine minutes; again: what is still missing
python -m bench.gpu --only ceilings --only kernels
python -m bench.gpu --only gpt2-xl --budget 900

What a section finds is in a file as soon as it is found (OUT/rows). A call that was ended, or had too little
time, is gone on with by the next: first what was not begun, then what was cut off or has failed.
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

from ..harness.environment import facts, write_result
from . import needs, report
from .contestant import ROOT
from .state import Run, note, read, sources

# name -> (function's module and name, seconds that it may take)
SECTIONS: dict[str, tuple[str, str, float]] = {
    "ceilings": ("bench.gpu.ceilings", "measure", 60),
    "caches": ("bench.gpu.caches", "measure", 90),
    "step": ("bench.gpu.first_step", "measure", 120),
    "alone": ("bench.gpu.training", "ours_alone", 90),
    "tests": ("bench.gpu.suite", "measure", 120),
    "ranks": ("bench.gpu.ranks", "measure", 240),
    "training": ("bench.gpu.training", "beside_torch", 300),
    "products": ("bench.gpu.products", "measure", 90),
    "kernels": ("bench.gpu.kernels", "measure", 90),
    "launches": ("bench.gpu.host", "measure", 45),
    "sharding": ("bench.gpu.training", "sharded", 90),
    "offload": ("bench.gpu.training", "offloaded", 90),
    "convolution": ("bench.gpu.convolution", "measure", 60),
    "experts": ("bench.gpu.experts", "measure", 60),
    "gpt2-xl": ("bench.gpu.training", "beside_torch", 240),
}
LEAST = 5.0  # seconds, below which no section is begun
# How the names of the packages begin, and of the driver's version, that figures depend on.
_MATTER = ("cupy", "torch", "triton", "nvidia-", "driver_version")
_EXTRA = {"gpt2-xl": {"size": "gpt2-xl"}}


def main() -> None:
    """Run the sections that are asked for, each in a process of its own."""
    options = arguments().parse_args()
    if options.section:
        child(options)
        return
    found = needs.find()
    for line in found.lines():
        print(f"bench.gpu: {line}", flush=True)
    if not found.gpus:
        raise SystemExit(2)
    chosen = options.only or list(SECTIONS)
    if "ceilings" not in chosen:
        chosen.insert(0, "ceilings")  # nothing is shown without what it is compared with
    raise SystemExit(run(chosen, options, {name: found.lacks(name) for name in chosen}))


def arguments() -> argparse.ArgumentParser:
    """The options of python -m bench.gpu."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Tests and measures on a GPU.")
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    parser.add_argument(
        "--only", action="append", choices=list(SECTIONS), metavar="NAME", help=f"of {', '.join(SECTIONS)}"
    )
    parser.add_argument("--out", type=_absolute, default="runs/gpu", metavar="DIR", help="(runs/gpu)")
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="in all (540)")
    parser.add_argument("--anew", action="store_true", help="measure again what earlier calls have measured")
    parser.add_argument("--keep", action="store_true", help="go on though code or packages have changed")
    for hidden in ("--section", "--rows", "--ceilings", "--seconds"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    return parser


def _absolute(path: str) -> Path:
    """The sections' processes run in another folder than this one."""
    return Path(path).absolute()


def run(chosen: list[str], options: argparse.Namespace, lacking: dict[str, str] | None = None) -> int:
    """All sections; the exit code. What does not fit into the budget is a row that says so.

    lacking: section -> why it can't run, or "".
    """
    start, machine, lacking = time.monotonic(), needs.machine(), lacking or {}
    of = {"gpu": machine.get("name", ""), "quick": options.quick, "code": sources(ROOT)}
    of["packages"] = {name: version for name, version in machine.items() if name.startswith(_MATTER)}
    here = {name: of | ({"GPUs": machine.get("GPUs")} if name == "ranks" else {}) for name in SECTIONS}
    files = {name: options.out / "rows" / f"{name}.jsonl" for name in SECTIONS}
    files["ceilings"].parent.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        forget(files[name], here[name], options)
    troubles: dict[str, str] = {}
    for name in order(chosen, files):
        ceilings = read(files["ceilings"]).ceilings
        limit = min(options.budget - (time.monotonic() - start), SECTIONS[name][2])
        troubles[name] = lacking.get(name, "")
        if not troubles[name]:
            troubles[name] = section(name, files[name], here[name], ceilings, options.quick, limit)
        print(report.table(rows_of(name, files[name], troubles)), end="\n\n", flush=True)
        write(files, troubles, machine, options)
    rows = write(files, troubles, machine, options)
    title = f"{machine.get('name', 'GPU')}, {datetime.now(UTC).date().isoformat()}"
    report.draw(rows, title, options.out / "gpu.png")
    print(report.summary(rows))
    left = [name for name in chosen if not lacking.get(name) and not read(files[name]).finished]
    if left:
        print(f"bench.gpu: not finished: {', '.join(left)} (the next call goes on with them)")
    print(f"bench.gpu: all sections' tables are in {options.out / 'gpu.txt'}")
    return 1 if any(row.bad for row in rows) else 0


def forget(file: Path, of: dict, options: argparse.Namespace) -> None:
    """Remove what was found on another GPU, by other code or packages, or is to be measured again."""
    before = read(file).of
    if options.keep:
        kept = ("code", "packages")
        before, of = ({key: value for key, value in each.items() if key not in kept} for each in (before, of))
    if before != of or options.anew:
        file.unlink(missing_ok=True)


def order(chosen: list[str], files: dict[str, Path]) -> list[str]:
    """What is to be measured now: what was not begun before what was cut off or has failed.

    Ceilings before all, for the others are compared with them.
    """
    left = [name for name in chosen if not read(files[name]).good]
    return sorted(left, key=lambda name: name != "ceilings" and files[name].exists())


def section(name: str, file: Path, of: dict, ceilings: dict[str, float], quick: bool, limit: float) -> str:
    """Measure a section in a process that is ended at `limit` seconds; "" or what went wrong."""
    if limit < LEAST:
        return "not run: the time is over; the next call goes on here"
    before, new = read(file), file.with_suffix(".new")
    new.unlink(missing_ok=True)
    for values in ({"of": of}, *({"passed": test} for test in before.passed)):
        note(new, values)
    words = ["--section", name, "--rows", str(new), "--ceilings", json.dumps(ceilings)]
    seen = {} if name == "ranks" else needs.one_gpu()  # the others' ranks are threads that share a GPU
    trouble = ended([*words, "--seconds", str(limit), *(["--quick"] if quick else [])], limit, seen)
    found = read(new)
    if found.done or len(found.rows) + len(found.passed) >= len(before.rows) + len(before.passed):
        new.replace(file)  # else an earlier call came further
    return trouble or ("" if found.rows else "measured nothing")


def rows_of(name: str, file: Path, troubles: dict[str, str]) -> list[report.Row]:
    """Of a section, with one for what went wrong with it as a whole."""
    found = read(file)
    trouble = troubles.get(name, "")
    if file.exists() and not found.done:
        trouble = trouble or "cut off in an earlier call"
    return [*found.rows, *([report.Row(name, name, error=trouble)] if trouble else [])]


def ended(words: list[str], limit: float, seen: dict[str, str]) -> str:
    """Run this module with `words`, and whatever it starts; "" or what went wrong. seen: the GPUs it sees."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu", *words],
            cwd=ROOT,
            env=os.environ | seen,
            stderr=errors,
            start_new_session=True,
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
        message = errors.read().strip()
        print(message[-4000:], file=sys.stderr)
        last = message.splitlines()[-1] if message else ""
        return ": ".join(filter(None, (trouble or f"exit code {code}", last)))


def child(options: argparse.Namespace) -> None:
    """One section, in this process."""
    import importlib

    module, function, _ = SECTIONS[options.section]
    work: Callable = getattr(importlib.import_module(module), function)
    file, ceilings = Path(options.rows), json.loads(options.ceilings)
    this = Run(options.section, file, options.quick, float(options.seconds or 60), ceilings)
    work(this, **_EXTRA.get(options.section, {}))
    note(file, {"done": True})


def write(
    files: dict[str, Path], troubles: dict[str, str], machine: dict, options: argparse.Namespace
) -> list[report.Row]:
    """gpu.json and gpu.txt, of all that was measured so far; the rows."""
    rows = [row for name, file in files.items() for row in rows_of(name, file, troubles)]
    result = {
        **facts(" ".join(["python -m bench.gpu", *sys.argv[1:]])),
        "machine": machine,
        "ceilings": read(files["ceilings"]).ceilings,
        "rows": [row.as_json() for row in rows],
    }
    write_result(options.out / "gpu.json", result)
    (options.out / "gpu.txt").write_text(report.table(rows) + "\n")
    return rows


if __name__ == "__main__":
    main()
