"""`pytest -p tests.hosts.plugin PATHS`: ranks that tests start as threads are processes, on two hosts.

Two ranks have a host each, of four each host has two. For tests whose functions and results can be pickled,
and that leave what they share with their ranks in files below pytest's folders. One rank runs as before.
"""

import os
import pickle
import sys
import tempfile
from pathlib import Path

import pytest

from shardrt.comm import mpi_world, thread
from tests import ranks
from tests.hosts.hosts import Hosts

_threads = thread.run
_folder = Path()
_COUNT = 2  # hosts
_jobs = 0  # that were started on them


def run(size, function, *args, **kwargs):
    """As thread.run. Raises the first error of a rank."""
    global _jobs
    if size == 1:
        return _threads(size, function, *args, **kwargs)
    _jobs += 1
    with tempfile.TemporaryDirectory(dir=_folder) as name:
        task = Path(name) / "task"
        task.write_bytes(pickle.dumps((os.getcwd(), function, args, kwargs)))
        slots = ",".join(f"node{host}:{-(-size // _COUNT)}" for host in range(_COUNT))
        done = ranks.mpirun(size, ["-m", "tests.hosts.plugin", name], HOSTS_SLOTS=slots)
        if errors := sorted(Path(name).glob("error-*"), key=lambda file: file.stat().st_mtime_ns):
            raise pickle.loads(errors[0].read_bytes())
        assert done.returncode == 0, done.stdout + done.stderr
        return [pickle.loads((Path(name) / f"of-{rank}").read_bytes()) for rank in range(size)]


@pytest.fixture(autouse=True, scope="session")
def _on_hosts(tmp_path_factory):
    global _folder
    _folder = tmp_path_factory.getbasetemp()
    with Hosts(_COUNT, shared=[_folder]) as made, made.launching():
        thread.run = run
        yield
        thread.run = _threads
        assert _jobs, "these tests have started no ranks on hosts"


def main(name: str) -> None:
    """A rank."""
    here = mpi_world.of_mpi()
    folder, function, args, kwargs = pickle.loads((Path(name) / "task").read_bytes())
    os.chdir(folder)
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        (Path(name) / f"error-{here.rank}").write_bytes(pickle.dumps(error))
        raise
    (Path(name) / f"of-{here.rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
