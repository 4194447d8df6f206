"""Backward: gradients, along the tape that tape.py has recorded, whose names are all here.

It runs the reachable nodes in strictly decreasing order of their numbers: every consumer of a node is newer
than the node, so its gradients are complete when its turn comes, and the whole order is known before it
starts. With a `Deferral` what nothing but gradients of parameters needs is put off (late.py).
"""

import threading
from bisect import bisect_left
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
    Keeper,
    Segment,
    Variable,
    add_hook,
    before_add,
    before_read,
    contiguous,
    describe,
    enable_grad,
    in_first_run,
    in_second_run,
    is_grad_enabled,
    keeper,
    keeping,
    modules,
    no_grad,
    now,
    on_tape,
    reachable,
    recorded_since,
    set_grad_enabled,
)

__all__ = [
    "WRITTEN",
    "Backward",
    "Edge",
    "Fill",
    "Function",
    "Keeper",
    "Segment",
    "Variable",
    "add_hook",
    "backward",
    "backward_of_piece",
    "before_add",
    "before_read",
    "contiguous",
    "describe",
    "enable_grad",
    "in_first_run",
    "in_second_run",
    "is_grad_enabled",
    "keeper",
    "keeping",
    "later",
    "modules",
    "no_grad",
    "now",
    "on_tape",
    "reachable",
    "recorded_since",
    "running",
    "set_grad_enabled",
    "wanted",
]

Array = Any


class _State(threading.local):
    """Of this thread: ranks that are threads of one process each have their own."""

    def __init__(self) -> None:
        self.running: Backward | None = None


_state = _State()


class Deferral(Protocol):
    """Where one backward puts off what it can; `late.Late` is one."""

    def take(self) -> None:
        """A backward begins that has it."""

    def put_off(self, backward: "Backward", function: Any, args: tuple, into: tuple) -> None:
        """Have function(*args, *into) called later, by `backward.call`."""

    def ready(self, backward: "Backward") -> None:
        """That backward has ended, but for what was put off; `backward.run_late` does that."""

    def forget(self) -> None:
        """Hold nothing: the backward has raised."""


