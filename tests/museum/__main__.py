"""Lists the bugs, or prints what `shardrt prove` says of one.

python -m tests.museum
python -m tests.museum DeepSpeed#5606
"""

import argparse
import sys
from collections.abc import Sequence

from tests.museum.checks import said_with
from tests.museum.exhibits import EXHIBITS, MORE
from tests.museum.page import PAGE, renewed


def main(arguments: Sequence[str]) -> None:
    """Print them."""
    parser = argparse.ArgumentParser(prog="python -m tests.museum", description=__doc__.partition("\n")[0])
    named = {bug.name: bug for bug in (*EXHIBITS, *MORE)}
    parser.add_argument("name", nargs="?", choices=named, metavar="NAME", help="of a bug; none: list them")
    parser.add_argument("--change", action="store_true", help="print the change that makes it, too")
    parser.add_argument("--page", action="store_true", help="write table and reports into the page")
    options = parser.parse_args(arguments)
    if options.page:
        PAGE.write_text(renewed(PAGE.read_text()))
        return
    if options.name is None:
        for bug in EXHIBITS:
            print(f"{bug.name:20} {bug.check or 'none':10} {bug.did}")
        return
    bug = named[options.name]
    if options.change:
        print(f"{bug.title}\n{bug.link}\n", *bug.changes, "", sep="\n")
    print(said_with(bug))


if __name__ == "__main__":
    main(sys.argv[1:])
