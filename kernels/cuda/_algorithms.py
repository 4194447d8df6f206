"""Which of the algorithms that cublasLt proposes computes a product: the fastest, measured, and kept on disk.

As in Karpathy's llm.c and PyTorch's tuned GEMMs. A file holds the choice for one kind of product on one
type of GPU under one version of cublasLt. The first process that has measured a kind makes the file, and all
others take what it says: ranks that share a disk agree without talking, and a run that is repeated or resumed
has the same bits. What a damaged file should say is measured anew.
"""

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from shardrt.kernels.cuda._compile import cache_directory
from shardrt.kernels.cuda._cublaslt_plan import Algorithm, NoSuchProduct, Plan, serialized

APART = "apart"  # other products and kernels do the same faster
FINALISTS = 4  # candidates that are measured more than once
ROUNDS = 3  # more, for these
LIMIT = 1.0  # seconds after which the rest of the candidates for one kind of product is left out
BUDGET = 20.0  # seconds of a process, after which kinds that are new take the first candidate
_LARGEST = 8192  # bytes of a file

Choice = Algorithm | str
Work = Callable[[], None]
Run = Callable[[Algorithm], None]
Seconds = Callable[[Work, int], float | None]


class Chooser:
    """Chooses what computes the products of a plan. kept: where choices are on disk."""

    def __init__(self, kept: "Kept") -> None:
        self._kept = kept
        self._spent = 0.0  # seconds

    def choose(self, plan: Plan, run: Run, apart: Work | None, seconds: Seconds) -> Choice | None:
        """A candidate of the plan, what is kept, or APART; None if it can't be measured now.

        run: computes the product by an algorithm. apart: does the same with other products and kernels. Both
        are called again and again. Raises NoSuchProduct if no algorithm can run and there is no `apart`.
        """
        if len(plan.candidates) == 1 and apart is None:
            return plan.candidates[0]
        name = repr(plan.what)
        found = self._kept.read(name)
        choice = _meant(plan, found, apart)
        if choice is not None:
            return choice
        if found is not None:
            self._kept.complain(name)
        begin = perf_counter()
        measured = self._spent < BUDGET
        choice = fastest(plan.candidates, run, apart, seconds) if measured else plan.candidates[0]
        self._spent += perf_counter() - begin
        if choice is None:
            return None
        text = APART if choice is APART else serialized(choice)
        return _meant(plan, self._kept.write(name, text, instead_of=found), apart) or choice


def fastest(candidates: Sequence[Algorithm], run: Run, apart: Work | None, seconds: Seconds) -> Choice | None:
    """The candidate that takes the least time, or APART if that takes less; None if it can't be measured now.

    All are measured once, in their order, and the best of them again.
    """
    begin, times = perf_counter(), []
    for place, candidate in enumerate(candidates):
        if times and perf_counter() - begin > LIMIT:
            break
        try:
            taken = seconds(lambda c=candidate: run(c), 1)
        except NoSuchProduct:
            continue
        if taken is None:
            return None
        times.append((taken, place))
    if not times:
        if apart is None:
            raise NoSuchProduct("cublasLt computes this product by none of the algorithms that it proposed")
        return APART
    finals = []
    for _, place in sorted(times)[:FINALISTS]:
        finals.append((seconds(lambda c=candidates[place]: run(c), ROUNDS), place))
    best, place = min(finals)
    return APART if apart is not None and seconds(apart, ROUNDS) < best else candidates[place]


class Kept:
    """A folder with a file for each kind of product. identity: the GPU and the version of cublasLt."""

    def __init__(self, identity: Callable[[], tuple[str, int]]) -> None:
        self._identity = identity
        self._complained = False

    def read(self, product: str) -> str | None:
        """The choice for a product; None if there is none, or what is there is damaged: with one warning."""
        text = self._read(product)
        if text is None and os.path.lexists(self._file(product)):
            self.complain(product)
        return text

    def write(self, product: str, text: str, instead_of: str | None = None) -> str:
        """Keep a choice, unless another process has kept one: that one, or this, holds from now on.

        instead_of: a text that is no choice. A folder that can't be written is not worth an error.
        """
        file = self._file(product)
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
                json.dump(self._content(product, text), temporary, indent=1)
            try:
                os.link(temporary.name, file)  # whole or not at all, and by the first process only
            except FileExistsError:
                theirs = self._read(product)
                if theirs is not None and theirs != instead_of:
                    return theirs
                os.replace(temporary.name, file)
            finally:
                Path(temporary.name).unlink(missing_ok=True)
        except OSError:
            pass
        return text

    def complain(self, product: str) -> None:
        """Warn of a file that is not used, once in a process."""
        if not self._complained:
            self._complained = True
            told = "is damaged or of another cublasLt, so this product is measured anew"
            warnings.warn(f"{self._file(product)} {told}", stacklevel=2)

    def _read(self, product: str) -> str | None:
        try:
            file = self._file(product)
            if not file.is_file() or file.stat().st_size > _LARGEST:
                return None
            found = json.loads(file.read_bytes())
            text = found["algorithm"]
            return text if isinstance(text, str) and found == self._content(product, text) else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _content(self, product: str, text: str) -> dict[str, Any]:
        gpu, version = self._identity()
        content = {"gpu": gpu, "cublasLt": version, "product": product, "algorithm": text}
        return content | {"sha256": hashlib.sha256(repr(content).encode()).hexdigest()}

    def _file(self, product: str) -> Path:
        name = hashlib.sha256(repr((*self._identity(), product)).encode()).hexdigest()[:24]
        return cache_directory() / "products" / f"{name}.json"


def _meant(plan: Plan, text: str | None, apart: Work | None) -> Choice | None:
    """The choice that a kept text stands for; None for what the plan has no use for."""
    if text is None or (text == APART and apart is None):
        return None
    return APART if text == APART else plan.restored(text)