class Backward:
    """One run of backward: the nodes in the order in which they run, and where it stands.

    A piece of the graph that a node records while it runs has a run of its own, with the other as `outer`:
    it runs the nodes newer than `since`. What it finds for older ones goes to the outer run, whose turn for
    them is to come, so gradients add up in the same order as if the piece had always been there.

    With a `late` it has two halves: in the second one is run what was put off in the first.
    """

    def __init__(
        self,
        roots: Iterable[Function],
        retain_graph: bool,
        since: int = 0,
        outer: "Backward | None" = None,
        late: Deferral | None = None,
    ) -> None:
        self.nodes = reachable(roots, since)
        self.position = 0
        self.retain_graph = retain_graph
        self.since = since
        self.outer = outer
        self.late = late  # of the outermost run, until its second half
        self.second_half = False  # is to come, or runs, or has run
        self.busy = False  # one of its halves runs
        self._calls = 0  # under way, of what was put off: they put nothing off themselves
        self.gradients: dict[Function, list] = {} if outer is None else outer.gradients
        self.passed: Function | None = None  # whose gradient the op before it has taken further than asked
        self._for_next: list = []  # calls that the node that runs has left to the next one, which waits
        self._for_this: list = []  # those that it was left itself
        self._after_nodes: list = []
        self._at_end: list = []
        self._in_any_case: list = []
        self._hooks: list = []

    def upcoming(self, kind: type[Function] | tuple[type[Function], ...]) -> Iterator[Function]:
        """The nodes of one kind that run after the present one, in order: what prefetch looks ahead to."""
        for position in range(self.position + 1, len(self.nodes)):
            if isinstance(self.nodes[position], kind):
                yield self.nodes[position]
        if self.outer is not None:
            yield from self.outer.upcoming(kind)

    @property
    def outermost(self) -> "Backward":
        """The run that is inside of no other."""
        return self if self.outer is None else self.outer.outermost

    def after_nodes(self, function: Any) -> None:
        """Call `function()` once, when the last node of the outermost run has run: no values are needed more.

        What was put off is still to come.
        """
        _add_once(self.outermost._after_nodes, function)

    def at_end(self, function: Any, hook: bool = False) -> None:
        """Call `function()` once, when all of the outermost run has run; users' hooks last.

        Then gradients are reduced, and updates that an optimizer makes during backward are there.
        """
        _add_once(self.outermost._hooks if hook else self.outermost._at_end, function)

    def in_any_case(self, function: Any) -> None:
        """Call `function()` once, when this half of the outermost run ends or raises an Exception.

        Before users' hooks.
        """
        _add_once(self.outermost._in_any_case, function)

    def is_to_come(self, node: Function) -> bool:
        """Whether `node` runs after the present one, in this run or in one around it."""
        run = self
        while node.sequence <= run.since and run.outer is not None:
            run = run.outer
        place = bisect_left(run.nodes, -node.sequence, key=lambda other: -other.sequence)
        return run.position < place < len(run.nodes) and run.nodes[place] is node

    def feeds_only(self, node: Function) -> bool:
        """Whether `node` runs next and has received nothing: its gradient is that from the present one."""
        following = self.position + 1
        ready = following < len(self.nodes) and self.nodes[following] is node
        return ready and node not in self.gradients

    def leave_to_next(self, function: Any, args: tuple) -> bool:
        """Have function(*args) called while the next node waits for other ranks; False where it does not.

        Nothing is added to a gradient in between, so the order of all terms stays as it is.
        """
        following = self.position + 1
        node = self.nodes[following] if following < len(self.nodes) else None
        if node is None or node.hooks or not node.waits():  # a hook may look at gradients
            return False
        self._for_next.append((function, args))
        return True

    @property
    def has_left(self) -> bool:
        """Whether there is something to do for `fill`."""
        return bool(self._for_this)

    def fill(self) -> None:
        """Do what the node before has left to this one."""
        while self._for_this:
            function, args = self._for_this.pop(0)
            function(*args)

    def run(self) -> None:
        """Run the nodes. A node whose gradient nobody has produced is passed over."""
        with self._half():
            for position, node in enumerate(self.nodes):
                self.position = position
                self._for_this, self._for_next = self._for_next, []
                received = self.gradients.pop(node, None)
                if received is not None:
                    self._run(node, received)
                self.fill()  # where it was passed over
            _call_all(self._after_nodes)
            if self.late is None:
                self._end()
            else:
                _call_all(self._in_any_case)
                self._in_any_case = []
        if self.late is not None:
            self.second_half, self.late, late = True, None, self.late
            late.ready(self)

    def run_late(self, works: Iterator[Callable[[], None]]) -> None:
        """The second half. Each of the works is dropped, with its arrays, before the next one begins."""
        with self._half():
            for work in works:
                work()
            self._end()

    def call(self, function: Any, args: tuple) -> None:
        """Call function(*args), which this run has put off, as a part of it."""
        before, _state.running = _state.running, self
        self._calls += 1
        try:
            function(*args)
        finally:
            self._calls -= 1
            _state.running = before

    @property
    def puts_off(self) -> Deferral | None:
        """Where things are put off now, if they are."""
        run = self.outermost
        return None if run._calls else run.late

    @contextmanager
    def _half(self) -> Iterator[None]:
        before, _state.running, self.busy = _state.running, self, True
        try:
            yield
        except Exception:
            for function in self._in_any_case:
                with suppress(Exception):  # what was raised first is told
                    function()
            raise
        finally:
            _state.running, self.busy = before, False
            self.nodes = []  # what was put off leads here, and must hold no graph

    def _end(self) -> None:
        for functions in (self._at_end, self._in_any_case, self._hooks):
            _call_all(functions)

    def _run(self, node: Function, received: list) -> None:
        if node.saved is None:
            if not wanted(received):
                return  # it has run before, and nothing more is asked of it
            raise RuntimeError(
                f"backward: the saved arrays of {describe(node)} were freed by an earlier backward; "
                "call that one with retain_graph=True"
            )
        for index, hook in node.hooks:
            if received[index] is not None:
                received[index] = _hooked(node, hook, received[index])
        if not node.strided:
            received = [None if dy is None else contiguous(dy) for dy in received]
        _distribute(node, node.backward(*received), self.gradients)
        if node.saved and not self.retain_graph and wanted(received):
            node.saved = None


