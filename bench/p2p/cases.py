"""What is measured: a test at one size between given pairs of ranks. Planned before MPI starts."""

import argparse
from dataclasses import dataclass
from itertools import permutations

from ..harness import picture
from ..harness.command_line import check_known, check_least, check_memory
from ..harness.communicators import ranks_here
from ..harness.sizes import sizes_of

TESTS = ("latency", "bandwidth", "bibw", "message_rate", "matrix")
ANSWER = 4  # bytes with which the receiver of a window answers, as in osu_bw
LARGE = 8192  # bytes of a message above which a round has a fifth of the windows, as in osu_bw


@dataclass(frozen=True)
class Case:
    """One test at one size. Of each pair (first, second) the first rank's time counts."""

    test: str
    nbytes: int
    pairs: tuple[tuple[int, int], ...]
    window: int

    @property
    def does(self) -> str:
        """The test, in a matrix or not."""
        return self.test.removeprefix("matrix_")

    @property
    def answer(self) -> int:
        """Bytes that come back to the first rank."""
        return {"latency": self.nbytes, "bibw": self.window * self.nbytes}.get(self.does, ANSWER)

    @property
    def messages(self) -> int:
        """Of an iteration, without answers. The time of latency is that of one of its two messages."""
        return len(self.pairs) * self.window * (2 if self.does == "bibw" else 1)

    @property
    def firsts(self) -> list[int]:
        """The ranks that send first."""
        return [first for first, _ in self.pairs]

    def iterations(self, asked: int) -> int:
        """Of a round."""
        return -(-asked // 5) if self.does != "latency" and self.nbytes > LARGE else asked

    def peer(self, rank: int) -> int | None:
        """Of this rank; None: it is in no pair."""
        return dict([*self.pairs, *((second, first) for first, second in self.pairs)]).get(rank)


def cases_of(options: argparse.Namespace, ranks: int) -> list[Case]:
    """All of a command line. Raises ValueError, and OSError where the picture can't be written."""
    tests = list(dict.fromkeys(options.tests or TESTS))
    check_known("test", tests, TESTS)
    if ranks < 2:
        raise ValueError("p2p: needs 2 ranks, and this run has one; start it with mpirun -n 2, or -t 2")
    check_least({"-W": (options.window, 1)})
    pair, sizes = _pair(options.pair, ranks), sizes_of(options)
    if options.picture is not None and "matrix" not in tests:
        raise ValueError("--picture: draws the matrix, which is not among the tests; add matrix")
    picture.check(options)
    check_memory("-e, -W", 2 * options.window * options.maxbytes, ranks_here(options))
    halves = tuple((rank, rank + ranks // 2) for rank in range(ranks // 2))
    found = []
    for test in tests:
        if test == "matrix":
            found += _matrix("latency", sizes[0], ranks, 1)
            found += _matrix("bandwidth", options.maxbytes, ranks, options.window)
        else:
            pairs = halves if test == "message_rate" else (pair,)
            found += [Case(test, size, pairs, 1 if test == "latency" else options.window) for size in sizes]
    return found


def _matrix(does: str, size: int, ranks: int, window: int) -> list[Case]:
    """A case for every ordered pair of ranks: the others wait."""
    return [Case(f"matrix_{does}", size, (pair,), window) for pair in permutations(range(ranks), 2)]


def _pair(text: str | None, ranks: int) -> tuple[int, int]:
    if text is None:
        return 0, ranks - 1
    pair = tuple(int(word) if word.isdecimal() else ranks for word in text.split(","))
    if len(pair) != 2 or max(pair) >= ranks or pair[0] == pair[1]:
        raise ValueError(f"--pair: must be two ranks of {ranks} (0 to {ranks - 1}) such as 0,1, got {text!r}")
    return pair
