"""The tape: Variable, Function, no_grad. It knows no op, no layer and no rank.

A Function object is one call of one op, and a node of the graph. Each node has a sequence number, greater
than those of all nodes that made its inputs. autograd.py runs backward along the nodes; it exports names of
this file, too.

Gradients of parameters accumulate; gradients of activations are written once. An op may write a parameter's
gradient into its final place itself. It then returns WRITTEN: the edge carries order, but no array.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol

from shardrt import device

Array = Any
# fill(first, stop, out, accumulate): writes, or adds, rows [first, stop) of a gradient to `out`.
Fill = Callable[[int, int, Array, bool], None]


# Hooks of deferred backwards (deferred_gradients.py). The tape calls before_add(variable) before it adds to
# the variable's gradient, and before_read(variables) before gradients are read outside of backward. A hook
# makes the deferred additions first, or raises.
before_add: "list[Callable[[Variable], None]]" = []
before_read: "list[Callable[[Iterable[Variable]], None]]" = []


class _Written:
    """The token for a gradient that the op itself has written into its final place."""

    def __repr__(self) -> str:
        return "WRITTEN"


WRITTEN = _Written()


class _State(threading.local):
    """The tape of this thread. Ranks may be threads of one process; each has its own tape."""

    def __init__(self) -> None:
        self.grad_enabled = True
        self.newest = 0  # sequence number of the node that this thread recorded last
        self.modules: list = []  # the layers whose forward runs now, outermost first
        self.keeper: Keeper | None = None
        self.first_runs: list[Segment] = []  # segments in their first run now, outermost first
        self.second_runs: list[Segment] = []  # segments in their second run now, outermost first


_state = _State()
_numbers = count(1)  # shared by all threads: a forward may continue in another thread, with greater numbers


def is_grad_enabled() -> bool:
    """Whether ops are recorded now."""
    return _state.grad_enabled


@contextmanager
def set_grad_enabled(enabled: bool) -> Iterator[None]:
    """Turn the recording of ops on or off inside a with block."""
    before = _state.grad_enabled
    _state.grad_enabled = enabled
    try:
        yield
    finally:
        _state.grad_enabled = before


def modules() -> list:
    """The stack of layers whose forward runs now. nn.Module maintains it; nodes store the innermost layer."""
    return _state.modules


def no_grad() -> Any:
    """Record no op inside a with block (also a decorator)."""
    return set_grad_enabled(False)


def enable_grad() -> Any:
    """Record ops inside a with block, even inside `no_grad` (also a decorator)."""
    return set_grad_enabled(True)


def now() -> int:
    """A sequence number above those of all nodes so far and below those of all later nodes."""
    return next(_numbers)


def recorded_since(number: int) -> bool:
    """Whether this thread has recorded a node since `now` returned `number`."""
    return _state.newest > number


class Keeper(Protocol):
    """Runs expensive ops instead of the tape, to keep their results or to reuse kept results."""

    def result_of(self, node: "Function", raw: list) -> Any:
        """Run an expensive node, or restore its result, and return that."""


@contextmanager
def keeping(keeper: Keeper | None) -> Iterator[None]:
    """Let `keeper` run the expensive ops inside a with block. None: the tape runs them."""
    before, _state.keeper = _state.keeper, keeper
    try:
        yield
    finally:
        _state.keeper = before


def keeper() -> Keeper | None:
    """The keeper that runs expensive ops now, or None."""
    return _state.keeper


class Variable:
    """An array with a place in the graph. Tensor is a subclass.

    node: the Function that made it; None for a leaf. index: which of the node's outputs it is.
    grad: the gradient of a leaf that requires one, an array of the shape and dtype of `data`.
    """

    __slots__ = ("data", "grad", "requires_grad", "node", "index", "__weakref__")

    # The class of op results, the same for tensors and parameters. tensor.py sets it to Tensor.
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
        """The array that an op reads by a handle. It is valid only while the op runs."""
        return self.data

    def lent_bits(self) -> Array:
        """As `lent`, but a parameter gathered in 16 bits while ops compute in float32 comes as raw uint16."""
        return self.lent()

    def edge(self) -> "Edge":
        """The edge along which the gradient of this variable travels, in the present graph."""
        return Edge(self.node, self.index, self if self.node is None else None)

    def gradient_target(self) -> tuple[Array, bool, Any]:
        """(array, accumulate, token): the place for the gradient of this handle.

        The op writes the array, or adds to it if `accumulate`, and returns the token from backward. The token
        is WRITTEN for a leaf. For a result of another op it is the array itself, which travels on. Subclasses
        override `_gradient_target`.
        """
        for hook in before_add:
            hook(self)
        return self._gradient_target()

    def _gradient_target(self) -> tuple[Array, bool, Any]:
        if self.node is not None:
            fresh = device.current().empty(self.data.shape, self.data.dtype)
            return fresh, False, fresh
        if self.grad is not None:
            return self.grad, True, WRITTEN
        self.grad = device.current().empty(self.data.shape, self.data.dtype)
        return self.grad, False, WRITTEN

    def put_rows(self, fill: Fill) -> Any:
        """Have `fill` write the gradient of this handle, a matrix, in ranges of rows; gives the token.

        It replaces gradient_target for an op that can compute any rows of the gradient by themselves. `fill`
        may be called later in this backward, so the arrays that it reads must not change.
        """
        for hook in before_add:
            hook(self)
        return self._put_rows(fill)

    def _put_rows(self, fill: Fill) -> Any:
        target, accumulate, token = self._gradient_target()
        fill(0, len(target), target, accumulate)
        return token

    def accumulate_gradient(self, gradient: Array) -> None:
        """Add an array that an op returned for this leaf to the leaf's gradient."""
        target, accumulate, _ = self.gradient_target()
        if accumulate:
            target += gradient
        else:
            target[...] = gradient


