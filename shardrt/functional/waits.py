"""Waits that are filled: an op's backward runs a matmul of the op before while it waits for other ranks.

The matmul is a call that `autograd.call_or_defer` was given. It adds to the gradient of a weight. No other
call adds to a gradient in between, so the order of all terms, and with it every bit of the sums, stays.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from shardrt import autograd, device
from shardrt.autograd import Backward, Function
from shardrt.device import Stream


class Waiting(Function):
    """An op whose backward waits for other ranks.

    beside: the stream in which it communicates while a matmul runs; None: its backward fills no wait.
    """

    __slots__ = ("beside",)


class _State(threading.local):
    """The state of this thread. Ranks may be threads of one process; each has its own state."""

    def __init__(self) -> None:
        # run -> op -> calls for the wait of that op. If the run raises, its calls go with it.
        self.left: WeakKeyDictionary[Backward, dict[Function, list]] = WeakKeyDictionary()


_state = _State()


def leave(run: Backward, function: Any, args: tuple) -> bool:
    """Leave function(*args) to the next op, if that waits for other ranks (autograd.takers)."""
    node = run.following
    if not isinstance(node, Waiting) or node.beside is None or node.hooks:  # a hook may look at gradients
        return False
    _state.left.setdefault(run, {}).setdefault(node, []).append((function, args))
    run.after_next(_run_left)  # at the latest: `node` may be skipped
    return True


autograd.takers.append(leave)


def _any_left() -> bool:
    """Whether calls are left to the op that runs now."""
    run = autograd.running()
    return run in _state.left and run.node in _state.left[run]


def _run_left() -> None:
    """Make the calls that are left to the op that runs now, or was skipped."""
    run = autograd.running()
    calls = _state.left[run].pop(run.node, ())
    while calls:
        function, args = calls.pop(0)
        function(*args)


@contextmanager
def filled(beside: Stream | None) -> Iterator[Stream]:
    """The stream for a collective, made in a with block: `beside`, if a call is left to the op that runs.

    The call runs at the end of the block, next to the collective. The ops go on when both are done.
    """
    here = device.current()
    compute = here.current_stream
    if beside is None or not _any_left():
        yield compute
        return
    written, done = here.new_event(), here.new_event()
    compute.record(written)
    beside.wait(written)  # the gradient that is summed is there
    yield beside
    beside.record(done)
    try:
        _run_left()
    finally:
        compute.wait(done)  # the sum is read; and if a call raised, the memory of the sum goes to others
