"""tests/gpu as a section of the benchmarks, and the plugin of pytest that it runs them with.

Each test that passes is written down when it has passed, and is not run again by a later call.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from .contestant import ROOT
from .state import Run, note, read

FILE = "SHARDRT_GPU_TESTS"  # environment: where the plugin writes
GRACE = 20.0  # seconds before the section's end in which pytest prints what has failed
_ENDED = (0, 1, 5)  # pytest's exit codes where all was run: passed, some failed, all had passed before


def measure(run: Run, tests: str = "tests/gpu", *options: str) -> None:
    """A row: how many have passed, in this call and earlier ones; an error names those that failed."""
    words = ["-q", "-ra", "--tb=short", "-m", "gpu", "-p", "bench.gpu.suite"]
    words += ["--continue-on-collection-errors", *options, tests]
    environment = os.environ | {FILE: str(run.file), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    process = subprocess.Popen([sys.executable, "-m", "pytest", *words], cwd=ROOT, env=environment)
    try:
        code = process.wait(timeout=max(run.seconds - GRACE, 1.0))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # not SIGTERM: pytest prints its failures
        code = process.wait()  # the section is ended if this takes too long
    found = read(run.file)
    trouble = [f"{len(found.failed)} failed: {', '.join(found.failed)}"] if found.failed else []
    if code not in _ENDED or not (found.passed or found.failed):
        trouble.append(f"ended before all were run, by a signal or error (exit code {code})")
    if trouble:
        trouble.insert(0, f"{len(found.passed)} passed")
    run.add(tests, float(len(found.passed)), "tests passed", error="; ".join(trouble))


# -- the plugin


def pytest_configure(config: Any) -> None:
    """Hear the interrupt also where a shell has put all this into the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: Any, items: list) -> None:
    """Leave out what has passed before."""
    passed = set(read(_file()).passed)
    left = [item for item in items if item.nodeid not in passed]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = left


def pytest_collectreport(report: Any) -> None:
    """Write down a file whose import fails; the others' tests run."""
    if report.failed:
        note(_file(), {"failed": report.nodeid})


def pytest_runtest_logreport(report: Any) -> None:
    """Write down what has become of a test, when it has been cleared away."""
    if report.when == "setup":
        _so_far.clear()
    _so_far.append(report.outcome)
    if report.failed:
        note(_file(), {"failed": report.nodeid})
    elif report.when == "teardown" and set(_so_far) == {"passed"}:
        note(_file(), {"passed": report.nodeid})


_so_far: list[str] = []  # outcomes of the present test's set-up and call


def _file() -> Path:
    return Path(os.environ[FILE])
