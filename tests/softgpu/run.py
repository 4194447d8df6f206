"""Runs a program on the GPU emulator, each rank of mpirun as a process with a GPU of its own.

    mpirun -n 2 python -m tests.softgpu.run -m models.train --steps 3
    python -m tests.softgpu.run program.py
    python -m tests.softgpu.run -c "print(1)"

start.py names the variables that choose the GPUs and the order in which streams take turns.
"""

import argparse
import atexit
import ctypes
import runpy
import sys

from shardrt.comm import mpi_world
from tests.softgpu import rooms
from tests.softgpu.start import start


def main(arguments: list[str]) -> int:
    """Its exit code."""
    parser = argparse.ArgumentParser("python -m tests.softgpu.run", description="The rest is the program's.")
    parser.add_argument("-m", metavar="MODULE", help="a program")
    parser.add_argument("-c", metavar="CODE", help="likewise")
    parser.add_argument("file", nargs="?", help="likewise")
    parser.parse_args(arguments[: 2 if arguments[:1] in (["-m"], ["-c"]) else 1])
    if not arguments:
        parser.error("no program")
    launched = mpi_world.launch()
    start(processes=launched.local_size if launched else 1)
    kind, *rest = arguments
    try:
        if kind == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = arguments
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # which may take the job down
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    atexit._run_exitfuncs()  # MPI's end: after it nobody reads what this rank has left
    rooms.clear()
    sys.stdout.flush()
    sys.stderr.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if code == 0 and mpi is not None and not mpi.Is_finalized():
        mpi.Finalize()
    # Not Python's end, where CuPy's clean-up would call CUDA. But C's: there MPICH says to its launcher that
    # this rank has finished. The launcher kills the other ranks when one ends without saying so.
    ctypes.CDLL(None).exit(code)
