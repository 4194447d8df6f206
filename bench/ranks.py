"""Starts shardrt's ranks as processes of mpirun, one thread each, and waits for what they print."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from .peers.launch import one_thread


def launcher() -> str:
    """The mpirun next to this Python, or else the system's mpirun; "" if there is none."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun") or ""


def mpirun(
    words: Sequence[str], ranks: int, environment: Mapping[str, str] | None = None, timeout: float = 1800
) -> str:
    """What `mpirun -n ranks python *words` prints. Raises RuntimeError if it fails or takes `timeout` s."""
    if not (found := launcher()):
        raise RuntimeError("mpirun was not found next to python or on PATH: pip install mpich")
    command = [found, "-n", str(ranks), sys.executable, *words]
    environment = environment or one_thread()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # mpirun ends its ranks
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
            raise RuntimeError(f"{' '.join(words[:2])}: still running after {timeout:.0f} s") from None
    if process.returncode:
        message = errors.strip().removeprefix("error: ")
        raise RuntimeError(message[-4000:] or f"{' '.join(words)}: exit code {process.returncode}")
    return output


def step(words: Sequence[str], ranks: int) -> dict:
    """The figures of `bench.step *words` on so many ranks."""
    return json.loads(mpirun(["-m", "bench.step", *words, "--json"], ranks).splitlines()[-1])


@contextmanager
def refusal() -> Iterator[None]:
    """A block of a program that starts ranks: what is wrong with its options, or with a run, ends it.

    (Of several ranks one speaks: `shardrt.train.errors.one_line`, which this must not import, for torch's
    processes would inherit what shardrt sets.)
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
