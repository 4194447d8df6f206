"""Recomputation: a module keeps only its inputs for backward, and runs again there to compute the rest.

(Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; also called activation checkpointing.) The
forward runs without a tape and leaves one node, Recompute. Its backward runs the forward again under a fresh
tape and differentiates that. Random numbers are a function of their purpose, so the second run is bitwise
identical to the first, dropout included. Of sharding this file knows only which units a run entered.
docs/howto/fit_in_memory.md has the costs.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from shardrt import autograd, dtypes, pytree, random, stand_ins, tape
from shardrt.autograd import WRITTEN, Backward, Edge, Function, Segment, Variable
from shardrt.nn.module import WrapperOrder
from shardrt.nn.public import Module, Parameter

__all__ = ["POLICIES", "Recomputation", "Recompute", "backward_of_piece", "checkpoint", "checkpoint_blocks"]

Array = Any

POLICIES = ("full", "matmul")


def checkpoint(module: Module, policy: str = "full") -> Module:
    """Recompute `module` in backward instead of keeping its forward's arrays; gives `module` back.

    The module stays the same object with the same parameter names, and its gradients are bitwise identical.
    Its forward must do the same when it runs again: tensors that carry a gradient must be arguments, and the
    forward must not write to its arguments. Tensors are found in tuples, lists, dicts and dataclasses.

    Args:
        module: the module.
        policy: "full" keeps the module's inputs and nothing else. "matmul" also keeps the results of matmuls
            and attention, and recomputes only cheap ops.

    Raises:
        TypeError: if `module` is no Module; later, if a forward returns no tensor.
        ValueError: for another policy, or if the module is recomputed already.

    Example:
        >>> from shardrt import nn
        >>> from shardrt.recompute import checkpoint
        >>> block = checkpoint(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
    """
    if not isinstance(module, Module):
        raise TypeError(f"checkpoint: module must be a shardrt.nn.Module, got {type(module).__name__}")
    if policy not in POLICIES:
        raise ValueError(f"checkpoint: policy must be 'full' or 'matmul', got {policy!r}")
    if module.around(Recomputation) is not None:
        raise ValueError(
            f"checkpoint: it was called on {module.name or type(module).__name__} before; call it once"
        )
    module.wrap_forward(Recomputation(policy))
    return module


def checkpoint_blocks(modules: Iterable[Module], every: int = 1, policy: str = "full") -> None:
    """`checkpoint` the first of `modules` and every k-th after it: part of the memory for part of the time.

    Raises:
        ValueError: if `every` is less than 1, and as `checkpoint`.

    Example:
        >>> from shardrt import nn
        >>> from shardrt.recompute import checkpoint_blocks
        >>> blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        >>> checkpoint_blocks(blocks, every=2)
    """
    if every < 1:
        raise ValueError(f"checkpoint_blocks: every must be at least 1, got {every}")
    for module in list(modules)[::every]:
        checkpoint(module, policy)


class Recomputation:
    """The wrapper that `checkpoint` attaches to a module."""

    layer, every_entry = WrapperOrder.RECOMPUTATION, False

    def __init__(self, policy: str) -> None:
        self.policy = policy

    def run(self, module: Module, forward: Callable, /, *args: Any, **kwargs: Any) -> Any:
        """Run forward, without a tape if backward will run it again."""
        inputs = [tensor for tensor in pytree.tensors((args, kwargs)) if tensor.requires_grad]
        wanted = inputs or any(parameter.requires_grad for parameter in module.parameters())
        if not autograd.is_grad_enabled() or not wanted:
            return forward(*args, **kwargs)
        node = Recompute(module, forward, (args, kwargs))
        keeper = _Keep(tape.keeper()) if self.policy == "matmul" else tape.keeper()
        with node.first_run(), tape.keeping(keeper):
            output = forward(*args, **kwargs)
        stand_ins.returned(
            output, "checkpoint", module.name or type(module).__name__
        )  # else gradients are lost
        return node.mark(output, inputs, tuple(keeper.kept) if self.policy == "matmul" else None)


class Recompute(Segment):
    """One call of a recomputed module."""

    __slots__ = ("_forward", "_call", "_arrays", "_modes", "_random", "_shapes")
    strided = True

    def __init__(self, module: Module, forward: Callable, call: tuple) -> None:
        super().__init__()
        self.module = module
        self._forward = forward
        self._arrays: list[Array] = []
        self._call = pytree.replaced(call, self._set_aside)
        self._modes = [below.training for below in module.modules()]
        self._random = random.state()

    def _set_aside(self, tensor: Variable) -> Variable:
        """A stand-in for an argument, whose array goes to `saved`; see _stays."""
        if _stays(tensor):
            return tensor
        self._arrays.append(tensor.value())
        return stand_ins.hollow(tensor)

    def mark(self, output: Any, inputs: list[Variable], kept: tuple | None) -> Any:
        """The output of forward with this node behind its floating tensors."""
        tensors = _floating(output)
        self.saved = (tuple(self._arrays), kept)
        self._arrays = []
        self._shapes = [tensor.data.shape for tensor in tensors]
        self.needs = (True,) * len(inputs)
        self.edges = tuple(tensor.edge() for tensor in inputs)
        self.enter_tape()
        return pytree.exchanged(output, tensors, self.wrap(tuple(t.value() for t in tensors), True))

    def backward(self, *dy: Array) -> tuple:
        since = tape.now()
        outputs = self._again(frees=autograd.wanted(dy) and not autograd.running().retain_graph)
        besides, self.besides = [node for node in self.besides if autograd.on_tape(node)], []
        backward_of_piece(outputs, dy, since, besides)
        return (None,) * len(self.edges)  # the inner backward has delivered them along the same edges

    def _again(self, frees: bool) -> list[Variable]:
        """Run the forward again in its earlier state. Returns its floating outputs."""
        arrays, kept = self.saved
        if frees:
            self.saved = None  # the fresh tape has them now, and frees them as backward runs
        rest = iter(arrays)
        del arrays
        args, kwargs = pytree.replaced(self._call, lambda tensor: _restored(tensor, rest))
        running = autograd.modules()
        running.append(self.module)
        try:
            with ExitStack() as stack:
                stack.enter_context(self.second_run())
                stack.enter_context(_training(self.module, self._modes))
                stack.enter_context(random.at(self._random))
                stack.enter_context(tape.keeping(None if kept is None else _Resume(kept)))
                del kept
                outputs = _floating(self._forward(*args, **kwargs))
        finally:
            running.pop()
        if [tensor.data.shape for tensor in outputs] != self._shapes:
            raise RuntimeError(
                f"checkpoint: the forward of {self.module.name or type(self.module).__name__} gave shapes "
                f"{self._shapes} and then, run again, {[tensor.data.shape for tensor in outputs]}"
            )
        return outputs


def backward_of_piece(
    outputs: Iterable[Variable],
    gradients: Iterable[Array | None],
    since: int,
    besides: Iterable[Function] = (),
) -> None:
    """Inside the backward of a node: run backward through the nodes recorded since the number `since`.

    The gradients of the nodes' inputs are left to the running backward.

    Args:
        outputs, gradients: the results of these nodes, and the gradient of each; None if it was not used.
        besides: nodes among them that run even without a gradient.

    Raises:
        RuntimeError: if an input is the result of an op that the running backward does not come to after the
            present node: the gradient would be lost.
    """
    outer = autograd.running()
    used = [(v, g) for v, g in zip(outputs, gradients, strict=True) if g is not None and v.requires_grad]
    roots = {v.node for v, _ in used if v.node is not None} | set(besides)
    run = Backward(roots, False, since, outer)
    edges = [v.edge() for v, _ in used] + [e for node in run.nodes for e in node.edges if e is not None]
    for node in {edge.node for edge in edges if edge.node is not None and edge.node.sequence <= since}:
        if not _is_to_come(outer, node):
            present, other = autograd.describe(outer.node), autograd.describe(node)
            raise RuntimeError(
                f"backward: the forward that {present} runs again uses the result of {other}, whose "
                "gradient would be lost, since the result is no input; pass it as an argument"
            )
    for variable, gradient in used:
        run.deliver(variable.edge(), gradient)
    for node in besides:
        run.deliver(Edge(node, 0, None), WRITTEN)
    run.run()


def _is_to_come(run: Backward, node: Function) -> bool:
    """Whether `node` runs after the present node, in `run` or in a run around it."""
    while node.sequence <= run.since and run.outer is not None:
        run = run.outer
    place = bisect_left(run.nodes, -node.sequence, key=lambda other: -other.sequence)
    return run.position < place < len(run.nodes) and run.nodes[place] is node


class _Keep:
    """Computes expensive ops as usual and keeps their results, in order."""

    def __init__(self, around: tape.Keeper | None) -> None:
        self.kept: list[tuple[Array, ...]] = []
        self._around = around  # the keeper of an enclosing recomputed module

    def result_of(self, node: Function, raw: list) -> Any:
        result = node.forward(*raw) if self._around is None else self._around.result_of(node, raw)
        self.kept.append(node.keep(result))
        return result


class _Resume:
    """Gives expensive ops the kept results, in the same order."""

    def __init__(self, kept: tuple[tuple[Array, ...], ...]) -> None:
        self._kept = list(reversed(kept))

    def result_of(self, node: Function, raw: list) -> Any:
        if not self._kept:
            raise RuntimeError(
                f"checkpoint: {autograd.describe(node)} runs again, but did not run the first time; with "
                "policy='matmul' a forward must run the same ops again"
            )
        return node.resume(self._kept.pop(), *raw)


def _floating(output: Any) -> list[Variable]:
    """The floating tensors in a forward's result, each once, in order."""
    return [tensor for tensor in pytree.tensors(output) if dtypes.floating(tensor.data.dtype)]


def _stays(tensor: Variable) -> bool:
    """Whether to keep an argument itself: a parameter or leaf stores its own gradient and owns its memory."""
    return isinstance(tensor, Parameter) or (tensor.requires_grad and tensor.is_leaf)


def _restored(stand_in: Variable, arrays: Iterator[Array]) -> Variable:
    """The argument for a stand-in, with the same edge in the graph, so that its gradient arrives there."""
    if _stays(stand_in):
        return stand_in
    return stand_ins.filled(stand_in, next(arrays))


@contextmanager
def _training(module: Module, modes: list[bool]) -> Iterator[None]:
    """Switch `module` and all below it to training or evaluation, as they were, inside a with block."""
    modules = list(module.modules())
    before = [below.training for below in modules]
    try:
        for below, mode in zip(modules, modes, strict=True):
            below.training = mode
        yield
    finally:
        for below, mode in zip(modules, before, strict=True):
            below.training = mode
