"""DeferredGradients: the calls that a backward defers, and the order in which they run.

A gradient is a sum, and its bits depend on the order of its terms. Terms are always added in the order in
which backwards reached them, even if several deferred backwards are interleaved. For that, `flush` runs
before the tape adds a term (tape.before_add): it makes all earlier deferred calls that add to the same
gradient.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from shardrt import tape
from shardrt.autograd import Backward

_numbers = count(1)


class Work:
    """One deferred call."""

    __slots__ = ("number", "_backward", "_function", "_args")

    def __init__(self, backward: Backward, function: Any, args: tuple) -> None:
        self.number = next(_numbers)
        self._backward, self._function, self._args = backward, function, args

    @property
    def waits(self) -> bool:
        """Whether the call has not been made yet."""
        return self._function is not None

    def run(self) -> None:
        """Make the call, unless it was made before, and drop its arguments."""
        function, args = self._function, self._args
        if function is None:
            return
        self._function = self._args = None
        before, _state.work = _state.work, self
        try:
            self._backward.call(function, args)
        finally:
            _state.work = before


class DeferredGradients:
    """The deferred calls of one backward. Pass it to `autograd.backward(..., deferred=)`, then flush it.

    Until `flush`, it holds the arrays that the calls need: inputs of layers and gradients of their outputs.
    If it is dropped instead, the arrays are freed and the gradients lack the deferred terms.

    Attributes:
        done: whether it was flushed.

    Example:
        >>> deferred = DeferredGradients()
        >>> backward(loss, deferred=deferred)
        >>> deferred.flush()
    """

    __slots__ = ("done", "_number", "_backward", "_works", "_writers", "__weakref__")

    def __init__(self) -> None:
        self.done = False
        self._number: int | None = None  # order among all DeferredGradients; set when its backward begins
        self._backward: Backward | None = None  # from the end of the first half until `flush`
        self._works: deque[Work] = deque()
        self._writers: dict[int, list[Work]] = {}  # id of a variable -> calls that add to its gradient

    def flush(self) -> None:
        """Make the deferred calls in order, and free each call's arrays. Gradients are then complete.

        The end of the backward follows: reductions, updates by an optimizer, hooks.

        Raises:
            RuntimeError: if it was flushed before, or no backward with this object has ended.
        """
        backward, self._backward = self._backward, None
        if backward is None:
            why = "it was flushed before" if self.done else "no backward with deferred= this object has ended"
            raise RuntimeError(f"DeferredGradients.flush: {why}")
        try:
            backward.run_deferred(self._in_order())
            self.done = True
        finally:
            self.forget()

    def _in_order(self) -> Iterator[Callable[[], None]]:
        while self._works:
            yield self._works.popleft().run

    # -- called by the backward (autograd.Deferral)

    def take(self) -> None:
        """Begin a backward with this object.

        Raises:
            RuntimeError: if another backward has used it.
        """
        if self._number is not None:
            raise RuntimeError(
                "backward: another backward has used these DeferredGradients; each backward needs its own"
            )
        self._number = next(_numbers)
        _state.pending[self._number] = self

    def ready(self, backward: Backward) -> None:
        """End the first half of the backward."""
        self._backward = backward

    def forget(self) -> None:
        """Drop all deferred calls."""
        self._works.clear()
        self._writers.clear()
        _state.pending.pop(self._number, None)

    def defer(self, backward: Backward, function: Any, args: tuple, into: tuple) -> None:
        """Defer function(*args, *into) until `flush`. It adds to the gradients of the variables `into`."""
        work = Work(backward, function, (*args, *into))
        self._works.append(work)
        for variable in into:
            if variable is not None:
                self._writers.setdefault(id(variable), []).append(work)

    def writers(self, variable: Any) -> list[Work]:
        """The deferred calls that add to the gradient of `variable`."""
        return self._writers.get(id(variable), [])


class _State(threading.local):
    """The state of this thread. Ranks may be threads of one process; each has its own state."""

    def __init__(self) -> None:
        # Not run yet, oldest first.
        self.pending: WeakValueDictionary[int, DeferredGradients] = WeakValueDictionary()
        self.work: Work | None = None  # the deferred call that runs now


_state = _State()


def flush(variable: Any) -> None:
    """Before an addition to the gradient of `variable`: make all earlier calls that add to it."""
    if not _state.pending:
        return
    now = _state.work
    for deferred in list(_state.pending.values()):
        for work in deferred.writers(variable):
            if now is None or work.number < now.number:
                work.run()


def refuse_incomplete(variables: Iterable) -> None:
    """Raise RuntimeError if a deferred call still has to add to the gradient of one of these variables."""
    pending = list(_state.pending.values()) if _state.pending else []
    for variable in variables if pending else ():
        if any(work.waits for deferred in pending for work in deferred.writers(variable)):
            raise RuntimeError(
                f"the gradient of {variable.name!r} is not complete: a backward with deferred= has deferred "
                "a call that adds to it; call deferred.flush() first"
            )


tape.before_add.append(flush)
tape.before_read.append(refuse_incomplete)
