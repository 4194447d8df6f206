"""`shardrt`, or `python -m shardrt`: checkpoints, data, and views of runs. One process, no MPI."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from shardrt import __version__
from shardrt.checkpoint import command
from shardrt.checkpoint.manifest import Damaged
from shardrt.tools import config, doctor, plan, races, report, run, simulate, trace, watch
from shardrt.tools.runs import BadRun
from shardrt.train import data_command
from shardrt.train.errors import describe_error
from shardrt.train.tokens import BadTokens
from shardrt.untrusted import Refused, printable, say

DATA = 65  # a file is damaged, or none is there


class _Parser(argparse.ArgumentParser):
    """The bad argument may be a file name that a shell has put there for a `*`."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def main(arguments: Sequence[str]) -> int:
    """Run one command; gives the exit code."""
    parser = _Parser(prog="shardrt", description=__doc__)
    parser.add_argument("--version", action="version", version=f"shardrt {__version__}")
    commands = parser.add_subparsers(title="commands", required=True)
    command.add_to(commands)
    data_command.add_to(commands)
    for tool in (run, doctor, report, watch, trace, races, simulate, plan, config):
        tool.add_to(commands)
    options = parser.parse_args(arguments or ["--help"])
    try:
        return options.run(options)
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return 0
    except (Damaged, BadTokens, BadRun, Refused, OSError) as error:
        say(f"error: {describe_error(error)}", file=sys.stderr)
        return DATA


def entry() -> int:
    """The command `shardrt`."""
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(entry())
