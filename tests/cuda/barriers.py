"""Which barriers of kernels/cuda would be missed: each is removed in turn, and a test of a kernel must fail.

    python -m tests.cuda.barriers [--only TEXT] [--json FILE]

A barrier is found if the checker of races, or a test's numbers, miss it. One that nobody misses is printed:
another orders the same, or the tests lack a case.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copytree

import pytest

from tests.cuda import emulator
from tests.cuda.emulator import HERE, ROOT

_BARRIER = re.compile(r"__sync(?:threads|warp)\(\);")


_TESTS = {"layer_norm": "norms", "rms_norm": "norms", "attention_cudnn": "cudnn"}


def sites() -> list[tuple[str, int, str]]:
    """(file, line, source) of every barrier."""
    return [
        (path.name, number, line.strip())
        for path in sorted([*HERE.glob("*.cu"), *HERE.glob("*.cuh")])
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if _BARRIER.search(line)
    ]


def included(path: Path) -> set[Path]:
    """A file and all that it includes of ours."""
    names = re.findall(r'#include "(.*)"', path.read_text())
    return {path}.union(*(included(HERE / name) for name in names))


def tests_of(file: str) -> list[str]:
    """Options of pytest for tests of the kernels in a file, or of all that have a header and ask a block."""
    stems = [Path(file).stem]
    if file.endswith(".cuh"):
        files = {path: included(path) - {path} for path in HERE.glob("*.cu")}
        files = {path: {path, *others} for path, others in files.items() if HERE / file in others}
        asks = re.compile(r"block_|Block::|Team::")
        stems = [
            path.stem
            for path, others in files.items()
            if any(asks.search(other.read_text()) for other in others if other.name != file)
        ]
    files = {f"test_{_TESTS.get(stem, stem)}.py" for stem in stems}
    files = [name for name in sorted(files) if (ROOT / "tests/cuda" / name).exists()]
    chosen = " or ".join([*files, *(f"contracts and {stem}." for stem in stems)])
    return [*(f"tests/cuda/{name}" for name in (*files, "test_contracts.py")), "-k", chosen]


class First:
    """A plugin of pytest that keeps the first failure, in a line."""

    message = ""

    def pytest_exception_interact(self, node, call):
        if not self.message:
            text = re.sub(r"\s+", " ", str(call.excinfo.value))
            self.message = f"{call.excinfo.typename}: {text[:200]} ({node.name})"


def child(folder: Path, tests: list[str]) -> None:
    """Print what fails first with the kernels of `folder`, "" if nothing does."""
    emulator.runtime()
    emulator.Emulator.sources = emulator.LIBRARIES = folder
    first = First()
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], plugins=[first])
    assert (code == pytest.ExitCode.TESTS_FAILED) == bool(first.message), code
    print(first.message)


def without(site: tuple[str, int, str]) -> str:
    """How it is found that this barrier is missing, "" if it is not."""
    file, number, _ = site
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(copytree(HERE, Path(scratch, "cuda")))
        lines = (folder / file).read_text().splitlines(keepends=True)
        lines[number - 1] = _BARRIER.sub(";", lines[number - 1])
        (folder / file).write_text("".join(lines))
        command = [sys.executable, "-m", "tests.cuda.barriers", "--child", str(folder), *tests_of(file)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert not done.returncode, done.stderr
    return done.stdout.rpartition("\n")[0].rpartition("\n")[2]


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.cuda.barriers")
    parser.add_argument("--only", default="", help="files or lines with this text in them")
    parser.add_argument("--json", type=Path, help="a file for what was found")
    parser.add_argument("-n", dest="jobs", type=int, default=2, help="at a time (2)")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(Path(options.child[0]), options.child[1:])
        return
    wanted = [site for site in sites() if options.only in "{}:{} {}".format(*site)]
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:  # of processes
        for (file, number, source), how in zip(wanted, pool.map(without, wanted), strict=True):
            results.append(
                {"file": f"kernels/cuda/{file}", "line": number, "statement": source, "found": how}
            )
            print(f"{file}:{number}  {source}\n    {how or 'NOT FOUND'}", flush=True)
    missed = [result for result in results if not result["found"]]
    print(f"{len(results)} removed, {len(results) - len(missed)} found")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
