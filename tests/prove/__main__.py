"""`python -m tests.prove [--settings N] [--mutations N]`: the brute force of all settings, and all mutations.

Both by default: 200 settings, 500 mutations. Exit code 1 where a program is right and not proved, or a
mutation is missed.
"""

import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator

from tests.prove.integers import truth_of
from tests.prove.mutants import KINDS, mutants, result_of, unexplained
from tests.prove.settings import proof_of, setting


def main() -> int:
    parser = ArgumentParser("python -m tests.prove", description=__doc__.splitlines()[0])
    parser.add_argument("--settings", type=int, default=None, metavar="N", help="how many settings (200)")
    parser.add_argument("--mutations", type=int, default=None, metavar="N", help="how many mutations (500)")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations (0)")
    options = parser.parse_args()
    if options.settings is None and options.mutations is None:
        options.settings, options.mutations = 200, 500
    wrong = [*_settings(options.settings or 0), *_mutations(options.mutations or 0, options.seed)]
    return 1 if wrong else 0


def _settings(count: int) -> Iterator[str]:
    found = Counter()
    for seed in range(count):
        given = setting(seed)
        differences, proof = truth_of(given).differences(), proof_of(given)
        proved = not proof.found_by and proof.weights == {1 / given.divided_by}
        found["right" if not differences else "wrong", "proved" if proved else "not proved"] += 1
        if differences or not proved:
            line = f"setting {seed}: {given}"
            said = [*differences[:2], *map(str, proof.findings[:2]), *proof.order[:1], proof.raised]
            print("\n    ".join([line, *filter(None, said)]), flush=True)
            yield line
    for (truth, proof), number in sorted(found.items()):
        print(f"{number:5} settings {truth} on real ranks, {proof}")


def _mutations(count: int, seed: int) -> Iterator[str]:
    columns = (
        "made",
        "change",
        "found",
        "gradients",
        "races",
        "order",
        "raises",
        "equivalent",
        "missed",
        "other",
    )
    table = {kind: Counter() for kind in KINDS}
    for mutant in mutants(count, seed):
        result = result_of(mutant)
        row = table[mutant.kind]
        row.update(["made", *result.proof.found_by, *["change"] * bool(result.differences)])
        row.update([result.verdict if result.verdict in columns else "other"])
        if why := unexplained(result):
            line = f"{why}: {mutant}"
            said = [str(mutant.setting), *result.differences[:1], *map(str, result.proof.findings[:1])]
            print("\n    ".join([line, *said]), flush=True)
            yield line
    if count:
        print("".join([f"{'kind':20}", *(f"{name:>11}" for name in columns)]))
        for kind, row in [*table.items(), ("all", sum(table.values(), Counter()))]:
            print("".join([f"{kind:20}", *(f"{row[name]:11}" for name in columns)]))


if __name__ == "__main__":
    sys.exit(main())
