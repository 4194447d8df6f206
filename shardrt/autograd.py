"""Backward: computes gradients along the tape. It exports the names of tape.py that ops and layers use, too.

It runs the reachable nodes in strictly decreasing order of their sequence numbers. Every consumer of a node
is newer than the node, so a node's gradients are complete when it runs. The whole order is known before the
run starts, so prefetch can look ahead. With a `Deferral` (deferred_gradients.py), the run defers calls that
only gradients of parameters depend on.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import numpy as np

from shardrt import device
from shardrt.tape import (
    WRITTEN,
    Edge,
    Fill,
    Function,
    Segment,
    Variable,
    contiguous,
    describe,
    enable_grad,
    in_first_run,
    in_second_run,
    is_grad_enabled,
    modules,
    no_grad,
    on_tape,
    reachable,
)

__all__ = [
    "WRITTEN",
    "Backward",
    "Edge",
    "Fill",
    "Function",
    "Segment",
    "Variable",
    "backward",
    "contiguous",
    "describe",
    "enable_grad",
    "in_first_run",
    "in_second_run",
    "is_grad_enabled",
    "call_or_defer",
    "modules",
    "no_grad",
    "on_tape",
    "reachable",
    "running",
    "takers",
    "wanted",
]

Array = Any


class _State(threading.local):
    """The state of this thread. Ranks may be threads of one process; each has its own state."""

    def __init__(self) -> None:
        self.running: Backward | None = None


_state = _State()


class Deferral(Protocol):
    """The calls that one backward defers. `deferred_gradients.DeferredGradients` implements it."""

    def take(self) -> None:
        """Begin a backward with this object."""

    def defer(self, backward: "Backward", function: Any, args: tuple, into: tuple) -> None:
        """Defer function(*args, *into). `backward.call` makes the call later."""

    def ready(self, backward: "Backward") -> None:
        """End the first half of the backward. `backward.run_deferred` runs the deferred calls."""

    def forget(self) -> None:
        """Drop all deferred calls, since the backward has raised."""


class Backward:
    """One run of backward: the nodes in the order in which they run, and the position of the present node.

    A node may record a piece of graph while its backward runs (recomputation). The piece gets a run of its
    own, with the first run as `outer`, for the nodes newer than `since`. Gradients of older nodes go to the
    outer run, which comes to these nodes later. So gradients add up in the same order as if the piece had
    been recorded in forward.

    With `deferred`, a run has two halves. The second half makes the calls that the first half has deferred.
    """

    def __init__(
        self,
        roots: Iterable[Function],
        retain_graph: bool,
        since: int = 0,
        outer: "Backward | None" = None,
        deferred: Deferral | None = None,
    ) -> None:
        self.nodes = reachable(roots, since)
        self.position = 0
        self.retain_graph = retain_graph
        self.since = since
        self.outer = outer
        self.deferred = deferred  # in the first half of the outermost run only
        self.second_half = False  # the first half of a backward with `deferred` has ended
        self.busy = False  # a half runs now
        self._calls = 0  # nesting depth of deferred calls that run now: they defer nothing themselves
        self.gradients: dict[Function, list] = {} if outer is None else outer.gradients
        self._after_next: list = []
        self._after_nodes: list = []
        self._at_end: list = []
        self._in_any_case: list = []
        self._hooks: list = []

    def upcoming(self, kind: type[Function] | tuple[type[Function], ...]) -> Iterator[Function]:
        """Yield the nodes of one kind that run after the present node, in order, for prefetch."""
        for position in range(self.position + 1, len(self.nodes)):
            if isinstance(self.nodes[position], kind):
                yield self.nodes[position]
        if self.outer is not None:
            yield from self.outer.upcoming(kind)

    @property
    def outermost(self) -> "Backward":
        """The run that contains this run and is not inside of another."""
        return self if self.outer is None else self.outer.outermost

    @property
    def node(self) -> Function:
        """The node that runs now."""
        return self.nodes[self.position]

    @property
    def following(self) -> Function | None:
        """The node that runs next in this run, or None."""
        return self.nodes[self.position + 1] if self.position + 1 < len(self.nodes) else None

    def deliver(self, edge: Edge, gradient: Any) -> None:
        """Deliver a gradient, or WRITTEN, to the end of an edge."""
        if edge.leaf is not None and gradient is not WRITTEN:
            edge.leaf.accumulate_gradient(gradient)
        if edge.node is None:
            return
        received = self.gradients.setdefault(edge.node, [None] * edge.node.outputs)
        if edge.leaf is None and gradient is not WRITTEN:
            before = received[edge.index]
            received[edge.index] = gradient if before is None else _sum(before, gradient)

    def after_next(self, function: Any) -> None:
        """Call `function()` once, when the next node has run or was skipped."""
        _add_once(self._after_next, function)

    def after_nodes(self, function: Any) -> None:
        """Call `function()` once, when the last node of the outermost run has run.

        From then on no parameter values are needed, except by deferred calls.
        """
        _add_once(self.outermost._after_nodes, function)

    def at_end(self, function: Any, hook: bool = False) -> None:
        """Call `function()` once, when the outermost run has ended, deferred calls included.

        hook: call it after all functions that are no hooks. Gradients are then reduced, and an optimizer that
        updates during backward has updated.
        """
        _add_once(self.outermost._hooks if hook else self.outermost._at_end, function)

    def in_any_case(self, function: Any) -> None:
        """Call `function()` once, when this half of the outermost run ends or raises, before users' hooks."""
        _add_once(self.outermost._in_any_case, function)

    def run(self) -> None:
        """Run the nodes in order. A node that has received no gradient is skipped."""
        with self._half():
            for position, node in enumerate(self.nodes):
                self.position = position
                after, self._after_next = self._after_next, []
                received = self.gradients.pop(node, None)
                if received is not None:
                    self._run(node, received)
                _call_all(after)
            _call_all(self._after_nodes)
            if self.deferred is None:
                self._end()
            else:
                self._leave_half()
        if self.deferred is not None:
            self.second_half, self.deferred, deferred = True, None, self.deferred
            deferred.ready(self)

    def run_deferred(self, works: Iterator[Callable[[], None]]) -> None:
        """Run the second half. Each work is dropped, and its arrays freed, before the next work begins."""
        with self._half():
            for work in works:
                work()
            self._end()

    def call(self, function: Any, args: tuple) -> None:
        """Call function(*args), which this run has deferred, as a part of this run."""
        before, _state.running = _state.running, self
        self._calls += 1
        try:
            function(*args)
        finally:
            self._calls -= 1
            _state.running = before

    @property
    def deferral(self) -> Deferral | None:
        """The Deferral that takes calls now, or None."""
        run = self.outermost
        return None if run._calls else run.deferred

    @contextmanager
    def _half(self) -> Iterator[None]:
        before, _state.running, self.busy = _state.running, self, True
        try:
            yield
        except BaseException:  # KeyboardInterrupt too: a notebook continues after it
            while self._in_any_case:
                with suppress(Exception):  # report the first error
                    self._leave_half()
            raise
        finally:
            _state.running, self.busy = before, False
            self.nodes = []  # deferred calls refer to this object, which must not keep the graph alive

    def _leave_half(self) -> None:
        """Call the functions of `in_any_case`. Each is dropped first, so an error does not call it twice."""
        while self._in_any_case:
            self._in_any_case.pop(0)()

    def _end(self) -> None:
        _call_all(self._at_end)
        self._leave_half()
        _call_all(self._hooks)

    def _run(self, node: Function, received: list) -> None:
        if node.saved is None:
            if not wanted(received):
                return  # the node has run before, and this run needs no gradient from it
            raise RuntimeError(
                f"backward: the saved arrays of {describe(node)} were freed by an earlier backward; "
                "call that one with retain_graph=True"
            )
        for index, hook in node.hooks:
            if received[index] is not None:
                received[index] = hook(received[index])
        if not node.strided:
            received = [None if dy is None else contiguous(dy) for dy in received]
        results = node.backward(*received)
        results = results if isinstance(results, tuple) else (results,)
        if len(results) != len(node.edges):
            raise RuntimeError(
                f"{describe(node)}.backward gave {len(results)} gradients for {len(node.edges)} inputs"
            )
        for edge, gradient in zip(node.edges, results, strict=True):
            if edge is not None and gradient is not None:
                self.deliver(edge, gradient)
        if node.saved and not self.retain_graph and wanted(received):
            node.saved = None


