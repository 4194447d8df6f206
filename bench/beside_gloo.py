"""A benchmark whose ranks run PyTorch's collectives on gloo beside ours: its start, and PyTorch's group."""

import argparse
import json
import socket
import sys
from collections.abc import Callable

from bench import ranks
from bench.environment import facts
from bench.quiet import announce, watched
from shardrt.comm import Communicator, world
from shardrt.comm.talk import from_first
from shardrt.train.errors import USAGE, one_line


def over_ranks(module: str, options: argparse.Namespace, measured: Callable[[], list[dict]]) -> dict | None:
    """Facts and rows of `module`, run again on options.ranks by mpirun. None there, where rows are printed.

    measured: gives the rows on rank 0, nothing elsewhere.
    """
    if world.launch() is not None:
        rows = measured()
        if rows:
            print(json.dumps({"rows": rows}))
        return None
    announce(1, options.patience)
    command = ["-m", module, *sys.argv[1:]]
    with one_line(USAGE, kinds=(RuntimeError,)):
        found = watched(lambda: json.loads(ranks.mpirun(command, options.ranks)), options.patience)
    return facts(" ".join(["python", *command])) | {"ranks": options.ranks, "rounds": options.rounds} | found


def joined(own: Communicator) -> object:
    """torch.distributed, with gloo among the same ranks. Collective."""
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = from_first(own, free.getsockname()[1])
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=own.rank, world_size=own.size
    )
    return torch.distributed
