"""The tape: Variable, Function, no_grad. Knows no op, no layer, no rank.

A Function object is one call of one op and a node of the graph. Nodes carry a sequence number, greater than
those of all nodes that made its inputs. How gradients come back along the nodes is in autograd.py, which has
all names of this file.

Gradients of parameters accumulate, gradients of activations are written. An op that writes a parameter's
gradient where it belongs returns WRITTEN for it: the edge then carries order, but no array.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol

from shardrt import device
from shardrt.hooks import Hooks, RemovableHandle

Array = Any
# fill(first, stop, out, accumulate): writes, or adds, rows [first, stop) of a gradient to `out`.
Fill = Callable[[int, int, Array, bool], None]


# Called with a variable before something is added to its gradient, or before that is read outside backward.
# What has put additions off (late.py) does them first, or refuses.
before_add: "list[Callable[[Variable], None]]" = []
before_read: "list[Callable[[Iterable[Variable]], None]]" = []


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
        self.modules: list = []  # the layers whose forward runs now, outermost first
        self.keeper: Keeper | None = None
        self.first_runs: list[Segment] = []  # of segments, that are under way: outermost first
        self.second_runs: list[Segment] = []


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

    def lent_bits(self) -> Array:
        """As `lent`; of a parameter gathered in bfloat16 where ops compute in float32, the bits (uint16)."""
        return self.lent()

    def edge(self) -> "Edge":
        """Where the gradient of this variable goes, as the graph stands now."""
        return Edge(self.node, self.index, self if self.node is None else None)

    def gradient_target(self) -> tuple[Array, bool, Any]:
        """Where an op puts the gradient of this handle: (array, accumulate, token).

        The op writes the array, or adds to it where `accumulate` is True, and returns the token from
        backward: WRITTEN for a leaf; for the result of another op the array itself, which travels on.
        Subclasses say in `_gradient_target` where that is.
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
        """Put the gradient of this handle, a matrix, where it belongs, by calls of `fill`; gives the token.

        As gradient_target, for an op that can make rows of the gradient by themselves. They may be asked for
        later in this backward: what `fill` reads must stay as it is.
        """
        for hook in before_add:
            hook(self)
        return self._put_rows(fill)

    def _put_rows(self, fill: Fill) -> Any:
        target, accumulate, token = self._gradient_target()
        fill(0, len(target), target, accumulate)
        return token

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

    The results in `again_cheap` (0 for the only one) can be made again by `again` from what is saved: who
    uses one need not save it as well (functional/_again.py). So those in `again_low`, for who takes bits.

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
    again_cheap: tuple[int, ...] = ()
    again_low: tuple[int, ...] = ()

    def forward(self, *args: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def keep(self, result: Any) -> tuple[Array, ...]:
        """Called after forward, of an expensive op: the arrays that only forward can compute."""
        return (result,)

    def resume(self, kept: tuple[Array, ...], *args: Any) -> Any:
        """In place of forward: set `self.saved`, return the result."""
        raise NotImplementedError(f"{type(self).__name__}.resume")

    def again(self, index: int) -> Array:
        """Result `index` once more, to the bit."""
        raise NotImplementedError(f"{type(self).__name__}.again")

    def again_for_product(self, index: int) -> Array:
        """As again, for who takes bits: these, if making them costs less than packing the array."""
        return self.again(index)

    def backward(self, *dy: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.backward")

    def waits(self) -> bool:
        """Whether backward waits for other ranks and calls `Backward.fill` meanwhile."""
        return False

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


def add_hook(variable: Variable, hook: Any) -> RemovableHandle:
    """Call hook(gradient), an array, when the gradient of `variable`, which an op made, is complete.

    What it returns, unless None, goes on in its place.
    """
    node = variable.node
    node.hooks = node.hooks or Hooks()
    return node.hooks.add((variable.index, hook))


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


class Segment(Function):
    """A part of a forward that runs twice: first unrecorded, and again, recorded, when backward comes to it.

    What a schedule of sharded units must know of recomputation is here; recompute.py is its only subclass.

    units: the units that the first run has entered, in order; the schedule appends them.
    besides: nodes of the second run that backward must come to, whatever gradients are asked for; appended
    by the schedule too.
    """

    __slots__ = ("units", "besides")

    def __init__(self) -> None:
        self.units: list = []
        self.besides: list[Function] = []

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """The forward inside a with block is the first run."""
        _state.first_runs.append(self)
        try:
            with no_grad():
                yield
        finally:
            _state.first_runs.pop()

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """The forward inside a with block is the second run."""
        _state.second_runs.append(self)
        try:
            with enable_grad():
                yield
        finally:
            _state.second_runs.pop()


def in_first_run() -> Segment | None:
    """The innermost segment whose first run is under way; None outside of one."""
    return _state.first_runs[-1] if _state.first_runs else None


def in_second_run() -> Segment | None:
    """The innermost segment whose second run is under way; None outside of one."""
    return _state.second_runs[-1] if _state.second_runs else None
