"""Every failure in every phase at 2, 3 and 4 ranks, and a JSON line of how long each kind took to end."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.failures.matrix import LIMIT, cases, check, prepare
from tests.ranks import add_launcher, mpirun_path


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.failures", description=__doc__)
    parser.add_argument("sizes", type=numbers, nargs="?", default="2,3,4", help="of jobs: 2,3,4 if left out")
    add_launcher(parser)
    given = parser.parse_args(arguments)
    launcher, python = given.mpirun, given.python
    began, seconds, wrong = time.monotonic(), {}, []
    chosen = cases(given.sizes)
    with tempfile.TemporaryDirectory() as name:
        folder = prepare(Path(name))
        for case in chosen:
            try:
                seconds.setdefault(case.failure, []).append(check(case, folder, launcher, python))
            except AssertionError as error:
                wrong.append(str(case))
                print(error, file=sys.stderr, flush=True)
    version = subprocess.run([launcher or mpirun_path(), "--version"], capture_output=True, text=True)
    result = {
        "mpirun": next((" ".join(line.split()) for line in version.stdout.split("\n") if "." in line), ""),
        "sizes": ",".join(map(str, given.sizes)),
        "cases": len(chosen),
        "wrong": wrong,
        "limit_s": LIMIT,
        "seconds_to_the_end": {
            failure: {"median": round(sorted(took)[len(took) // 2], 2), "max": round(max(took), 2)}
            for failure, took in seconds.items()
        },
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(result))
    return bool(wrong)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
