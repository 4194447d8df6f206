"""`shardrt hub`: the hub of DiLoCo, through which jobs on several hosts exchange outer gradients."""

import argparse
import sys
from contextlib import suppress

from shardrt.parallel.hub import Hub
from shardrt.untrusted import say


def add_to(commands: argparse._SubParsersAction) -> None:
    """Add the command."""
    parser = commands.add_parser("hub", help="relay DiLoCo's outer gradients between jobs")
    parser.add_argument("hosts", type=int, help="number of jobs, one on each host")
    parser.add_argument("--address", default="127.0.0.1", help="to listen at; 0.0.0.0 for all networks")
    parser.add_argument("--port", type=int, default=29400, help="to listen at; 0 for any that is free")
    parser.add_argument(
        "--deadline", type=float, default=60.0, help="seconds that an outer step waits for late hosts"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted; gives the exit code."""
    try:
        hub = Hub(options.hosts, options.deadline)
        port = hub.listen(options.address, options.port)
    except (ValueError, OSError, OverflowError) as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    say(f"hub: {options.hosts} hosts, at {options.address}:{port}")
    sys.stdout.flush()
    with suppress(KeyboardInterrupt):
        hub.serve()
    return 0
