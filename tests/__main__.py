"""The tests, the quick ones, or all: `python -m tests [--quick | --rest] [-n JOBS] [pytest's own arguments]`.

First those that may run beside others, JOBS at a time, then those for a GPU, on the GPU emulator. (`make gpu`
runs them on a GPU, `make hosts` more on several hosts.) Then those whose jobs must end in time and mostly
wait, two at a time, and those that measure time, one after the other. Last, some of them as on a processor
with shorter vectors (`make processors` runs all numerical tests in each class of processor).
"""

import os
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

from tests.softgpu.available import missing

NOTHING_TO_RUN = 5  # pytest's exit code where no test was selected
BESIDE = "not timed and not serial and not hosts"
QUICK = "not slow and not rest and not torch and not timed and not serial and not mpi"
# Left out by --quick: emulated GPUs, benchmarks, PyTorch beside us, jobs that are killed, all pairs.
LONG = (
    *("cuda", "gpu", "softgpu", "bench", "parity", "failures", "mpi", "models"),
    *("train/test_world_invariant.py", "train/test_tasks.py", "train/test_tokenizer.py"),
    *("fsdp/test_pairs.py", "fsdp/test_strategies.py", "train/test_resume.py"),
    *("functional/test_beside_pytorch.py", "functional/test_conv2d.py", "checkpoint/test_damage.py"),
    *("test_docs.py", "test_doctor.py", "test_untrusted.py"),
)


def main() -> int:
    """pytest's exit code, that of the first part that failed."""
    parser = ArgumentParser("python -m tests", description=__doc__.splitlines()[0], add_help=True)
    parser.add_argument("--quick", action="store_true", help="nothing against PyTorch, nothing long")
    parser.add_argument("--rest", action="store_true", help="grids of which else a spread runs, whole")
    parser.add_argument("-n", dest="jobs", default="3", help="tests at a time (3)")
    options, others = parser.parse_known_args()
    beside = side_by_side(options.jobs)
    parts = [[*beside, "-m", QUICK if options.quick else BESIDE + " and not rest" * (not options.rest)]]
    parts[0] += [f"--ignore=tests/{name}" for name in LONG if options.quick]
    if not options.quick:
        parts += [] if named(others) or missing() else [[*beside, *software()]]
        parts += [
            ["-n", "2", "--maxschedchunk", "1", "-m", "timed and not hosts", *files_with("timed", others)]
        ]
        parts += [["-m", "serial and not hosts", *files_with("serial", others)]]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would compile all sources anew
    codes = [subprocess.call([sys.executable, "-m", "pytest", "-q", *part, *others]) for part in parts]
    if not options.quick and not named(others):
        processors = [sys.executable, "-m", "tests.processors", "--slice", "-n", options.jobs]
        codes.append(subprocess.call([*processors, *others]))
    codes = [code for code in codes if code != NOTHING_TO_RUN] or [NOTHING_TO_RUN]
    return next((code for code in codes if code), 0)


def side_by_side(jobs: str) -> list[str]:
    """Arguments for so many files of tests at a time."""
    return ["-n", jobs, "--dist", "loadfile", "-p", "tests.longest_first", "--no-loadscope-reorder"]


def files_with(mark: str, others: list[str]) -> list[str]:
    """Files with such tests, for to import all takes ten seconds; none where the caller names files."""
    if named(others):
        return []
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    return [str(file) for file in files if f"pytest.mark.{mark}" in file.read_text()]


def software() -> list[str]:
    """Arguments for tests for a GPU on the GPU emulator.

    `make softgpu` has those of processes, of training and of captured steps, too, where tests/softgpu trains
    the same features, and all cases of kernels.
    """
    folder = Path(__file__).parent / "gpu"
    left_out = [f"--ignore={folder / name}" for name in ("test_training.py", "test_captured_step.py")]
    return ["-p", "tests.softgpu.plugin", "-m", "gpu and not mpi and not rest", *left_out, str(folder)]


def named(others: list[str]) -> bool:
    """Whether these arguments name files."""
    return any(Path(word.partition("::")[0]).exists() for word in others)


if __name__ == "__main__":
    sys.exit(main())
