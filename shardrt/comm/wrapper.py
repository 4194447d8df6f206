"""A communicator that does something before each call of another one, with the same protocol."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from shardrt.comm.protocol import Communicator


class Wrapper(Communicator):
    """Forwards everything to `inner`; subclasses say what comes `_before` a call."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.reduction = inner.reduction
        self.shares_memory = inner.shares_memory
        self.keeps_host = inner.keeps_host

    def _before(self, call: str, buffer: Any, stream: Any) -> None:
        """Runs in the caller, before `call` is submitted to `stream`; a barrier has no `buffer`."""
        raise NotImplementedError

    def _wrap(self, inner: Communicator) -> "Wrapper":
        """The same wrapper around a communicator made from `inner`."""
        raise NotImplementedError

    def _submit(self, stream: Any, label: str, call: str, what: str, array: Any, *args: Any) -> None:
        self._before(call, array, stream)
        self.inner._submit(stream, label, call, what, array, *args)

    def talk(self, data: bytes) -> list[bytes]:
        return self.inner.talk(data)

    def register_names(self, names: Iterable[str]) -> None:
        self.inner.register_names(names)

    def split(self, color: int | None, key: int) -> "Wrapper | None":
        inner = self.inner.split(color, key)
        return None if inner is None else self._wrap(inner)

    def duplicate(self) -> "Wrapper":
        return self._wrap(self.inner.duplicate())

    def allocate(self, count: int, dtype: Any, *, shared: bool) -> np.ndarray:
        return self.inner.allocate(count, dtype, shared=shared)

    def allocated(self, nbytes: int) -> int:
        return self.inner.allocated(nbytes)

    def scratch(self, call: str, nbytes: int, output: int = 0, *, own: bool = True) -> tuple[int, int]:
        return self.inner.scratch(call, nbytes, output, own=own)

    def reserve(self, on_device: int, on_host: int) -> None:
        self.inner.reserve(on_device, on_host)

    def abandon(self) -> None:
        self.inner.abandon()

    def close(self) -> None:
        self.inner.close()

    # What was submitted runs in `inner`, so the blocking halves of a wrapper are never reached.
    _all_gather = _reduce_scatter = _all_reduce = _all_reduce_small = _broadcast = None
    _all_to_all = _send = _recv = _exchange = _barrier = None
