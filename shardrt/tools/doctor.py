"""`python -m shardrt doctor [RUN]`: what became of the ranks of a run; or whether a machine is fit for one.

With `--hosts FILE`: whether those hosts are fit to train together.

Exit code 0 where all is well, 1 where a rank failed or the machine lacks something, 65 where nothing can be
read.
"""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from shardrt.faults.reports import LISTENING
from shardrt.tools import autopsy, hosts, machine
from shardrt.untrusted import Refused, say


def add_to(commands: Any) -> None:
    """Add `doctor` to argparse's subparsers."""
    message = "what became of the ranks of RUN; without RUN, what this machine has"
    parser = commands.add_parser("doctor", help=message, description=message)
    parser.add_argument("path", metavar="RUN", nargs="?", type=Path, help="a run's folder, runs/NAME")
    parser.add_argument("--hosts", metavar="FILE", type=Path, help="a host file: whether these fit together")
    parser.add_argument("--mpirun", default="", help="how to start processes on hosts, with its options")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.set_defaults(run=doctor)


def doctor(options: argparse.Namespace) -> int:
    """Print the report; returns the exit code."""
    if options.hosts is not None and options.path is not None:
        raise Refused("doctor: pass a run or --hosts FILE, not both")
    if options.hosts is not None:
        module, command = hosts, shlex.split(options.mpirun) or hosts.launcher()
        found = hosts.examine(hosts.hosts_of(options.hosts), command)
    elif options.path is None:
        module, found = machine, machine.examine()
    else:
        module, found = autopsy, autopsy.examine(options.path, LISTENING)
    say(*([json.dumps(found)] if options.json else module.lines(found)), lines=True)
    return found["code"]
