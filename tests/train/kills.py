"""Kills runs with SIGKILL, some times each, resumes them, and compares every number with a run left alone."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.train.test_resume import killed_and_resumed


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.train.kills", description=__doc__)
    parser.add_argument("runs", type=int, nargs="?", default=50, help="50 if left out")
    parser.add_argument("kills", type=int, nargs="?", default=4, help="of each: 4 if left out")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = killed_and_resumed(Path(folder), given.runs, given.kills)
    print(
        json.dumps(
            {"runs": given.runs, "kills": done, "differences": 0, "seconds": round(time.monotonic() - began)}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
