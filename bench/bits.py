"""Whether a change of the code changed a bit: hashes of small trainings, here and at another commit.

Each case (bench/bits_cases.py) trains 20 steps; its hash is of losses, norms, all weights and
optimizer state. At one number of ranks and one precision all strategies have one hash, as they should.
Another processor, NumPy or BLAS has other hashes, so none are kept: the other commit's code computes its
hashes in a temporary git worktree.

    python -m bench.bits                     # a line per case
    python -m bench.bits --against 5ce4055   # and which differ there; exit code 1 if any does
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from . import ranks
from .bits_cases import Case, cases
from .harness.command_line import Parser
from .peers.launch import one_thread

ROOT = Path(__file__).parent.parent
PROGRAM = Path(__file__).with_name("bits_cases.py")


def main() -> None:
    """Compare this tree with another commit, case by case; exit code 1 if results differ."""
    parser = Parser(prog="python -m bench.bits", description="Whether a change of the code changed a bit.")
    parser.add_argument("--against", metavar="COMMIT", help="run the same cases there, and compare")
    parser.add_argument("--only", metavar="WORD", default="", help="cases that have WORD in their name")
    with ranks.refusal():
        options = parser.parse_args()
        chosen = [case for name, case in cases().items() if options.only in name]
        if not chosen:
            raise ValueError(f"--only: no case has {options.only!r} in its name")
        here, there = run(chosen, options)
    for name, found in here.items():
        print(found, name)
    if there is not None:
        differing = [name for name in here if here[name] != there[name]]
        print(f"{len(differing)} of {len(here)} cases differ from {options.against}")
        print("".join(f"  {name}\n" for name in differing), end="")
        raise SystemExit(bool(differing))


def run(chosen: list[Case], options: argparse.Namespace) -> tuple[dict[str, str], dict[str, str] | None]:
    """Map name to hash, of this tree and of the other commit, if one is named; two processes at a time."""
    with ThreadPoolExecutor(os.cpu_count()) as pool, other_tree(options.against) as other:
        trees = [ROOT] if other is None else [ROOT, other]
        jobs = [(tree, part) for part in shares(chosen) for tree in trees]
        found: dict[Path, dict[str, str]] = defaultdict(dict)
        for (tree, _), lines in zip(jobs, pool.map(lambda job: hashes(*job), jobs), strict=True):
            found[tree].update(line.split() for line in lines)
    return found[ROOT], None if other is None else found[other]


def shares(chosen: list[Case]) -> Iterator[list[Case]]:
    """The cases that one process, or one mpirun, runs."""
    by_launch: dict[tuple, list[Case]] = defaultdict(list)
    for number, case in enumerate(chosen):
        by_launch[(case.launch, case.ranks if case.launch == "mpirun" else number % 4)].append(case)
    yield from by_launch.values()


def hashes(tree: Path, chosen: list[Case]) -> list[str]:
    """What bench/bits_cases.py prints of these cases where the code is that of `tree`."""
    words = ["-P", str(PROGRAM), *(case.name for case in chosen)]
    environment = one_thread() | {"PYTHONPATH": str(tree)}
    if chosen[0].launch == "mpirun":
        return ranks.mpirun(words, chosen[0].ranks, environment).splitlines()
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"in {tree}: {done.stderr[-4000:]}")
    return done.stdout.splitlines()


@contextmanager
def other_tree(commit: str | None) -> Iterator[Path | None]:
    """A checkout of `commit` inside the block. Raises ValueError if git knows none."""
    if commit is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="bits-") as folder:
        tree = Path(folder) / "tree"
        made = git("worktree", "add", "--detach", str(tree), commit)
        if made.returncode:
            raise ValueError(f"--against: {made.stderr.strip()}")
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def git(*words: str) -> subprocess.CompletedProcess[str]:
    """Run git in this checkout, and give its output."""
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)


if __name__ == "__main__":
    main()