def _add_once(functions: list, function: Any) -> None:
    if function not in functions:
        functions.append(function)


def _call_all(functions: list) -> None:
    for function in functions:  # a function may append more
        function()


def backward(
    variables: Variable | Iterable[Variable],
    gradients: Array | Iterable[Array | None] | None = None,
    retain_graph: bool = False,
    *,
    deferred: Deferral | None = None,
) -> None:
    """Add the gradients of a variable, or of several in one run, to the `grad` of all leaves they depend on.

    Args:
        variables: one or several results of ops.
        gradients: one for each variable, an array of its shape. None for a single element means 1.
        retain_graph: keep the saved arrays, so that a later backward can use the graph again.
        deferred: takes the calls that only gradients of parameters depend on: matmuls for weight gradients,
            reductions, updates, hooks. `deferred.flush()` makes them. Until then, the arrays in `gradients`
            and the inputs of the forward must not change. The gradients are bitwise identical either way.

    Raises:
        RuntimeError: if a variable depends on nothing that requires a gradient, or another backward has used
            `deferred`.
        ValueError: if a gradient is missing or has a wrong shape.
    """
    if isinstance(variables, Variable):
        variables, gradients = [variables], [gradients]
    variables = list(variables)
    gradients = [None] * len(variables) if gradients is None else list(gradients)
    if len(gradients) != len(variables):
        raise ValueError(f"backward: {len(variables)} tensors need as many gradients, got {len(gradients)}")
    gradients = [_checked(v, g) for v, g in zip(variables, gradients, strict=True)]
    if deferred is not None:
        deferred.take()
    run = Backward({v.node for v in variables if v.node is not None}, retain_graph, deferred=deferred)
    for variable, gradient in zip(variables, gradients, strict=True):
        if variable.node is None:
            variable.accumulate_gradient(gradient)
        else:
            run.deliver(variable.edge(), gradient)
    try:
        run.run()
    except BaseException:
        if deferred is not None:
            deferred.forget()
        raise