def _add_once(functions: list, function: Any) -> None:
    if function not in functions:
        functions.append(function)


def _call_all(functions: list) -> None:
    for function in functions:  # which may add more
        function()


def backward(
    variables: Variable | Iterable[Variable],
    gradients: Array | Iterable[Array | None] | None = None,
    retain_graph: bool = False,
    *,
    late: Deferral | None = None,
) -> None:
    """Add the gradients of a variable, or of several in one run, to the `grad` of all leaves they depend on.

    gradients: one for each variable, of its shape. None for a single element, where it is 1.
    late: puts off what nothing but gradients of parameters needs, with all that comes after it, until
    `late.run()`: products for weights, reductions, updates, hooks. Until then the arrays in `gradients` and
    the inputs of the forward must stay as they are. The gradients are those of a usual backward, to the bit.

    Raises RuntimeError if nothing was recorded, or `late` was given to another backward; ValueError if a
    gradient is missing or has a wrong shape.
    """
    if isinstance(variables, Variable):
        variables, gradients = [variables], [gradients]
    variables = list(variables)
    gradients = [None] * len(variables) if gradients is None else list(gradients)
    if len(gradients) != len(variables):
        raise ValueError(f"backward: {len(gradients)} gradients for {len(variables)} variables")
    gradients = [_checked(v, g) for v, g in zip(variables, gradients, strict=True)]
    if late is not None:
        late.take()
    run = Backward({v.node for v in variables if v.node is not None}, retain_graph, late=late)
    for variable, gradient in zip(variables, gradients, strict=True):
        if variable.node is None:
            variable.accumulate_gradient(gradient)
        else:
            _deliver(variable.edge(), gradient, run.gradients)
    try:
        run.run()
    except BaseException:
        if late is not None:
            late.forget()
        raise


def _checked(variable: Variable, gradient: Array | None) -> Array:
    """The gradient with which backward begins at `variable`."""
    if not variable.requires_grad:
        raise RuntimeError("backward: this tensor depends on nothing that requires a gradient")
    if gradient is None:
        if variable.data.size != 1:
            raise ValueError(f"backward: gradient is needed for shape {variable.data.shape}, not a scalar")
        gradient = np.ones_like(variable.data)
    if gradient.shape != variable.data.shape:
        raise ValueError(f"backward: gradient has shape {gradient.shape}, the tensor {variable.data.shape}")
    return gradient


def later(function: Any, *args: Any, into: tuple = ()) -> tuple:
    """In backward: function(*args, *into), which puts gradients where they belong and gives their tokens.

    into: the handles whose gradients these are, None for one that is not wanted; if none is, nothing is done.
    If the backward that runs puts things off, so is this, and the tokens are given at once. If not, and the
    next node waits for other ranks, the function is called meanwhile. args: for the function; arrays among
    them must stay as they are.
    """
    handles, run = [handle for handle in into if handle is not None], _state.running
    late = None if run is None else run.puts_off
    if into and not handles:
        return into
    travels = any(handle.node is not None for handle in handles)  # on, to the op that made it
    if late is not None and not travels:
        late.put_off(run.outermost, function, args, into)
    elif travels or not handles or run is None or not run.leave_to_next(function, (*args, *into)):
        return function(*args, *into)
    return tuple(None if handle is None else WRITTEN for handle in into)


