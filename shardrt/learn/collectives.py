"""Exercise: all-gather and reduce-scatter with threads, run in an order that a missing barrier does not survive."""

import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from shardrt.learn.checking import Hint, equal, function

TITLE = "Collectives with threads"
LEVEL = "easy"
TEACHES = "what a collective promises about buffers"
TAKEAWAY = (
    "A collective reads other ranks' memory, so it needs two guarantees: all ranks have come before the first "
    "read, and all have read before a buffer changes. NCCL, MPI and shardrt's shared memory all pay for both."
)

START = '''"""Exercise 3: collectives with threads.

Ranks are threads of one process. Write the two collectives that FSDP consists of. Each rank calls them with
its own `world`:

    world.rank, world.size
    world.arrays    a list with one place per rank, the same list for all ranks
    world.wait()    a barrier: returns when all ranks have called it

A rank offers an array by `world.arrays[world.rank] = array`, and reads those of the others. It must not read
before the others have offered. After your function returns, the caller may overwrite its array at once, so no
rank may still read it. A collective must not change its input.

The grader runs the ranks one at a time, in several orders. A missing barrier shows in one of them.
"""

import numpy as np


def all_gather(world, shard):
    """The shards of all ranks, one after the other: a new array of size world.size * shard.size."""
    raise NotImplementedError


def reduce_scatter(world, full):
    """This rank's part of the sum of all ranks' arrays `full`: a new array of size full.size // world.size."""
    raise NotImplementedError
'''


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
        collective = function(answer, name)
        for size in (1, 2, 3, 4):
            for order in (range(size), range(size)[::-1]):
                _check(name, collective, size, list(order))
    return "both collectives on 1 to 4 ranks, run one at a time from the first rank and from the last."


def _check(name: str, collective: Callable, size: int, order: list[int]) -> None:
    random = np.random.default_rng(size)
    inputs = random.integers(1, 9, (size, 3 if name == "all_gather" else 3 * size)).astype(np.float32)
    whole = np.concatenate(inputs) if name == "all_gather" else inputs.sum(axis=0)
    parts = [whole] * size if name == "all_gather" else np.split(whole, size)

    def body(world: _World) -> tuple[Any, bool]:
        own = inputs[world.rank].copy()
        result = collective(world, own)
        changed = not np.array_equal(own, inputs[world.rank])
        own[:] = np.nan  # the caller's next use of its buffer
        return result, changed

    ranks = _Ranks(size, order)
    try:
        results = ranks.run(body)
    except (TypeError, AttributeError, ValueError):
        if not any(ranks.waits) and size > 1:
            raise Hint(
                f"{name}: a rank reads before the others have offered their arrays. Wait first."
            ) from None
        raise
    if size > 1 and not any(ranks.waits):
        raise Hint(f"{name}: the ranks never wait for each other. A rank must not read before others offer.")
    if any(changed for _, changed in results):
        raise Hint(f"{name} changes its input in place, while other ranks read it. Add into a new array.")
    for rank, (found, _) in enumerate(results):
        if (
            name == "reduce_scatter"
            and isinstance(found, np.ndarray)
            and found.size == whole.size > parts[0].size
        ):
            raise Hint("reduce_scatter returns the whole sum. Each rank needs its own part of it alone.")
        if equal(found, parts[rank], name):
            continue
        if np.isnan(found).any():
            raise Hint(
                f"{name}: with {size} ranks, a rank returned and its caller overwrote the array while another "
                "rank was still reading it. Wait again after reading, and return a copy."
            )
        if name == "reduce_scatter" and equal(found * size, parts[rank], name):
            raise Hint("reduce_scatter returns the mean. It must return the sum over ranks.")
        if name == "reduce_scatter" and any(equal(found, part, name) for part in parts):
            raise Hint("reduce_scatter returns the part of another rank. Rank r owns part r of the sum.")
        raise Hint(f"{name} gives wrong values on rank {rank} of {size}: {found}, and not {parts[rank]}.")
