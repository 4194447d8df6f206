"""The tape: Variable, Function, backward, no_grad. Knows no op, no layer, no rank.

A Function object is one call of one op and a node of the graph. Nodes carry a sequence number, and
backward runs the reachable ones in strictly decreasing order: every consumer of a node is newer than the
node, so its gradients are complete when its turn comes, and the whole order is known before it starts.

Gradients of parameters accumulate, gradients of activations are written. An op that writes a parameter's
gradient where it belongs returns WRITTEN for it: the edge then carries order, but no array.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, Protocol

import numpy as np

from shardrt import device
from shardrt.hooks import Hooks, RemovableHandle

Array = Any


class _Written:
    """The token of an edge whose gradient the op itself has put into its place."""

    def __repr__(self) -> str:
        return "WRITTEN"


WRITTEN = _Written()


class _State(threading.local):
    """This thread's tape: ranks that are threads of one process each have their own."""

    def __init__(self) -> None:
        self.grad_enabled = True
        self.newest = 0  # sequence number of the node that this thread recorded last
        self.running: Backward | None = None
        self.modules: list = []  # the layers whose forward runs now, outermost first
        self.keeper: Keeper | None = None


_state = _State()
_numbers = count(1)  # one for all threads: a forward that goes on in another thread must go on counting


def is_grad_enabled() -> bool:
    """Whether ops are recorded now."""
    return _state.grad_enabled


@contextmanager
def set_grad_enabled(enabled: bool) -> Iterator[None]:
    """Record ops, or not, inside a with block."""
    before = _state.grad_enabled
    _state.grad_enabled = enabled
    try:
        yield
    finally:
        _state.grad_enabled = before


def modules() -> list:
    """The stack of layers whose forward runs now; nn.Module keeps it, nodes remember the innermost."""
    return _state.modules


def no_grad() -> Any:
    """Record no op inside a with block (also a decorator)."""
    return set_grad_enabled(False)


def enable_grad() -> Any:
    """Record ops inside a with block, even inside `no_grad` (also a decorator)."""
    return set_grad_enabled(True)


def now() -> int:
    """A sequence number above those of all nodes so far: what is recorded from now on has a greater one."""
    return next(_numbers)


def recorded_since(number: int) -> bool:
    """Whether this thread has recorded a node since `now` gave that number."""
    return _state.newest > number


class Keeper(Protocol):
    """Computes expensive ops in their place: to keep their results, or to take results that were kept."""

    def result_of(self, node: "Function", raw: list) -> Any: ...


@contextmanager
def keeping(keeper: Keeper | None) -> Iterator[None]:
    """Let `keeper` compute the expensive ops inside a with block (None: as usual)."""
    before, _state.keeper = _state.keeper, keeper
    try:
        yield
    finally:
        _state.keeper = before


def keeper() -> Keeper | None:
    """Who computes expensive ops now, if somebody does."""
    return _state.keeper


class Variable:
    """An array with a place in the graph: what a Tensor is to the tape.

    `node` is the Function that made it (None for a leaf) and `index` which of its outputs it is. A leaf that
    requires a gradient gets it in `grad`, an array of the shape and dtype of `data`.
    """

    __slots__ = ("data", "grad", "requires_grad", "node", "index", "__weakref__")

    # The class of op results: the tensor library registers its own (a parameter's ops give plain tensors).
    result_type: "type[Variable]"

    def __init__(self, data: Array, requires_grad: bool = False) -> None:
        self.data = data
        self.grad = None
        self.requires_grad = requires_grad
        self.node = None
        self.index = 0

    @property
    def is_leaf(self) -> bool:
        """True if no op made this variable."""
        return self.node is None

    def value(self) -> Array:
        """The array that an op reads, and may save for backward."""
        return self.data

    def lent(self) -> Array:
        """The array that an op reads by a handle: while it runs, and no longer."""
        return self.data

    def edge(self) -> "Edge":
        """Where the gradient of this variable goes, as the graph stands now."""
        return Edge(self.node, self.index, self if self.node is None else None)

    def gradient_target(self) -> tuple[Array, bool, Any]:
        """Where an op puts the gradient of this handle: (array, accumulate, token).

        The op writes the array, or adds to it where `accumulate` is True, and returns the token from
        backward: WRITTEN for a leaf; for the result of another op the array itself, which travels on.
        """
        if self.node is not None:
            fresh = device.current().empty(self.data.shape, self.data.dtype)
            return fresh, False, fresh
        if self.grad is not None:
            return self.grad, True, WRITTEN
        self.grad = device.current().empty(self.data.shape, self.data.dtype)
        return self.grad, False, WRITTEN

    def accumulate_gradient(self, gradient: Array) -> None:
        """Put an array that an op returned for this leaf where its gradient belongs."""
        target, accumulate, _ = self.gradient_target()
        if accumulate:
            target += gradient
        else:
            target[...] = gradient


