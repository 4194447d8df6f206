"""Starts the processes of a PyTorch job on this machine, without torchrun; gives back what rank 0 printed."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)


def one_thread(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`environment` with one thread for every library that starts threads, and nothing else changed."""
    return {**environment, **ONE_THREAD}


class Alarm(RuntimeError):
    """SIGALRM has ended a rank, which had asked for it."""


def launch(
    arguments: Sequence[str], ranks: int, environment: Mapping[str, str], timeout: float = 1800
) -> str:
    """Run `python *arguments` in `ranks` processes that find one another by the usual variables.

    Raises RuntimeError with the errors of the first rank that fails, or at the timeout, and Alarm where
    SIGALRM ended one; none is left running.
    """
    common = {
        **environment,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        processes = [
            subprocess.Popen(
                [sys.executable, *arguments],
                env={**common, "RANK": str(rank)},
                stdout=output if rank == 0 else subprocess.DEVNULL,
                stderr=errors,
            )
            for rank in range(ranks)
        ]
        try:
            failed = _wait(processes, time.monotonic() + timeout)
            alarmed = any(process.poll() == -signal.SIGALRM for process in processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if alarmed:
            raise Alarm(f"{' '.join(arguments)}: {failed}")
        if failed:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(arguments)}: {failed}\n{errors.read()[-4000:]}")
        output.seek(0)
        return output.read()


def _wait(processes: list[subprocess.Popen], end: float) -> str:
    """Until all have ended: "". As soon as one fails, or at the time `end`: what happened."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return f"rank {rank} ended with exit code {code}"
        if None not in codes:
            return ""
        if time.monotonic() > end:
            return "took too long"
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
