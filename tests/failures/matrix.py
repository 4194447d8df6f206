"""Which failures in which phases, how one of them is run, and what must then be true."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from models.language import LlamaRecipe
from models.llama import LlamaConfig
from shardrt.faults.failure import HANG, MISMATCH, OUT_OF_MEMORY
from shardrt.tools import autopsy
from shardrt.train import config as settings
from shardrt.train.errors import DIFFERS
from tests.failures.victim import DIFFERENCES, EXCHANGES, FAILURES, MISMATCHES, PHASES
from tests.lab.jobs import OPEN_MPI, TINY, furnish
from tests.ranks import BACKSTOP, clean_environment, mpirun_path

EXPERTS = LlamaConfig(2, 2, 1, 16, 12, 16, 256, tied=False, experts=4)
LIMIT = 2.0  # seconds of the watchdog in the phase in which something hangs, or what a slow machine needs
CODES = {"raise": 1, "memory": OUT_OF_MEMORY, "stop": HANG, "loop": HANG}
CODES |= dict.fromkeys(MISMATCHES, MISMATCH) | dict.fromkeys(DIFFERENCES, DIFFERS)
BUDGETS = {"set-up": "set-up", "save": "save", "eval": "evaluation"}
# What the one message says of the rank, {}.
MESSAGES = {
    "raise": r"^rank {} of \d(?: on \S+)? failed in its main thread:",
    "memory": r"^rank {} of \d(?: on \S+)? is out of memory in its main thread:",
    "stop": r"^rank {}(?: on \S+)? is behind: ranks? [\d,]+ waits? in ",
    "loop": r"^rank {}(?: on \S+)? is behind: ranks? [\d,]+ waits? in ",
    **dict.fromkeys(MISMATCHES, r"CollectiveMismatch: ranks differ in collective .*rank {} called"),
    **dict.fromkeys(DIFFERENCES, r"^error: ranks differ: .*on rank {}"),
}
_OF_STAGE = r"behind: ranks? [\d,]+ waits? in .*recv [FB]\d+ of stage \d from rank \d"
_FIRST_WORDS = (
    r"^(?:hang: |error: |rank \d of \d(?: on \S+)? (?:failed|is out of memory|called|was interrupted))"
)


@dataclass(frozen=True)
class Case:
    """One failure of one rank in one phase."""

    failure: str
    phase: str
    size: int
    tp: int = 1  # the others of the ranks go along the data
    pp: int = 1
    ep: int = 1  # of a model with experts, over ranks of the data
    rank: int = 0  # that is hit; 0: one that `victim` chooses

    @property
    def victim(self) -> int:
        """Each rank but the first is hit by some failure."""
        number = list(CODES).index(self.failure) if self.failure in CODES else 0
        return self.rank or number % (self.size - 1) + 1

    @property
    def hangs(self) -> bool:
        """Whether the watchdog must end it."""
        return self.failure in ("stop", "loop")

    def __str__(self) -> str:
        axes = "".join(
            f"-{name}{getattr(self, name)}" for name in ("tp", "pp", "ep") if getattr(self, name) > 1
        )
        return f"{self.failure}-{self.phase}-{self.size}{axes}{f'-on{self.rank}' if self.rank else ''}"

    @property
    def in_action(self) -> bool:
        """Whether a rank hangs while the others wait for what an action of its stage gives."""
        return self.pp > 1 and self.hangs and self.phase in ("forward", "backward")


def cases(sizes: tuple[int, ...]) -> list[Case]:
    """All of them; of an even number of ranks with two along tp, along pp, and with experts on two, too."""
    kinds = [(failure, phase) for failure in (*FAILURES, *MISMATCHES) for phase in PHASES]
    kinds += [(difference, "set-up") for difference in DIFFERENCES]
    meshes = [(size, tp) for size in sizes for tp in (1, 2) if size % tp == 0]
    staged = [(size, 1, 2) for size in sizes if size % 2 == 0]
    # Ranks of several stages come to a collective of all between their actions alone.
    acting = ("forward", "backward", "eval")
    within = [kind for kind in kinds if kind[0] not in MISMATCHES or kind[1] not in acting]
    exchanged = [(failure, phase) for failure in (*FAILURES, *MISMATCHES) for phase in EXCHANGES]
    return [
        *(Case(*kind, *mesh) for mesh in meshes for kind in kinds),
        *(Case(*kind, *mesh) for mesh in staged for kind in within),
        *(Case(*kind, size, ep=2) for size, *_ in staged for kind in exchanged),
    ]


def short() -> list[Case]:
    """A selection, at 2 and 3 ranks: each failure in one phase, a mismatch, and ranks of other code.

    On 2 x 2 ranks, tensor parallelism beside data's: ranks that hang and mismatch. In stages: ranks of the
    first and of the last that hang and raise. Where rows go to experts of other ranks: one that is killed,
    and one that raises on their way back.

    (tests/mpi/contract.py has the messages of other mismatches, tests/train/test_stop.py those of other
    differences.)
    """
    return [
        *(
            Case(failure, PHASES[number], 2 + number % 2)
            for number, failure in enumerate((*FAILURES, "order"))
        ),
        Case("code", "set-up", 2),
        Case("loop", "backward", 4, tp=2),
        Case("unit", "optimizer", 4, tp=2),
        Case("stop", "forward", 2, pp=2),
        Case("loop", "backward", 4, pp=2),
        Case("raise", "forward", 4, pp=2),
        Case("kill", "exchange", 2, ep=2),
        Case("raise", "exchange back", 2, ep=2),
    ]


def prepare(folder: Path) -> Path:
    """A folder in which victims run."""
    furnish(folder)
    config = replace(
        TINY,
        steps=100_000,
        batch_size=12,
        report=replace(TINY.report, eval_interval=2),
        checkpoint=settings.CheckpointConfig(every=2),
        data=(Path("text.txt"),),
    )
    (folder / "other").mkdir()
    (folder / "other" / "text.txt").write_text("Tomorrow, and tomorrow, and tomorrow.\n" * 60)
    for place in (folder, folder / "other"):
        settings.dump(config, place / "tiny.toml")
    routed = LlamaRecipe(**vars(config) | {"architecture": "llama", "model": EXPERTS})
    settings.dump(routed, folder / "experts.toml")
    return folder


def check(
    case: Case,
    folder: Path,
    launcher: str = "",
    python: str = sys.executable,
    grace: Callable[[float], float] = lambda started: 2.0,
    limit: float = LIMIT,
) -> float:
    """Run one; gives the seconds from the failure to the end. Raises AssertionError with what it printed.

    grace: by the seconds until the failure, those to see it (docs/explanation/failures.md promises 2) and to
    end. limit: seconds of the watchdog, where it is to end the job.
    """
    command = [launcher or mpirun_path(), "-n", str(case.size), python, "-m", "tests.failures.victim"]
    command += [case.failure, case.phase, str(case.victim)]
    command += ["--config", "experts.toml" if case.ep > 1 else "tiny.toml", "--parallel.ep", str(case.ep)]
    command += ["--parallel.tp", str(case.tp), "--parallel.pp", str(case.pp)]
    command += ["--parallel.micro-batches", "3"] if case.pp > 1 else []
    command += [f"--watchdog.{BUDGETS.get(case.phase, 'limit')}", str(limit)] if case.hangs else []
    files = folder / f"{case}.out", folder / f"{case}.err"
    began = time.time()
    with open(files[0], "wb") as out, open(files[1], "wb") as err:
        job = subprocess.Popen(
            [*command, "--name", str(case)],
            cwd=folder,
            stdout=out,
            stderr=err,
            env=clean_environment(**OPEN_MPI, SHARDRT_CASE=f"{folder}/{case}"),
        )
        try:
            code = job.wait(timeout=BACKSTOP)
        except subprocess.TimeoutExpired:
            code = None
            job.kill()
        ended = time.time()
    # Open MPI puts NUL bytes into what it prints at an abort.
    out, err = (path.read_text(errors="replace").replace("\0", "") for path in files)
    message = f"{case}, exit code {code}\n{out[-2000:]}\n{err[-6000:]}"
    left = survivors(f"SHARDRT_CASE={folder}/{case}")
    assert not left, f"processes {left} are left: {message}"
    failed = re.search(r"failed at ([\d.]+)", out)
    assert failed, message
    seconds = ended - float(failed[1])
    allowed = grace(float(failed[1]) - began) + (limit if case.hangs else 0.0)
    if case.failure != "kill":
        assert code == CODES[case.failure], message
        assert re.search(MESSAGES[case.failure].format(case.victim), err, re.M), message
        assert len(re.findall(_FIRST_WORDS, err, re.M)) == 1, message
        if case.in_action:
            assert re.search(_OF_STAGE, err, re.M), message
            letters = "F" if case.phase == "forward" else "BIW"
            assert re.search(
                rf"^  (?:\S+: )?rank {case.victim} .*{case.phase}, [{letters}]\d+ of stage \d", err, re.M
            ), message
    else:
        assert code not in (0, None), message  # the launcher's own, and its message
        assert not re.search(_FIRST_WORDS, err, re.M), message
    if case.phase != "set-up" and case.failure in FAILURES:  # before, the run has no folder
        found = autopsy.examine(folder / "runs" / str(case))
        pointed = found["behind"] if case.failure in ("stop", "loop") else [found["first"]]
        said = f"{message}\nthe doctor said: {autopsy.lines(found)}"
        if case.failure == "kill":  # the launcher kills the others so soon that they may look alike
            assert case.victim in (*pointed, *found["behind"]), said
        else:
            assert pointed == [case.victim], said
    late = f"{seconds:.1f} s, {allowed:.1f} allowed: {message}"
    assert case.failure in DIFFERENCES or seconds < allowed, late
    return seconds


def survivors(mark: str) -> list[int]:
    """Processes with this in their environment, a little after the job has ended; they are ended."""
    deadline = time.monotonic() + 2
    while True:
        found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has(pid, mark)]
        if not found or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return found


def _has(pid: int, mark: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