Variable.result_type = Variable


class Edge:
    """From a node to where the gradient of one of its inputs goes: another node, a leaf, or both.

    Both: a parameter of a sharded unit. Its gradient has a place of its own, and the unit's Unshard node
    must run after everything that puts a gradient there.
    """

    __slots__ = ("node", "index", "leaf")

    def __init__(self, node: "Function | None", index: int, leaf: Variable | None) -> None:
        self.node = node
        self.index = index
        self.leaf = leaf


class Function:
    """One op. A subclass has `forward` and `backward`, both on raw arrays, both calling kernels.

    forward(*args) gets the arguments of `apply` with each Variable replaced by its array, except at the
    positions in `handles`: parameters arrive as Variables, because their storage comes and goes with the
    unit that shards them, and are saved as such. It returns an array or a tuple of arrays and may set
    `self.saved`, the one tuple that backward unpacks. `self.needs[i]` tells whether the gradient of
    argument i is wanted.

    backward(*dy) gets one gradient per output (None for an output that nothing used) and returns one entry
    per argument, or just the entry where there is one argument: an array, WRITTEN, or None. It must not
    write into dy, which other nodes may hold.

    Arrays are made C-contiguous on the way in, unless `strided` says that the op takes any strides.

    An `expensive` op can also be recorded without being computed, from a result that was kept: what `keep`
    returned after forward, `resume` takes, and leaves the op as forward would have.
    """

    __slots__ = ("saved", "needs", "edges", "sequence", "outputs", "module", "hooks", "__weakref__")

    saved: tuple[Any, ...]
    needs: tuple[bool, ...]
    edges: "tuple[Edge | None, ...]"
    sequence: int
    outputs: int

    handles: tuple[int, ...] = ()
    strided = False
    expensive = False

    def forward(self, *args: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def keep(self, result: Any) -> tuple[Array, ...]:
        """Called after forward, of an expensive op: the arrays that only forward can compute."""
        return (result,)

    def resume(self, kept: tuple[Array, ...], *args: Any) -> Any:
        """In place of forward: set `self.saved`, return the result."""
        raise NotImplementedError(f"{type(self).__name__}.resume")

    def backward(self, *dy: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.backward")

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run the op and record it, if any input requires a gradient. Gives Variable(s) of `result_type`."""
        node = cls()
        node.saved = ()
        enabled, handles = _state.grad_enabled, cls.handles
        needs, raw = [], []
        for position, argument in enumerate(args):
            variable = isinstance(argument, Variable)
            needs.append(enabled and variable and argument.requires_grad)
            if variable and position not in handles:
                argument = argument.value() if cls.strided else contiguous(argument.value())
            raw.append(argument)
        node.needs = tuple(needs)
        recorded = True in needs
        if recorded:
            node.edges = tuple([a.edge() if n else None for a, n in zip(args, needs, strict=True)])
            node.enter_tape()
        if cls.expensive and _state.keeper is not None:
            result = _state.keeper.result_of(node, raw)
        else:
            result = node.forward(*raw)
        return node.wrap(result, recorded)

    def enter_tape(self) -> None:
        """Take the next sequence number."""
        self.sequence = _state.newest = next(_numbers)
        self.module = _state.modules[-1] if _state.modules else None
        self.hooks: Hooks | tuple = ()

    def wrap(self, result: Any, recorded: bool) -> Any:
        """Variables around the arrays that forward returned."""
        single = not isinstance(result, tuple)
        arrays = (result,) if single else result
        self.outputs = len(arrays)
        if not recorded:
            self.saved = ()
        variables = []
        for index, array in enumerate(arrays):
            variable = Variable.result_type(array, recorded)
            if recorded:
                variable.node, variable.index = self, index
            variables.append(variable)
        return variables[0] if single else tuple(variables)


def contiguous(array: Array) -> Array:
    """`array` itself if it is C-contiguous, else a copy that is."""
    return array if array.flags.c_contiguous else array.copy()


class Backward:
    """One run of backward: the nodes in the order in which they run, and where it stands.

    A piece of the graph that a node records while it runs has a run of its own, with the other as `outer`:
    it runs the nodes newer than `since`. What it finds for older ones goes to the outer run, whose turn for
    them is to come, so gradients add up in the same order as if the piece had always been there.
    """

    def __init__(
        self, roots: Iterable[Function], retain_graph: bool, since: int = 0, outer: "Backward | None" = None
    ) -> None:
        self.nodes = reachable(roots, since)
        self.position = 0
        self.retain_graph = retain_graph
        self.since = since
        self.outer = outer
        self.gradients: dict[Function, list] = {} if outer is None else outer.gradients
        self.passed: Function | None = None  # whose gradient the op before it has taken further than asked
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

    def at_end(self, function: Any, hook: bool = False) -> None:
        """Call `function()` once, when the last node of the outermost run has run; users' hooks last.

        Then gradients are reduced, and updates that an optimizer makes during backward are there.
        """
        functions = self.outermost._hooks if hook else self.outermost._at_end
        if function not in functions:
            functions.append(function)

    def in_any_case(self, function: Any) -> None:
        """Call `function()` once, when the outermost run ends or raises an Exception: before users' hooks."""
        functions = self.outermost._in_any_case
        if function not in functions:
            functions.append(function)

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

    def run(self) -> None:
        """Run the nodes. A node whose gradient nobody has produced is passed over."""
        before, _state.running = _state.running, self
        try:
            for position, node in enumerate(self.nodes):
                self.position = position
                received = self.gradients.pop(node, None)
                if received is not None:
                    self._run(node, received)
            for functions in (self._at_end, self._in_any_case, self._hooks):
                for function in functions:  # which may add more
                    function()
        except Exception:
            for function in self._in_any_case:
                with suppress(Exception):  # what was raised first is told
                    function()
            raise
        finally:
            _state.running = before

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


def backward(variable: Variable, gradient: Array | None = None, retain_graph: bool = False) -> None:
    """Add the gradients of `variable` to the `grad` of every leaf it depends on.

    `gradient` has the shape of `variable`; it may be left out for a single element, where it is 1.

    Raises RuntimeError if nothing was recorded, ValueError if the gradient is missing or has a wrong shape.
    """
    if not variable.requires_grad:
        raise RuntimeError("backward: this tensor depends on nothing that requires a gradient")
    if gradient is None:
        if variable.data.size != 1:
            raise ValueError(f"backward: gradient is needed for shape {variable.data.shape}, not a scalar")
        gradient = np.ones_like(variable.data)
    if gradient.shape != variable.data.shape:
        raise ValueError(f"backward: gradient has shape {gradient.shape}, the tensor {variable.data.shape}")
    if variable.node is None:
        variable.accumulate_gradient(gradient)
        return
    run = Backward([variable.node], retain_graph)
    _deliver(variable.edge(), gradient, run.gradients)
    run.run()


def add_hook(variable: Variable, hook: Any) -> RemovableHandle:
    """Call hook(gradient), an array, when the gradient of `variable`, which an op made, is complete.

    What it returns, unless None, goes on in its place.
    """
    node = variable.node
    node.hooks = node.hooks or Hooks()
    return node.hooks.add((variable.index, hook))


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


def on_tape(node: Function) -> bool:
    """Whether `node` has been recorded."""
    return hasattr(node, "sequence")


def describe(node: Function) -> str:
    """The op and the module that made it, for error messages."""
    return type(node).__name__ + (f" of {node.module.name}" if node.module is not None else "")


def reachable(roots: Iterable[Function], since: int = 0) -> list[Function]:
    """The nodes newer than `since` to which edges lead from `roots` along such nodes, newest first."""
    seen = {root for root in roots if root.sequence > since}
    stack = list(seen)
    while stack:
        for edge in stack.pop().edges:
            if edge is None or edge.node is None or edge.node in seen or edge.node.sequence <= since:
                continue
            seen.add(edge.node)
            stack.append(edge.node)
    return sorted(seen, key=lambda node: node.sequence, reverse=True)


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
