"""What memory of a recorded program stands for: sums of sources, element by element.

A program that is recorded moves no values. Terms take their place: element i of a piece of memory is the sum
of scale * element (base + i) of each term's source. A source is a version of a unit's parameters, or what one
backward run gives as their gradient. Its elements are those of the unit's flat buffer (fsdp/layout.py).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardrt.simulate.ranks import Ranks

__all__ = [
    "Gradient",
    "Memory",
    "Packed",
    "Parameters",
    "Piece",
    "Received",
    "Term",
    "Unknown",
    "Value",
    "joined",
    "overlaid",
]


@dataclass(frozen=True)
class Parameters:
    """The parameters of a group after `version` updates."""

    group: str
    version: int

    def __str__(self) -> str:
        return f"the parameters of {self.group} after {self.version} update{'s' * (self.version != 1)}"


@dataclass(frozen=True)
class Gradient:
    """What one kernel adds to the gradient of a group ("": not known yet) in backward run `run`, on one rank.

    use: how many kernels have added to these elements in this run before.
    """

    group: str
    run: int
    use: int

    def __str__(self) -> str:
        if not self.group:
            return "what a kernel has added to memory outside of slots"
        return f"the gradient of {self.group} from backward run {self.run}"


@dataclass(frozen=True)
class Received:
    """What `rank`, which does something else, gives in a collective: the call `number` of a group."""

    group: str
    number: int
    rank: int

    def __str__(self) -> str:
        return f"what rank {self.rank} gives in call {self.number} of {self.group}"


@dataclass(frozen=True)
class Term:
    """scale * elements base, base + 1, ... of a source, summed over world ranks.

    ranks: None for parameters.
    factors: what the script scales it by, too: numbers, and addresses of numbers on the device.
    """

    source: Parameters | Gradient | Received
    base: int
    ranks: Ranks | None = None
    scale: float = 1.0
    factors: tuple[float | str, ...] = ()

    def moved(self, by: int) -> "Term":
        """The same, that many elements further."""
        return replace(self, base=self.base + by) if by else self

    def scaled(self, scale: float) -> "Term":
        """`scale` times as much."""
        return replace(self, scale=self.scale * scale) if scale != 1.0 else self


@dataclass(frozen=True)
class Unknown:
    """What an operation that has no rule makes of terms. operation: its name and site."""

    operation: str


@dataclass(frozen=True)
class Packed:
    """`count` elements in blocks of fewer bits (kernels/packed.py). parts: as Memory.elements gives them."""

    count: int
    parts: tuple["Piece", ...]


Value = tuple[Term, ...] | Packed | Unknown | None  # (): zeros; None: nothing that is followed


def joined(terms: Iterable[Term]) -> tuple[Term, ...]:
    """The sum of terms: equal ones add their scales, and those that differ in their ranks alone are one."""
    alike: dict[tuple, dict[Ranks | None, Term]] = {}
    for term in terms:
        same = alike.setdefault((term.source, term.base, term.factors), {})
        known = same.get(term.ranks)
        same[term.ranks] = term if known is None else replace(known, scale=known.scale + term.scale)
    found: list[Term] = []
    for same in alike.values():
        scales: dict[float, list[Term]] = {}
        for term in same.values():
            scales.setdefault(term.scale, []).append(term)
        for some in scales.values():
            every = [rank for term in some for rank in term.ranks or ()] if len(some) > 1 else []
            if every and len(set(every)) == len(every):
                some = [replace(some[0], ranks=Ranks.of(every))]
            found += [term for term in some if term.scale]
    return tuple(found)


@dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) with elements of `item` bytes."""

    start: int
    stop: int
    item: int
    value: Value

    def part(self, start: int, stop: int) -> "Piece":
        """Some of its bytes."""
        if (start, stop) == (self.start, self.stop):
            return self
        moved, value = (start - self.start) // self.item, self.value
        if isinstance(value, tuple):
            value = tuple(term.moved(moved) for term in value)
        return Piece(start, stop, self.item, value)

    def moved(self, by: int) -> "Piece":
        """The same place with what lies that many elements further."""
        moved = isinstance(self.value, tuple)
        return replace(self, value=tuple(term.moved(by) for term in self.value)) if moved else self

    def at(self, start: int, origin: int, item: int) -> "Piece":
        """The same elements, with `item` bytes each, as far behind `origin` as they are behind `start`."""
        first, last = ((edge - start) // self.item * item for edge in (self.start, self.stop))
        return Piece(origin + first, origin + last, item, self.value)


class Memory:
    """Pieces of memory without overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []  # of pieces, ascending
        self._pieces: dict[int, Piece] = {}

    def read(self, start: int, stop: int, item: int) -> list[Piece]:
        """The pieces that cover a range, of None where nothing is followed."""
        found, end = [], start
        for piece in self._meeting(start, stop):
            if end < piece.start:
                found.append(Piece(end, piece.start, item, None))
            end = min(stop, piece.stop)
            found.append(piece.part(max(start, piece.start), end))
        return found if end >= stop else [*found, Piece(end, stop, item, None)]

    def elements(self, start: int, stop: int, item: int) -> list[Piece]:
        """As `read`, with numbers of elements from 0 on in place of addresses."""
        return [piece.at(start, 0, 1) for piece in self.read(start, stop, item)]

    def has(self, start: int, stop: int) -> bool:
        """Whether anything is followed in a range."""
        return bool(self._meeting(start, stop))

    def write(self, start: int, stop: int, pieces: Iterable[Piece]) -> None:
        """Replace what a range has."""
        for old in self._meeting(start, stop):
            del self._pieces[old.start]
            self._starts.pop(bisect_left(self._starts, old.start))
            if old.start < start:
                self._add(old.part(old.start, start))
            if old.stop > stop:
                self._add(old.part(stop, old.stop))
        for piece in pieces:
            if piece.value is not None and piece.start < piece.stop:
                self._add(piece)

    def _meeting(self, start: int, stop: int) -> list[Piece]:
        first = max(0, bisect_right(self._starts, start) - 1)
        found = [self._pieces[each] for each in self._starts[first : bisect_left(self._starts, stop)]]
        return [piece for piece in found if piece.stop > start]

    def _add(self, piece: Piece) -> None:
        self._starts.insert(bisect_left(self._starts, piece.start), piece.start)
        self._pieces[piece.start] = piece


def overlaid(lists: list[list[Piece]]) -> list[tuple[int, int, list[Value]]]:
    """(start, stop, the value of each list there) of lists that cover the same bytes."""
    edges = sorted({edge for pieces in lists for piece in pieces for edge in (piece.start, piece.stop)})
    found, places = [], [0] * len(lists)
    for start, stop in zip(edges, edges[1:], strict=False):
        for n, pieces in enumerate(lists):
            places[n] += pieces[places[n]].stop <= start
        here = [pieces[place].part(start, stop).value for pieces, place in zip(lists, places, strict=True)]
        found.append((start, stop, here))
    return found
