"""Several sources of text with weights as one corpus: the source of sample n is a function of n alone.

The schedule is Tijdeman's (The chairman assignment problem, 1980): after any number of samples each source
has given its share of them, to less than one sample. It is periodic, so a table holds it, and a run resumes
anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from hashlib import sha256
from math import lcm
from pathlib import Path
from re import fullmatch
from typing import Any

import numpy as np

from shardrt.train.data import Corpus
from shardrt.train.filearray import FileArray, Sliced

__all__ = ["Mixture", "Source", "schedule", "sources"]

PERIOD = 1 << 16  # samples at most until the schedule begins again; weights are rounded to fit
MOST = 1000  # sources


@dataclass(frozen=True)
class Source:
    """A file or a folder, and its weight, if it has one."""

    path: Path
    weight: Fraction | None = None


def sources(data: Sequence[Path]) -> list[Source]:
    """The sources that settings name: PATH, or PATH:WEIGHT for all of them, as a.tokens:0.7 b.tokens:0.3.

    Raises:
        ValueError: naming a weight that is 0, or has too many digits, and where some have none.
    """
    found = []
    for path in data:
        match = fullmatch(r"(.+):([0-9]*\.?[0-9]+)", str(path))
        if match is None:
            found.append(Source(Path(path)))
            continue
        weight = Fraction(Decimal(match[2])) if len(match[2]) <= 18 else Fraction(0)
        if not weight:
            raise ValueError(f"data: {path}: the weight must be above 0, and have at most 18 digits")
        found.append(Source(Path(match[1]), weight))
    without = [source.path for source in found if source.weight is None]
    if without and len(without) < len(found):
        raise ValueError(f"data: {without[0]} has no weight, and others have; write {without[0]}:WEIGHT")
    if len(found) > MOST:
        raise ValueError(f"data: {len(found)} sources; there may be {MOST}")
    return found


def schedule(weights: Sequence[Fraction | int]) -> np.ndarray:
    """The source of each sample in a period, int64. Its length is the least in which all have whole shares.

    Weights whose period is longer than PERIOD are rounded to it, and each source has at least one sample.
    """
    counts = _counts(weights)
    period, many = sum(counts), len(counts)
    if many == 1:
        return np.zeros(1, np.int64)
    # In n samples a source of count c gave x. Of those behind, c n / period - x >= 1 / spare, the next is the
    # source which would first be behind by 1 - 1 / spare. All numbers are integers below 2^53.
    spare, owed, share = 2 * many - 2, np.zeros(many, np.int64), np.array(counts, np.int64)
    chosen = np.empty(period, np.int64)
    for sample in range(period):
        owed += share  # period * (c n / period - x)
        left = (period * (spare - 1) - owed * spare) / share
        chosen[sample] = np.argmin(np.where(owed * spare >= period, left, np.inf))
        owed[chosen[sample]] -= period
    return chosen


def _counts(weights: Sequence[Fraction | int]) -> list[int]:
    """Samples of each source in a period: the weights as integers without a common divisor."""
    total = sum(weights)
    exact = [Fraction(weight) / total for weight in weights]
    period = lcm(*(share.denominator for share in exact))
    if period <= PERIOD:
        return [int(share * period) for share in exact]
    counts = [max(1, int(share * PERIOD)) for share in exact]
    rest = [share * PERIOD - count for share, count in zip(exact, counts, strict=True)]
    while sum(counts) < PERIOD:  # the largest remainders
        most = rest.index(max(rest))
        counts[most], rest[most] = counts[most] + 1, rest[most] - 1
    return counts


@dataclass(frozen=True, eq=False)
class Mixture(Corpus):
    """Corpora as one: their parts to train on one after the other, and their held-out parts."""

    parts: tuple[Corpus, ...] = ()
    table: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))

    def gzip_bits_per_byte(self) -> float | None:
        """None: the held-out texts are of several kinds."""
        return None

    def starts(self, samples: range, window: int, seed: int) -> list[int]:
        """As Corpus: each source goes through its own epochs."""
        begins = _begins([part.train.size for part in self.parts])
        found = []
        for sample in samples:
            source, own = self._sample(sample)
            part = self.parts[source]
            found += [begins[source] + start for start in part.starts(range(own, own + 1), window, seed)]
        return found

    def _sample(self, sample: int) -> tuple[int, int]:
        """(the source of a sample, its number among those of the source)."""
        period, within = divmod(sample, self.table.size)
        source = int(self.table[within])
        return source, period * self._totals[source] + int(self._before[within])

    @property
    def shares(self) -> list[float]:
        """Of each source, of all samples."""
        return [total / self.table.size for total in self._totals]

    def taken(self, samples: int) -> list[int]:
        """How many of the first `samples` each source gives."""
        periods, within = divmod(samples, self.table.size)
        inside = np.bincount(self.table[:within], minlength=len(self.parts)).tolist()
        return [periods * total + more for total, more in zip(self._totals, inside, strict=True)]

    def described(self, samples: int, window: int) -> list[str]:
        """A line for each source: what it gives of the first `samples`."""
        lines = []
        for part, share, count in zip(self.parts, self.shares, self.taken(samples), strict=True):
            epochs = count / part.windows(window)
            lines.append(f"{part.source}: {100 * share:.4g} % of the samples, {count}, {epochs:.3g} epochs")
        return lines

    def facts(self) -> dict[str, Any]:
        """For logs and checkpoints: what each source gives, of how many samples."""
        return {
            "mixture": [
                f"{part.source}: {total}/{self.table.size}"
                for part, total in zip(self.parts, self._totals, strict=True)
            ]
        }

    def named(self, names: Sequence[str]) -> "Mixture":
        """As Corpus: each source by its own."""
        named = [replace(part, source=name) for part, name in zip(self.parts, names, strict=True)]
        return replace(self, parts=tuple(named))

    def __post_init__(self) -> None:
        totals = np.bincount(self.table, minlength=len(self.parts))
        before = np.empty_like(self.table)
        for source, total in enumerate(totals):
            before[self.table == source] = np.arange(total)
        object.__setattr__(self, "_totals", totals.tolist())
        object.__setattr__(self, "_before", before)


def mixed(parts: Sequence[Corpus], weights: Sequence[Fraction | None]) -> Mixture:
    """Corpora as one. Without weights each gives as its size.

    Raises:
        ValueError: for corpora of different tokenizers, or end tokens.
    """
    first = parts[0]
    for part in parts[1:]:
        if part.tokenizer.split()[1:] != first.tokenizer.split()[1:] or part.end != first.end:
            raise ValueError(
                f"data: {part.source} was made by {part.tokenizer} with the end token {part.end}, but "
                f"{first.source} by {first.tokenizer} with {first.end}; sources of a run must agree"
            )
    sizes = [part.train.size for part in parts]
    chosen = [size if weight is None else weight for size, weight in zip(sizes, weights, strict=True)]
    tokens = [part.train.size + part.held_out.size for part in parts]
    text = sum(count * part.bytes_per_token for count, part in zip(tokens, parts, strict=True))
    digest = sha256("\n".join(part.digest for part in parts).encode()).hexdigest()
    return Mixture(
        source=f"{len(parts)} sources",
        digest=f"sha256 {digest}",
        train=Joined([part.train for part in parts]),
        held_out=Joined([part.held_out for part in parts]),
        kind="tokens" if any(part.kind == "tokens" for part in parts) else "bytes",
        bytes_per_token=text / sum(tokens),
        documents=_documents(parts),
        end=first.end,
        tokenizer=first.tokenizer,
        parts=tuple(parts),
        table=schedule(chosen),
    )


class Joined(Sliced):
    """Arrays one after the other, as one; a slice is a view, and np.asarray reads it, as FileArray's."""

    def __init__(self, arrays: Sequence[np.ndarray | FileArray]) -> None:
        self._arrays = list(arrays)
        self._begins = np.array(_begins([array.size for array in arrays]), np.int64)
        self.size = sum(array.size for array in arrays)
        self.dtype = np.result_type(*(array.dtype for array in arrays))

    def __str__(self) -> str:
        return "several sources"

    def cut(self, start: int, stop: int) -> Any:
        """As Sliced."""
        taken, number = [], int(np.searchsorted(self._begins, start, side="right")) - 1
        while start < stop:
            array, begin = self._arrays[number], int(self._begins[number])
            end = min(stop, begin + array.size)
            if end > start:
                taken.append(array[start - begin : end - begin])
            start, number = max(start, end), number + 1
        return taken[0] if len(taken) == 1 else Joined(taken or [self._arrays[0][:0]])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All of it, read now. Raises OSError as FileArray does."""
        read = np.concatenate([np.asarray(array) for array in self._arrays])
        return read if dtype is None else read.astype(dtype, copy=False)


def _begins(sizes: Sequence[int]) -> list[int]:
    return np.cumsum([0, *sizes[:-1]], dtype=np.int64).tolist()


def _documents(parts: Sequence[Corpus]) -> np.ndarray | None:
    """Where documents begin in all that is trained on, and the held-out parts behind it."""
    if any(part.documents is None for part in parts):
        return None
    trained = _begins([part.train.size for part in parts])
    held_out = _begins([part.held_out.size for part in parts])
    total, found = sum(part.train.size for part in parts), []
    for part, begin in zip(parts, trained, strict=True):
        own = part.documents[part.documents < part.train.size]
        found.append(own + begin)
    for part, begin in zip(parts, held_out, strict=True):
        own = part.documents[part.documents > part.train.size] - part.train.size
        found.append(np.concatenate([[0], own]) + begin + total)
    return np.concatenate(found).astype(np.int64)
