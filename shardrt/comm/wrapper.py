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
        self.shares_memory = inner.shares_memory

    def _before(self, call: str, buffer: Any, stream: Any) -> None:
        """Runs in the caller, before `call` is submitted to `stream`; a barrier or talk has no `buffer`."""
        raise NotImplementedError

    def _wrap(self, inner: Communicator) -> "Wrapper":
        """The same wrapper around a communicator made from `inner`."""
        raise NotImplementedError

    def all_gather(self, buffer: Any, *, stream: Any, what: str = "") -> None:
        self._before("all_gather", buffer, stream)
        self.inner.all_gather(buffer, stream=stream, what=what)

    def reduce_scatter(
        self,
        output: Any,
        buffer: Any,
        *,
        stream: Any,
        scale: float = 1.0,
        accumulate: bool = False,
        kind: str = "",
        what: str = "",
    ) -> None:
        self._before("reduce_scatter", buffer, stream)
        self.inner.reduce_scatter(
            output, buffer, stream=stream, scale=scale, accumulate=accumulate, kind=kind, what=what
        )

    def all_reduce(self, buffer: Any, *, op: str = "sum", stream: Any, what: str = "") -> None:
        self._before("all_reduce", buffer, stream)
        self.inner.all_reduce(buffer, op=op, stream=stream, what=what)

    def broadcast(self, buffer: Any, *, root: int, stream: Any, what: str = "") -> None:
        self._before("broadcast", buffer, stream)
        self.inner.broadcast(buffer, root=root, stream=stream, what=what)

    def all_to_all(self, output: Any, buffer: Any, *, stream: Any, what: str = "") -> None:
        self._before("all_to_all", buffer, stream)
        self.inner.all_to_all(output, buffer, stream=stream, what=what)

    def send(self, buffer: Any, *, peer: int, stream: Any) -> None:
        self._before("send", buffer, stream)
        self.inner.send(buffer, peer=peer, stream=stream)

    def recv(self, buffer: Any, *, peer: int, stream: Any) -> None:
        self._before("recv", buffer, stream)
        self.inner.recv(buffer, peer=peer, stream=stream)

    def exchange(self, output: Any, buffer: Any, *, to: int, source: int, stream: Any) -> None:
        self._before("exchange", output, stream)
        self.inner.exchange(output, buffer, to=to, source=source, stream=stream)

    def barrier(self, *, stream: Any, what: str = "") -> None:
        self._before("barrier", None, stream)
        self.inner.barrier(stream=stream, what=what)

    def talk(self, data: bytes) -> list[bytes]:
        self._before("talk", None, None)
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

    def close(self) -> None:
        self.inner.close()

    # The calls above go to `inner` whole, so the blocking halves of a wrapper are never reached.
    _all_gather = _reduce_scatter = _all_reduce = _all_reduce_small = _broadcast = None
    _all_to_all = _send = _recv = _exchange = _barrier = None