Variable.result_type = Variable


class Edge:
    """Leads from a node to the target of one input's gradient: another node, a leaf, or both.

    It is both for a parameter of a sharded unit. The gradient goes to the leaf, and the unit's PostBackward
    node must run after all nodes that write such gradients.
    """

    __slots__ = ("node", "index", "leaf")

    def __init__(self, node: "Function | None", index: int, leaf: Variable | None) -> None:
        self.node = node
        self.index = index
        self.leaf = leaf


class Function:
    """One op. A subclass defines `forward` and `backward`. Both work on raw arrays and call kernels.

    forward(*args) gets the arguments of `apply`, each Variable replaced by its array. At the positions in
    `handles`, arguments stay Variables. Parameters are passed and saved as handles, because the memory of
    their values comes and goes with the unit that shards them. forward returns an array or a tuple of arrays.
    It may set `self.saved`, a tuple for backward. `self.needs[i]` says whether the gradient of argument i is
    wanted.

    backward(*dy) gets one gradient for each output; None for an output that was not used. It returns one
    entry for each argument: an array, WRITTEN, or None. With one argument it may return the bare entry. It
    must not write into dy, which other nodes may hold.

    strided: the op takes arrays of any strides. Other ops get C-contiguous arrays.
    expensive: a Keeper may replace forward. `keep` gives the arrays to keep after forward, and `resume` takes
    them in place of forward and leaves the op in the same state.
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
        """Compute the outputs, and set `self.saved`."""
        raise NotImplementedError(f"{type(self).__name__} must define forward")

    def keep(self, result: Any) -> tuple[Array, ...]:
        """The arrays of an expensive op that only forward can compute. Called after forward."""
        return (result,)

    def resume(self, kept: tuple[Array, ...], *args: Any) -> Any:
        """Set `self.saved` and return the result, in place of forward."""
        raise NotImplementedError(f"{type(self).__name__} has expensive=True, so it must define resume")

    def backward(self, *dy: Any) -> Any:
        """Compute the gradients of the arguments."""
        raise NotImplementedError(f"{type(self).__name__} must define backward")

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run the op, and record it if an input requires a gradient. Gives Variable(s) of `result_type`."""
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
        """Become a node: take the next sequence number and store the innermost layer."""
        self.sequence = _state.newest = next(_numbers)
        self.module = _state.modules[-1] if _state.modules else None
        self.hooks: Iterable[tuple[int, Callable[[Array], Array]]] = ()  # (output, hook of its gradient)

    def wrap(self, result: Any, recorded: bool) -> Any:
        """Make Variables of the arrays that forward returned."""
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


def on_tape(node: Function) -> bool:
    """Whether `node` has been recorded."""
    return hasattr(node, "sequence")


def describe(node: Function) -> str:
    """The names of the op and of the module that made the node, for error messages."""
    return type(node).__name__ + (f" of {node.module.name}" if node.module is not None else "")


def reachable(roots: Iterable[Function], since: int = 0) -> list[Function]:
    """The nodes newer than `since` that are reachable from `roots` along such nodes, newest first."""
    seen = {root for root in roots if root.sequence > since}
    stack = list(seen)
    while stack:
        for edge in stack.pop().edges:
            if edge is None or edge.node is None or edge.node in seen or edge.node.sequence <= since:
                continue
            seen.add(edge.node)
            stack.append(edge.node)
    return sorted(seen, key=lambda node: node.sequence, reverse=True)


class Segment(Function):
    """A part of a forward that runs twice: first unrecorded, then recorded, when backward reaches it.

    units: the units that the first run entered, in order. The schedule appends them.
    besides: nodes of the second run that backward must run even if no gradient reaches them. The schedule
    appends them.
    """

    __slots__ = ("units", "besides")

    def __init__(self) -> None:
        self.units: list = []
        self.besides: list[Function] = []

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Make the with block the first run of the segment, unrecorded."""
        _state.first_runs.append(self)
        try:
            with no_grad():
                yield
        finally:
            _state.first_runs.pop()

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """Make the with block the second run of the segment, recorded."""
        _state.second_runs.append(self)
        try:
            with enable_grad():
                yield
        finally:
            _state.second_runs.pop()


def in_first_run() -> Segment | None:
    """The innermost segment that is in its first run now, or None."""
    return _state.first_runs[-1] if _state.first_runs else None


def in_second_run() -> Segment | None:
    """The innermost segment that is in its second run now, or None."""
    return _state.second_runs[-1] if _state.second_runs else None
