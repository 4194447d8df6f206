"""Late: what a backward puts off until later, and in which order that is done.

A gradient is a sum, and its bits depend on the order of its terms. Terms are added in the order in which
backward reached them, however the runs of several backwards are interleaved: before the tape adds a term
(tape.before_add), `settle` does what was put off earlier and adds to the same gradient.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from shardrt import autograd
from shardrt.autograd import Backward

_numbers = count(1)


class Work:
    """One call that was put off."""

    __slots__ = ("number", "_backward", "_function", "_args")

    def __init__(self, backward: Backward, function: Any, args: tuple) -> None:
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
        self._backward: Backward | None = None  # once it has put off all that it will, until `run`
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

    def _in_order(self) -> Iterator[Callable[[], None]]:
        while self._works:
            yield self._works.popleft().run

    # For the backward that it is given to

    def take(self) -> None:
        """A backward begins. Raises RuntimeError if another one had it."""
        if self._number is not None:
            raise RuntimeError("backward: this Late was given to another backward; each needs its own")
        self._number = next(_numbers)
        _state.lates[self._number] = self

    def ready(self, backward: Backward) -> None:
        """That backward has ended, but for what was put off."""
        self._backward = backward

    def forget(self) -> None:
        """Hold nothing."""
        self._works.clear()
        self._writers.clear()
        _state.lates.pop(self._number, None)

    def put_off(self, backward: Backward, function: Any, args: tuple, into: tuple) -> None:
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
        self.work: Work | None = None  # that was put off, and runs now


_state = _State()


def settle(variable: Any) -> None:
    """A gradient is about to be added to: what was put off and should be there before runs now."""
    if not _state.lates:
        return
    now = _state.work
    for late in list(_state.lates.values()):
        for work in late.writers(variable):
            if now is None or work.number < now.number:
                work.run()


def refuse_incomplete(variables: Iterable) -> None:
    """Raise RuntimeError if something is to be added to one of these gradients that was put off."""
    lates = list(_state.lates.values()) if _state.lates else []
    for variable in variables if lates else ():
        if any(work.waits for late in lates for work in late.writers(variable)):
            raise RuntimeError(
                f"the gradient of {variable.name!r} is not complete: a backward with late= has put off what "
                "adds to it; call late.run() first"
            )


autograd.before_add.append(settle)
autograd.before_read.append(refuse_incomplete)
