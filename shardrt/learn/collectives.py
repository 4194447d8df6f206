"""Exercise: all-gather and reduce-scatter with threads, in orders that need each barrier."""

import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from shardrt.learn.checking import Hint, equal, function, need

TITLE = "Collectives with threads"
LEVEL = "easy"
TEACHES = "what a collective promises about buffers"
TAKEAWAY = (
    "A collective reads other ranks' memory, so it needs two guarantees. All ranks have come before the "
    "first read, and all have read before a buffer changes. NCCL, MPI and shardrt pay for both."
)


class _World:
    """One rank's view of ranks that run one at a time, each up to its next barrier."""

    def __init__(self, ranks: "_Ranks", rank: int) -> None:
        self.rank, self.size = rank, ranks.size
        self.arrays = ranks.arrays
        self.wait: Callable[[], None] = lambda: ranks.wait(rank)


class _Ranks:
    """Runs a function on each rank. Between two barriers the ranks take turns in `order`."""

    def __init__(self, size: int, order: Sequence[int]) -> None:
        self.size, self.order = size, order
        self.arrays: list[Any] = [None] * size
        self.waits = [0] * size
        self.results: list[Any] = [None] * size
        self._errors: list[BaseException] = []
        self._go = [threading.Semaphore(0) for _ in order]
        self._back = threading.Semaphore(0)
        self._done: set[int] = set()

    def wait(self, rank: int) -> None:
        self.waits[rank] += 1
        self._back.release()
        self._go[rank].acquire()

    def run(self, body: Callable[[_World], Any]) -> list[Any]:
        for rank in range(self.size):
            threading.Thread(target=self._rank, args=(body, rank), daemon=True).start()
        while not self._done:
            for rank in self.order:
                self._go[rank].release()
                self._back.acquire()
                if self._errors:
                    raise self._errors[0]
        if len(self._done) < self.size:
            raise Hint(f"Ranks call world.wait() {self.waits} times. All ranks must call it equally often.")
        return self.results

    def _rank(self, body: Callable[[_World], Any], rank: int) -> None:
        self._go[rank].acquire()
        try:
            self.results[rank] = body(_World(self, rank))
        except BaseException as error:  # run() raises it
            self._errors.append(error)
        self._done.add(rank)
        self._back.release()


def check(answer: ModuleType) -> str:
    """Run both collectives on 1 to 4 ranks in several orders."""
    for name in ("all_gather", "reduce_scatter"):
        for size in (1, 2, 3, 4):
            for order in (range(size), range(size)[::-1]):
                _check(name, function(answer, name), size, list(order))
    return "both collectives on 1 to 4 ranks, run one at a time from the first rank and from the last."


def _check(name: str, collective: Callable, size: int, order: list[int]) -> None:
    gathers, random = name == "all_gather", np.random.default_rng(size)
    inputs = random.integers(1, 9, (size, 3 if gathers else 3 * size)).astype(np.float32)
    whole = np.concatenate(inputs) if gathers else inputs.sum(axis=0)
    parts = [whole] * size if gathers else np.split(whole, size)

    def body(world: _World) -> tuple[Any, bool]:
        own = inputs[world.rank].copy()
        result = collective(world, own)
        changed = not np.array_equal(own, inputs[world.rank])
        own[:] = np.nan  # the caller's next use of its buffer
        collective(world, own)
        return result, changed

    ranks, early = _Ranks(size, order), f"{name}: a rank reads before the others have offered. Wait first."
    try:
        results = ranks.run(body)
    except (TypeError, AttributeError, ValueError):  # it has read the None of another rank
        need(any(ranks.waits) or size == 1, early)
        raise
    need(any(ranks.waits) or size == 1, early)
    for rank, (found, changed) in enumerate(results):
        need(
            not changed,
            f"{name} changes its input in place, while other ranks read it. Add into a new array.",
        )
        whole_sum = not gathers and size > 1 and getattr(found, "size", 0) == whole.size
        need(not whole_sum, "reduce_scatter returns the whole sum. Each rank needs its own part of it alone.")
        if not equal(found, parts[rank], name):
            raise Hint(f"{name}: {_wrong(found, parts, rank)}")


def _wrong(found: np.ndarray, parts: list[np.ndarray], rank: int) -> str:
    if np.isnan(found).any():
        return (
            "a rank went on after its return, and changed an array that another rank was still reading. "
            "Wait again after reading, and return a copy, not a view of another rank's array."
        )
    if equal(found * len(parts), parts[rank], ""):
        return "it returns the mean, and must return the sum over ranks."
    if any(equal(found, part, "") for part in parts):
        return "it returns the part of another rank. Rank r owns part r of the sum."
    return f"rank {rank} of {len(parts)} gets {found} in place of {parts[rank]}."
