"""nccl-tests' JSON, schema 3 (src/util.cu), of a run of ours: -J FILE.json.

Its own tool reads it (tools/analyze_perf_json.py). What is ours besides: `communicator` and `raw` of a
result, `p90_us` of single calls, and the name of the op in `experiment_name`. `env` has the variables of the
libraries that run here and no other: the rest may be secret.
"""

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardrt.comm import Communicator
from shardrt.comm import world as worlds
from shardrt.comm.objects import all_gather_object

from ..harness import communicators
from ..harness.environment import processor
from .ops import DTYPES, OPS
from .report import STAMP, bandwidths, bus_of, least_bandwidth

VERSION = 3
_SHOWN = ("NCCL_", "SHARDRT_", "OMP_", "OPENBLAS_", "NUMBA_", "MPICH_", "OMPI_", "UCX_", "CUDA_")
_PLACES = {"out": "out_of_place", "in": "in_place"}


def devices(control: Communicator, color: int, on_gpu: bool) -> list[dict]:
    """Which rank is where. Collective; the same on all ranks."""
    host = socket.gethostname().partition(".")[0]
    own = {"rank": control.rank, "group": color, "pid": os.getpid(), "hostname": host}
    device = communicators.device_of("nccl" if on_gpu else "cpu")
    if on_gpu:
        bus = device.identity.decode().split()[-1].rpartition(".")[0].lower()  # no function
        own |= {"device": device.index, "device_hex": bus, "device_info": "GPU"}
    else:
        own |= {"device": worlds.current().local_rank, "device_hex": "cpu", "device_info": processor()}
    return all_gather_object(control, own)


def device_text(d: dict) -> str:
    """nccl-tests' line about a rank."""
    return (
        f"#  Rank {d['rank']:2} Group {d['group']:2} Pid {d['pid']:6} on {d['hostname']:>10} device "
        f"{d['device']:2} [{d['device_hex']}] {d['device_info']}"
    )


def document(
    options: argparse.Namespace, ranks: Sequence[dict], lines: Sequence[dict], started: float
) -> dict[str, Any]:
    """The whole file."""
    wrong = sum(line["wrong"] or 0 for line in lines)
    return {
        "version": VERSION,
        "start_time": _clock(started),
        "args": sys.argv,
        "env": [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_SHOWN)],
        "nccl_version": _nccl(),
        "config": config(options) | {"devices": list(ranks)},
        "results": results(lines, options.iters * options.rounds),
        "out_of_bounds": {"count": wrong, "okay": _word(not wrong)},
        "average_bus_bandwidth": {"bandwidth": bus_of(lines), "okay": _enough(lines)},
        "errors": [],
        "end_time": _clock(time.time()),
    }


def config(options: argparse.Namespace) -> dict[str, Any]:
    """How the run was made. An iteration is one call: of -n calls in each of --rounds rounds."""
    step = {"step_bytes": options.stepbytes} if options.stepbytes else {"step_factor": options.stepfactor}
    return {
        "nthreads": options.nthreads,
        "ngpus": options.ngpus,
        "minimum_bytes": options.minbytes,
        "maximum_bytes": options.maxbytes,
        **step,
        "warmup_iters": options.warmup_iters,
        "iterations": options.iters * options.rounds,
        "aggregated_iterations": 1,
        "validation": options.check,
        "graph": 0,
        "blocking_collectives": _word(options.blocking),
        "per_iter_timing": _word(options.per_iter_timing),
        "per_iter_skip": options.per_iter_skip,
        "parallel_init": _word(options.parallel_init),
    }


def results(lines: Sequence[dict], iterations: int) -> list[dict]:
    """A result for each line of the table: records in a row that differ in their place alone."""
    found: list[dict] = []
    last = None
    for line in lines:
        names = ("communicator", "op", "dtype", "reduction", "root", "bytes")
        key, place = tuple(line[name] for name in names), _PLACES[line["place"]]
        if key != last or found[-1][place] is not None:  # sizes may be equal, as in the sweeps of -N
            found.append(_empty(line) | {"actual_iterations": iterations})
        last, result = key, found[-1]
        result[place] = _figures(line)
        if line.get("each"):
            result[f"{place}_per_iter"] = _each(line["each"])
        result["raw"][place] = {"time": line["raw_us"], "nwrong": line["raw_wrong"]}
    return found


def _empty(line: dict) -> dict:
    return {
        "size": line["bytes"],
        "count": line["count"],
        "type": DTYPES[line["dtype"]],
        "redop": line["reduction"],
        "root": f"{line['root']:6}",
        "communicator": line["communicator"],
        "out_of_place": None,
        "in_place": None,
        "raw": {},
        "experiment_name": OPS[line["op"]].title,
    }


def _figures(line: dict) -> dict:
    return {
        "time": line["time_us"],
        "alg_bw": line["algorithm_gb_s"],
        "bus_bw": line["bus_gb_s"],
        "nwrong": line["wrong"],
    }


def _each(each: dict) -> dict:
    """The slowest rank's time of each call, and each rank's; a rank is what nccl-tests calls a process."""
    times = each["times"]
    figures = {
        f"{name}_us": each[name] for name in ("min", "max", "avg", "p50", "p90", "p95", "p99", "stdev")
    }
    found = {"skipped_iterations": each["skipped"], **figures, "cv_pct": each["cv_pct"]}
    found["times_us"] = [max(of_ranks) for of_ranks in zip(*times, strict=True)]
    return found | ({"per_process_max_times_us": times} if len(times) > 1 else {})


def free(path: Path) -> Path:
    """A name that no file has: nccl-tests appends .0, .1, ... rather than overwrite one."""
    names = (path, *(path.with_name(f"{path.name}.{number}") for number in range(1000)))
    return next(name for name in names if not name.exists())


def write(path: Path, found: dict) -> None:
    """Write a document."""
    path.write_text(json.dumps(found) + "\n")


def _enough(lines: Sequence[dict]) -> str:
    """Of a run with NCCL_TESTS_MIN_BW."""
    least = least_bandwidth()
    return "unchecked" if least is None else _word(min(bandwidths(lines).values(), default=0.0) >= least)


def _word(value: object) -> str:
    """A truth value, which nccl-tests writes as text."""
    return "true" if value else "false"


def _clock(seconds: float) -> str:
    return time.strftime(STAMP, time.localtime(seconds))


def _nccl() -> int:
    """NCCL's version, 0 where none is loaded."""
    nccl = sys.modules.get("cupy.cuda.nccl") or sys.modules.get("cupy_backends.cuda.libs.nccl")
    version = getattr(nccl, "get_version", None)
    return int(version()) if version else 0