def _checked(variable: Variable, gradient: Array | None) -> Array:
    if not variable.requires_grad:
        raise RuntimeError("backward: this tensor depends on nothing that requires a gradient")
    if gradient is None:
        if variable.data.size != 1:
            raise ValueError(f"backward: shape {variable.data.shape} is no scalar; pass a gradient")
        gradient = np.ones_like(variable.data)
    if gradient.shape != variable.data.shape:
        raise ValueError(f"backward: gradient must be {variable.data.shape}, got {gradient.shape}")
    return gradient


# Each may take over a call: take(run, function, args) returns True if it calls function(*args) itself, before
# anything else adds to a gradient. Otherwise it returns False.
takers: list[Callable[[Backward, Callable, tuple], bool]] = []


def call_or_defer(function: Any, *args: Any, into: tuple = ()) -> tuple:
    """In backward: call function(*args, *into), which writes gradients, or defer the call.

    Returns one token for each handle.

    The call is deferred if the running backward defers calls. Otherwise, if `into` has handles, one of
    `takers` may make it a little later. A gradient that travels on to an op is needed at once, so then the
    call is made now.

    args: for the function. Arrays among them must not change until the call.
    into: the handles whose gradients the function writes; None for a gradient that is not wanted. If all are
    None, the function is not called.
    """
    handles, run = [handle for handle in into if handle is not None], _state.running
    deferred = None if run is None else run.deferral
    if into and not handles:
        return into
    travels = any(handle.node is not None for handle in handles)  # a gradient goes on to another op
    if deferred is not None and not travels:
        deferred.defer(run.outermost, function, args, into)
    elif travels or not handles or run is None or not _taken(run, function, (*args, *into)):
        return function(*args, *into)
    return tuple(None if handle is None else WRITTEN for handle in into)


def _taken(run: Backward, function: Any, args: tuple) -> bool:
    return any(take(run, function, args) for take in takers)


def running() -> Backward | None:
    """The backward that runs in this thread now, if one does."""
    return _state.running


def wanted(received: Iterable[Array | None]) -> bool:
    """Whether a node has received a gradient. Without one it runs for the order alone and frees nothing."""
    return any(dy is not None for dy in received)


def _sum(first: Array, second: Array) -> Array:
    """The sum in a new array: another node may hold the first gradient, too."""
    here = device.current()
    total = here.empty(first.shape, first.dtype)
    here.kernels.elementwise.add(
        contiguous(first).reshape(-1), contiguous(second).reshape(-1), total.reshape(-1)
    )
    return total
