"""Board: exchanges messages between the recorded ranks of a simulated world, which are threads."""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shardrt.comm.errors import PeerFailed

_PATIENCE = 600  # seconds a rank waits for another


class Board:
    """The message board of all recorded ranks.

    shared: blocks of memory (device/addresses.py) that the ranks of a node share.

    Args:
        stands_for: recorded rank -> the world ranks whose messages it gives, itself among them.
    """

    def __init__(self, stands_for: Mapping[int, Iterable[int]]) -> None:
        self.recorded = frozenset(stands_for)
        self.shared: weakref.WeakSet = weakref.WeakSet()
        self._stands_for = {rank: by for by, ranks in stands_for.items() for rank in ranks}
        self._reported: dict[Any, dict[int, Any]] = {}
        self._left: Counter[Any] = Counter()
        self._changed = threading.Condition()
        self._failed: BaseException | None = None

    def speakers(self, ranks: Iterable[int]) -> list[int]:
        """The recorded rank that stands for each of these ranks."""
        return [self._stands_for[rank] for rank in ranks]

    def meet(self, key: Any, rank: int, value: Any, among: frozenset[int]) -> dict[int, Any]:
        """The values of all ranks `among` for this key, once all are there. Raises PeerFailed."""
        with self._changed:
            values = self._reported.setdefault(key, {})
            values[rank] = value
            self._changed.notify_all()
            self._wait(lambda: among <= values.keys(), key)
            self._left[key] += 1
            if self._left[key] == len(among):
                del self._reported[key], self._left[key]
            return values

    def put(self, key: Any, value: Any) -> None:
        """Leave a message; `key` says which."""
        with self._changed:
            self._reported[key] = value
            self._changed.notify_all()

    def take(self, key: Any) -> Any:
        """The message for this key, once it is there. Raises PeerFailed."""
        with self._changed:
            self._wait(lambda: key in self._reported, key)
            return self._reported.pop(key)

    def fail(self, error: BaseException) -> None:
        """Wake all waiting ranks, which raise PeerFailed."""
        with self._changed:
            self._failed = self._failed or error
            self._changed.notify_all()

    def _wait(self, until: Callable[[], bool], key: Any) -> None:
        there = self._changed.wait_for(lambda: until() or self._failed is not None, _PATIENCE)
        if not until():
            reason = (
                f"a recorded rank failed: {self._failed!r}" if there else f"no sign of it in {_PATIENCE} s"
            )
            raise PeerFailed(f"{key}: {reason}")