def _hooked(node: Function, hook: Any, gradient: Array) -> Array:
    with no_grad():
        changed = hook(gradient)
    if changed is None:
        return gradient
    changed = changed.data if isinstance(changed, Variable) else changed
    got = getattr(changed, "shape", type(changed).__name__), getattr(changed, "dtype", None)
    if got != (gradient.shape, gradient.dtype):
        raise ValueError(
            f"hook of a result of {describe(node)}: it must return None or an array of shape "
            f"{gradient.shape} and {gradient.dtype}, got {got[0]} {got[1] or ''}"
        )
    return changed


def backward_of_piece(
    outputs: Iterable[Variable],
    gradients: Iterable[Array | None],
    since: int,
    besides: Iterable[Function] = (),
) -> None:
    """Inside the backward of a node: differentiate what was recorded since the sequence number `since`.

    outputs, gradients: the results of the piece, and the gradient of each (None where nothing used it).
    besides: nodes of the piece, without a gradient of their own, that run in any case. Gradients of what went
    into the piece are left to the backward that is running.

    Raises RuntimeError if the piece uses the result of an op that this backward does not come to after the
    present node: the gradient would be lost.
    """
    outer = _state.running
    wanted = [(v, g) for v, g in zip(outputs, gradients, strict=True) if g is not None and v.requires_grad]
    roots = {v.node for v, _ in wanted if v.node is not None} | set(besides)
    run = Backward(roots, False, since, outer)
    edges = [v.edge() for v, _ in wanted] + [e for node in run.nodes for e in node.edges if e is not None]
    for node in {edge.node for edge in edges if edge.node is not None and edge.node.sequence <= since}:
        if not outer.is_to_come(node):
            present = describe(outer.nodes[outer.position])
            raise RuntimeError(
                f"backward: what {present} runs again uses the result of {describe(node)}, whose gradient "
                "would be lost, since it is not among its inputs; pass it as an argument"
            )
    for variable, gradient in wanted:
        _deliver(variable.edge(), gradient, run.gradients)
    for node in besides:
        _deliver(Edge(node, 0, None), WRITTEN, run.gradients)
    run.run()


def running() -> Backward | None:
    """The backward that runs in this thread now, if one does."""
    return _state.running


def wanted(received: Iterable[Array | None]) -> bool:
    """Whether a gradient came to a node. It may run without, for the order alone, and then frees nothing."""
    return any(dy is not None for dy in received)


def _distribute(node: Function, results: Any, gradients: dict[Function, list]) -> None:
    """Pass what backward returned along the edges of `node`."""
    if not isinstance(results, tuple):
        results = (results,)
    if len(results) != len(node.edges):
        raise RuntimeError(
            f"{describe(node)}.backward gave {len(results)} gradients for {len(node.edges)} inputs"
        )
    for edge, gradient in zip(node.edges, results, strict=True):
        if edge is not None and gradient is not None:
            _deliver(edge, gradient, gradients)


def _deliver(edge: Edge, gradient: Any, gradients: dict[Function, list]) -> None:
    """Put a gradient, or the token that it is where it belongs, to the end of an edge."""
    if edge.leaf is not None and gradient is not WRITTEN:
        edge.leaf.accumulate_gradient(gradient)
    if edge.node is None:
        return
    received = gradients.setdefault(edge.node, [None] * edge.node.outputs)
    if edge.leaf is None and gradient is not WRITTEN:
        before = received[edge.index]
        received[edge.index] = gradient if before is None else _sum(before, gradient)


def _sum(first: Array, second: Array) -> Array:
    """A new array: the first gradient may be held by another node too."""
    here = device.current()
    total = here.empty(first.shape, first.dtype)
    here.kernels.elementwise.add(
        contiguous(first).reshape(-1), contiguous(second).reshape(-1), total.reshape(-1)
    )
    return total
