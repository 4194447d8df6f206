"""Kills 50 runs four times each with SIGKILL, resumes them, and compares every number with a run left alone.

python -m tests.train.kills [RUNS [KILLS]]
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from tests.train.test_resume import killed_and_resumed


def main(runs: int = 50, kills: int = 4) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = killed_and_resumed(Path(folder), runs, kills)
    print(
        json.dumps(
            {"runs": runs, "kills": done, "differences": 0, "seconds": round(time.monotonic() - began)}
        )
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
