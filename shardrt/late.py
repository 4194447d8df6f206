"""Late: what a backward puts off, and its order. Knows no tape, only calls that add to gradients.

A gradient is a sum, whose bits depend on the order of its terms. So whoever is about to add a term asks first
(`settle`): what was put off before it and adds to the same gradient runs then. Of any two terms that is added
first to which backward came first, however the runs of several backwards are interleaved.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

_numbers = count(1)


class Runner(Protocol):
    """What Late asks of the backward whose work it has."""

    def call(self, function: Any, args: tuple) -> None: ...

    def run_late(self, works: "Iterator[Work]") -> None: ...


class Work:
    """One call that was put off."""

    __slots__ = ("number", "_backward", "_function", "_args")

    def __init__(self, backward: Runner, function: Any, args: tuple) -> None:
        self.number = next(_numbers)
        self._backward, self._function, self._args = backward, function, args

    @property
    def waits(self) -> bool:
        """Whether it has not been called."""
        return self._function is not None

    def run(self) -> None:
        """Call it, unless that has been done, and hold nothing of it any more."""
        function, args = self._function, self._args
        if function is None:
            return
        self._function = self._args = None
        before, _state.work = _state.work, self
        try:
            self._backward.call(function, args)
        finally:
            _state.work = before


class Late:
    """What one backward has put off: give it to `autograd.backward(..., late=)`, then `run` it, once.

    done: whether it has run. Until then it holds the arrays that are needed for it: inputs of layers and
    gradients of their outputs. One that is dropped frees them, and gradients lack what it would have added.
    """

    __slots__ = ("done", "_number", "_backward", "_works", "_writers", "__weakref__")

    def __init__(self) -> None:
        self.done = False
        self._number: int | None = None  # among all, from when a backward begins that has it
        self._backward: Runner | None = None  # once it has put off all that it will, until `run`
        self._works: deque[Work] = deque()
        self._writers: dict[int, list[Work]] = {}  # by id of the variable to whose gradient they add

    def run(self) -> None:
        """Do what was put off, in order, and free its arrays one by one. Gradients are then complete.

        Whatever else happens at the end of a backward happens now: reductions, updates, hooks. Raises
        RuntimeError if it has run, or no backward has ended that it was given to.
        """
        backward, self._backward = self._backward, None
        if backward is None:
            why = "it has run already" if self.done else "no backward has ended that it was given to as late="
            raise RuntimeError(f"Late.run: {why}")
        try:
            backward.run_late(self._in_order())
            self.done = True
        finally:
            self.forget()

    def _in_order(self) -> Iterator[Work]:
        while self._works:
            yield self._works.popleft()

    # For the backward that it is given to

    def take(self) -> None:
        """A backward begins. Raises RuntimeError if another one had it."""
        if self._number is not None:
            raise RuntimeError("backward: this Late was given to another backward; each needs its own")
        self._number = next(_numbers)
        _state.lates[self._number] = self

    def ready(self, backward: Runner) -> None:
        """That backward has ended, but for what was put off."""
        self._backward = backward

    def forget(self) -> None:
        """Hold nothing."""
        self._works.clear()
        self._writers.clear()
        _state.lates.pop(self._number, None)

    def put_off(self, backward: Runner, function: Any, args: tuple, into: tuple) -> None:
        """Have function(*args, *into) called by `run`."""
        work = Work(backward, function, (*args, *into))
        self._works.append(work)
        for variable in into:
            if variable is not None:
                self._writers.setdefault(id(variable), []).append(work)

    def writers(self, variable: Any) -> list[Work]:
        """What adds to the gradient of `variable`."""
        return self._writers.get(id(variable), [])


class _State(threading.local):
    """Of this thread: ranks that are threads of one process each have their own."""

    def __init__(self) -> None:
        self.lates: WeakValueDictionary[int, Late] = WeakValueDictionary()  # not run yet, the oldest first
        self.present: Late | None = None  # of the backward that runs, if it puts things off now
        self.work: Work | None = None  # that was put off, and runs now


_state = _State()


def present() -> Late | None:
    """Where things are put off now, if they are."""
    return _state.present if _state.work is None else None


@contextmanager
def putting_off(late: Late | None) -> Iterator[None]:
    """Have things put off to `late` inside a with block (None: not at all)."""
    before, _state.present = _state.present, late
    try:
        yield
    finally:
        _state.present = before


def settle(variable: Any) -> None:
    """A gradient is about to be added to: what was put off and should be there before runs now.

    Whoever has a `gradient_target` of its own calls it.
    """
    if not _state.lates:
        return
    now = _state.work
    for late in list(_state.lates.values()):
        for work in late.writers(variable):
            if now is None or work.number < now.number:
                work.run()


def awaited(variables: Iterable) -> Any:
    """The first of these variables to whose gradient something is to be added that was put off, or None."""
    lates = list(_state.lates.values()) if _state.lates else []
    for variable in variables if lates else ():
        if any(work.waits for late in lates for work in late.writers(variable)):
            return variable
    return None
