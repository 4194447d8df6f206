"""`python -m shardrt doctor [RUN]`: what became of the ranks of a run; or whether a machine is fit for one.

Exit code 0 where all is well, 1 where a rank failed or the machine lacks something, 65 where nothing can be
read.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from shardrt.tools import autopsy, machine
from shardrt.untrusted import say


def add_to(commands: Any) -> None:
    """Add `doctor` to argparse's subparsers."""
    told = "what became of the ranks of RUN; without RUN, what this machine has"
    parser = commands.add_parser("doctor", help=told, description=told)
    parser.add_argument("path", metavar="RUN", nargs="?", type=Path, help="a run's folder, runs/NAME")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.set_defaults(run=doctor)


def doctor(options: argparse.Namespace) -> int:
    """Print the report; gives the exit code."""
    module = machine if options.path is None else autopsy
    found = machine.examine() if options.path is None else autopsy.examine(options.path)
    say(*([json.dumps(found)] if options.json else module.lines(found)), lines=True)
    return found["code"]
