"""Which communicators a run can time (-k), which ranks it has (-t, -g), and the communicators themselves."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardrt import device as devices
from shardrt.comm import Communicator, create, mpi_world
from shardrt.comm import world as worlds
from shardrt.comm.backends import CARRIERS, for_device, kinds
from shardrt.device import Device, cuda

from .command_line import check_least, words

_MOST_THREADS = 128  # ranks of a thread world (shardrt.comm.thread)
Wrap = Callable[[Communicator], Communicator]


def add_options(add: Callable) -> None:
    """Add -k, -t and -g."""
    known = f"{', '.join(kinds())}, or all that fit this run (auto: nccl where each rank has a GPU)"
    add("-k", "--communicators", type=words, default=["auto"], metavar="A,B", help=known)
    threads = "ranks as threads, without mpirun (1)"
    add("-t", "--nthreads", type=int, default=1, metavar="N", help=threads)
    gpus = "GPUs of a thread: -t times -g ranks are threads of this process (1)"
    add("-g", "--ngpus", type=int, default=1, metavar="N", help=gpus)


def ranks_of(options: argparse.Namespace) -> tuple[int, int]:
    """(ranks of this run, of which so many are threads of this process or 0)."""
    threads = options.nthreads * options.ngpus
    return (threads, threads) if threads > 1 else (launched_ranks(), 0)


def launched_ranks() -> int:
    """The processes that the launcher started; 1 without one."""
    launched = mpi_world.launch()
    return launched.size if launched else 1


def ranks_here(options: argparse.Namespace) -> int:
    """The ranks of this run on this machine."""
    launched = mpi_world.launch()
    return ranks_of(options)[1] or (launched.local_size if launched else 1)


def check(options: argparse.Namespace) -> None:
    """Replace `options.communicators` by the kinds to time. Raises ValueError where one can't be."""
    check_least({"-t": (options.nthreads, 1), "-g": (options.ngpus, 1)})
    ranks, threads = ranks_of(options)
    if threads > _MOST_THREADS:
        raise ValueError(f"-t, -g: must make at most {_MOST_THREADS} ranks, got {threads}")
    launched = mpi_world.launch()
    if threads and under_mpi():
        flag = "-t" if options.nthreads > 1 else "-g"
        raise ValueError(f"{flag}: ranks are threads or processes, not both; leave out mpirun or {flag}")
    unfit = {kind: _unfit(kind, ranks, bool(threads), launched) for kind in kinds() if kind != "auto"}
    fitting = [kind for kind, why in unfit.items() if not why]
    if options.communicators == ["all"]:
        options.communicators = fitting
        return
    for kind in options.communicators:
        if kind not in kinds():
            raise ValueError(f"-k: {kind!r} is unknown; known are {', '.join(kinds())}, all")
        if why := unfit.get(kind):
            raise ValueError(f"-k: {kind!r} {why}")
    auto = fitting[0] if len(fitting) == 1 else "nccl" if "nccl" in fitting else "auto"  # what it is here
    options.communicators = [auto if kind == "auto" else kind for kind in options.communicators]


def device_of(kind: str) -> Device:
    """The device of the arrays that a communicator of this kind carries, on this rank; now current."""
    name = "cpu"
    if kind in CARRIERS:
        name = f"cuda:{worlds.current().local_rank % devices.KINDS['cuda'].count()}"
    device = devices.get(name)
    devices.set_current(device)
    return device


@contextmanager
def opened(
    kind: str, wrap: Wrap = lambda communicator: communicator, color: int | None = None
) -> Iterator[tuple[Communicator, Device]]:
    """A with block that has a communicator, and the device of its arrays; it is closed then. Collective.

    color: of this rank's group, for a communicator over that group; None: over all ranks of this world.
    """
    device = device_of(kind)
    host = create("auto" if kind in CARRIERS else kind)
    made = [for_device(host, device, kind, "gather") if kind in CARRIERS else host]
    if color is not None:
        made.append(made[0].split(color, made[0].rank))
    yield wrap(made[-1]), device
    for each in reversed(made):  # not after an error: other ranks may not come
        each.close()


def _unfit(kind: str, ranks: int, threads: bool, launched: mpi_world.Launch | None) -> str:
    """Why a communicator can't carry the ranks of this run; "" where it can."""
    if kind in CARRIERS and not cuda.count():
        return "is for arrays of a GPU, and there is none here"
    if kind == "nccl" and cuda.count() < (ranks if threads else launched.local_size if launched else 1):
        return "needs a GPU for each rank"
    if threads:
        fits = kind == "thread" or kind in CARRIERS
        return "" if fits else "does not fit ranks that are threads (-t, -g); 'thread' does"
    if kind == "thread":
        return "needs ranks that are threads: -t N, without mpirun"
    if ranks == 1:
        why = "has no peer to talk to: this run is of one rank; start it with mpirun -n 2"
        return "" if kind == "single" else why
    if kind == "single":
        return f"is of one rank, and this run is of {ranks}"
    if kind in ("shm", "ipc") and launched.local_size != launched.size:
        return "needs all ranks on one node"
    return ""


def under_mpi() -> bool:
    """Whether this process is one of several ranks of mpirun."""
    return launched_ranks() > 1
