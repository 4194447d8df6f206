"""FULL_SHARD on 1, 2, 4 and 8 GPUs, a process under mpirun for each, and the bandwidth of its collectives.

Imports no shardrt, which would set the threads of the ranks' BLAS in their environment (bench.gpu.rank).
"""

import json
import os
import re
from typing import Any

from ..ranks import launcher, mpirun
from . import needs
from .contestant import ROOT
from .job import SIZES, Job
from .report import of_peak
from .state import Run
from .training import CLOSE

COUNTS = (1, 2, 4, 8)
NBYTES = 1 << 30  # of the array that all ranks have in the end, or have at first
LIMIT = 90.0  # seconds of one job
JOBS = {"GPT-2 124M": SIZES["gpt2"], "GPT-2 1.5B": SIZES["gpt2-xl"]}
# Open MPI refuses root and more ranks than cores, and binds a rank to one core. MPICH knows none of these.
_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


def measure(
    run: Run,
    jobs: dict[str, Job] = JOBS,
    nbytes: int = NBYTES,
    runner: tuple[str, ...] = (),
) -> None:
    """Rows of tokens a second of all ranks beside as many times one GPU's, and of the collectives' bandwidth.

    The most GPUs come first, after one. runner: words of Python's command line before the module.
    """
    counts = [count for count in COUNTS if count <= needs.gpus()]
    if len(counts) < 2:
        run.add("FULL_SHARD on several GPUs", check=f"not run: this process sees {needs.gpus()} GPU")
        return
    if not launcher() or not needs.there("mpi4py"):
        missing = "mpirun" if needs.there("mpi4py") else "mpi4py"
        run.add("FULL_SHARD on several GPUs", error=f"not run: {missing} missing (pip install mpi4py mpich)")
        return
    for title, job in jobs.items():
        one: dict[str, Any] = {}
        for count in [counts[0], *reversed(counts[1:])]:
            name = f"{title}, FULL_SHARD, {count} GPU{'s' if count > 1 else ''}"
            with run.guarded(name):
                first = job is next(iter(jobs.values()))
                given = {"job": job.settings(), "nbytes": nbytes if first and count > 1 else 0}
                given |= {"warmup": 2 if run.quick else 4, "steps": 3 if run.quick else 8}
                found = started([*runner, "-m", "bench.gpu.rank", json.dumps(given)], count)
                one = one or (found if count == 1 else {})
                add(run, name, job, count, found, one)


def started(words: list[str], count: int) -> dict:
    """The answer of rank 0. Raises RuntimeError with the line of the errors that says most."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    try:
        printed = mpirun(words, count, os.environ | _MPI | {"PYTHONPATH": path}, LIMIT)
    except RuntimeError as error:
        raise RuntimeError(_cause(str(error))) from None
    return json.loads(printed.splitlines()[-1])


def add(run: Run, name: str, job: Job, count: int, found: dict, one: dict) -> None:
    """The rows of a job. one: what a single GPU has found, or nothing."""
    rate = count * job.count / found["seconds"]
    check = of_peak(rate * job.flops_per_token(found["parameters"]) / count)
    check += f", {found['taken'] / 1e6:,.0f} MB taken, loss {found['loss']:.4f}"
    more: dict[str, Any] = {}
    if count > 1 and one:
        more = {"beside": f"{count} times one GPU", "theirs": count * job.count / one["seconds"]}
        off = abs(found["loss"] / one["loss"] - 1)  # other tokens, but all are drawn at random
        check += "" if off <= CLOSE else f" WRONG, on one GPU {one['loss']:.4f}"
    if count > 1:
        check += f", {carried(found['carriers'])}"
    run.add(name, rate, "tokens/s", check=check, **more)
    for call, (seconds, nbytes, right) in found["collectives"].items():
        bus = nbytes / seconds * (count - 1) / count / 1e9  # as nccl-tests has it
        message = f"{nbytes / seconds / 1e9:.4g} GB/s by size, {carried(found['carriers'])}"
        run.add(f"{call}, {count} GPUs", bus, "GB/s bus", check=message + ("" if right else " WRONG numbers"))


def carried(carriers: list[str]) -> str:
    """By which communicators; loud where one is not NCCL's, for then the host copies and nothing overlaps."""
    names = " and ".join(dict.fromkeys(carriers))
    return f"by {names}{'' if all(name.startswith('NCCL') for name in carriers) else ' WRONG, not NCCL'}"


def _cause(errors: str) -> str:
    """The last line that names an exception, for mpirun says more after it; else the last."""
    lines = [line for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return next(reversed(named or lines), "")
