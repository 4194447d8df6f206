"""Which of four kinds each tensor is along an axis of the mesh, inferred from the ops of a forward.

I: the same on all ranks. R: the same, and each rank uses it in its own way. V: each rank has its own part.
P: each has a summand. Gradients of these are I, P, V and R (functional/collective.py). A kind says what is
still to be done with a gradient; ranks that mix them train a model that is slightly wrong, and say nothing.

    def body():
        with on_tape(along(mesh["tp"])) as tape:
            tape.result = model(tokens, targets)
        return tape

    with recording():
        tapes = run_ranks(2, body)
    infer(tapes, {"blocks.0.mlp.up.weight": V(0), "blocks.0.norm1.weight": R, ...})

Each rank notes its ops as they run. `infer` goes through them, of all ranks of the axis at once, from the
kinds of parameters to that of the result, and raises KindError with the op, its module and its arguments at
the first op that mixes kinds. What the rules say is the same on all ranks must have equal bits there. What
comes from outside, an index or an array, is each rank's own where ranks differ.
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from shardrt import autograd
from shardrt.autograd import Function, Variable
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.protocol import Communicator
from shardrt.nn import Parameter


class Kind(NamedTuple):
    """letter: I, R, V, P, or C, which is the same on all ranks and gets no gradient. cut: see V."""

    letter: str
    cut: int | None = None

    def __str__(self) -> str:
        return self.letter if self.cut is None else f"{self.letter}({self.cut})"


C, I, R, P = Kind("C"), Kind("I"), Kind("R"), Kind("P")  # noqa: E741  the field's letters


def V(cut: int | None = None) -> Kind:  # noqa: N802
    """Own. cut: the dimension in which a parameter is cut."""
    return Kind("V", cut)


class KindError(Exception):
    """An op that mixes kinds, so that gradients are wrong."""


# What ops do with kinds. All others take no P, and what they take may meet.

COLLECTIVES = {  # what each takes -> the kind of what it gives
    "CopyTo": ({"x": "I"}, R),
    "ReduceFrom": ({"x": "P"}, I),
    "Gather": ({"x": "V"}, R),
    "GatherSame": ({"x": "V"}, I),
    "ScatterTo": ({"x": "I"}, V()),
    "ReduceScatterTo": ({"x": "P"}, V()),
    "AllToAll": ({"x": "V"}, V()),
    "AllToAllRows": ({"x": "V"}, V()),
    "Exchange": ({"x": "V"}, V()),
    "VocabularyEmbedding": ({"indices": "C", "weight": "V"}, P),
    "VocabularyCrossEntropy": ({"logits": "V", "targets": "C"}, I),
    "VocabularyLinearCrossEntropy": ({"x": "R", "weight": "V", "targets": "C"}, I),
    "GatherLogits": ({"logits": "V"}, I),
}
AMONG_SOME = {"AllToAll", "AllToAllRows", "Gather"}  # over a part of the axis: from own to own
SHAPES = {"Expand", "GetItem", "Permute", "Reshape", "Split"}
LINEAR = SHAPES | {"Convert", "CumSum", "MeanPool2d", "Neg", "Round", "Sum"}  # in their one tensor
SUMS = {"Add", "Concatenate", "Sub"}  # linear in all of them together
PRODUCTS = {"MatMul", "Mul"}  # linear in each
LAYERS = {"Linear", "LinearGELU"}


# -- recording


class Argument(NamedTuple):
    """What an op was given.

    what: a "result", key (call, output); "parameter", key its name, bits whether it is trained; "leaf", key
    whether it requires a gradient; "communicator", key as of `along`; or "raw", anything else.
    """

    what: str
    key: Any = None
    bits: int = 0

    @property
    def is_tensor(self) -> bool:
        return self.what in ("result", "parameter", "leaf")


class Call(NamedTuple):
    """One op. bits: a checksum of each result."""

    op: str
    module: str
    names: tuple[str, ...]  # of its arguments
    arguments: tuple[Argument, ...]
    bits: tuple[int, ...]


def along(mesh: DeviceMesh) -> Callable[[Communicator], str]:
    """Says of a communicator whether it joins "all" ranks of this axis, "some" of them, or others ("")."""
    axis = set(mesh.ranks.ravel().tolist())

    def which(communicator: Communicator) -> str:
        made = mesh._family.communicators.items()
        joined = next((set(ranks) for (_, ranks), other in made if other is communicator), None)
        assert joined is not None, "no communicator of this mesh"
        return "all" if joined == axis else "some" if joined < axis and len(joined) > 1 else ""

    return which


_here = threading.local()  # ranks are threads


class Tape:
    """What one rank's ops were given. which: see `along`. Set `result` to the loss."""

    def __init__(self, which: Callable[[Communicator], str]) -> None:
        self.calls: list[Call] = []
        self.result: Variable | None = None
        self._which = which
        self._kept: list = []  # so that no id is used twice
        self._by_variable: dict[int, tuple[int, int]] = {}
        self._by_node: dict[tuple[Function, int], tuple[int, int]] = {}
        self._by_array: dict[int, tuple[int, int]] = {}

    def add(self, op: type[Function], given: tuple, results: Any) -> None:
        results = results if isinstance(results, tuple) else (results,)
        arguments = tuple(self._described(argument) for argument in given)
        running = autograd.modules()
        self.calls.append(
            Call(
                op.__name__,
                (running[-1].name or type(running[-1]).__name__) if running else "",
                _argument_names(op, len(given)),
                arguments,
                tuple(_bits(result.data) for result in results),
            )
        )
        for index, result in enumerate(results):
            place = len(self.calls) - 1, index
            self._kept += [result, result.data]
            self._by_variable[id(result)] = self._by_array[id(result.data)] = place
            if result.node is not None:
                self._by_node[result.node, index] = place

    def place(self, variable: Variable) -> tuple[int, int] | None:
        """Which result it is. Sharded units and recomputation pass results on as variables of their own."""
        if id(variable) in self._by_variable:
            return self._by_variable[id(variable)]
        if variable.node is not None and variable.node.edges:
            edge = variable.node.edges[min(variable.index, len(variable.node.edges) - 1)]
            if edge is not None and (edge.node, edge.index) in self._by_node and self._passed(variable, edge):
                return self._by_node[edge.node, edge.index]
        return self._by_array.get(id(variable.data))

    def _passed(self, variable: Variable, edge: Any) -> bool:
        """Whether a node that no call of `apply` made gives its argument on as it is."""
        call, index = self._by_node[edge.node, edge.index]
        return self.calls[call].bits[index] == _bits(variable.data)

    def _described(self, argument: Any) -> Argument:
        communicator = getattr(argument, "communicator", argument)  # of a part of a vocabulary
        if isinstance(communicator, Communicator) and not isinstance(argument, Variable):
            return Argument("communicator", self._which(communicator))
        if isinstance(argument, Parameter):
            return Argument("parameter", argument.name, argument.requires_grad)
        if not isinstance(argument, Variable):
            return Argument("raw", None, _bits(argument))
        place = self.place(argument)
        if place is not None:
            return Argument("result", place)
        self._kept.append(argument)
        return Argument("leaf", argument.requires_grad, _bits(argument.data))


@contextmanager
def recording() -> Iterator[None]:
    """Let ops be noted on the tape of the thread that runs them, if it has one."""
    original = Function.apply.__func__

    def apply(cls, *args):
        results = original(cls, *args)
        tape = getattr(_here, "tape", None)
        if tape is not None:
            tape.add(cls, args, results)
        return results

    Function.apply = classmethod(apply)
    try:
        yield
    finally:
        Function.apply = classmethod(original)


@contextmanager
def on_tape(which: Callable[[Communicator], str]) -> Iterator[Tape]:
    """A tape of this rank's ops inside a with block, inside `recording`."""
    _here.tape = Tape(which)
    try:
        yield _here.tape
    finally:
        _here.tape = None


def _bits(value: Any) -> int:
    """A checksum of an array; of what else an op takes, as it is printed."""
    if hasattr(value, "dtype"):
        return crc32(np.ascontiguousarray(value).tobytes())
    if isinstance(value, tuple | list):
        return crc32(str([_bits(item) for item in value]).encode())
    return crc32(repr(value).encode()) if isinstance(value, _PLAIN) else 0


_PLAIN = (int, float, str, bool, slice, type(None), type(...))


def _argument_names(op: type[Function], count: int) -> tuple[str, ...]:
    parameters = list(inspect.signature(op.forward).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    return tuple((names + [f"{parameters[-1].name}[{n}]" for n in range(count)])[:count])


# -- inference


def infer(tapes: list[Tape], kinds: dict[str, Kind]) -> list[Kind]:
    """As `walk`. Raises KindError also where the tapes' result is not I: one loss, which all ranks have."""
    found = walk(tapes, kinds)
    kind = found[tapes[0].place(tapes[0].result)[0]]
    if kind != I:
        raise KindError(f"the loss is {kind}, but must be I: one loss, which all ranks have")
    return found


def walk(tapes: list[Tape], kinds: dict[str, Kind]) -> list[Kind]:
    """The kind of what each call gives. tapes: of the ranks along the axis. kinds: of parameters, by name."""
    first = tapes[0]
    if len({tuple(call.op for call in tape.calls) for tape in tapes}) > 1:
        raise KindError("ranks have run different ops")
    found: list[Kind] = []
    for number in range(len(first.calls)):
        calls = [tape.calls[number] for tape in tapes]
        given = [_kind(alike, found, kinds) for alike in zip(*(c.arguments for c in calls), strict=True)]
        step = _Step(calls[0], given)
        found.append(step.result())
        if found[-1].letter in "CIR" and len({call.bits for call in calls}) > 1:
            raise step.error(f"what it gives is {found[-1]}, but ranks have different values")
    return found


def _kind(alike: tuple[Argument, ...], found: list[Kind], kinds: dict[str, Kind]) -> Kind:
    """That of an argument, given that of every rank."""
    argument = alike[0]
    if argument.what == "result":
        return found[argument.key[0]]
    if argument.what == "parameter":
        kind = kinds[argument.key]
        return C if kind in (I, R) and not argument.bits else kind
    if len({each.bits for each in alike}) > 1:
        return V()
    return I if argument.what == "leaf" and argument.key else C


class _Step:
    """The rule for one call."""

    def __init__(self, call: Call, given: list[Kind]) -> None:
        self.call = call
        self.given = dict(zip(call.names, given, strict=True))
        self.letters = {kind.letter for kind in given} - {"C"}

    def result(self) -> Kind:
        """The kind of what the op gives. Raises KindError."""
        op = self.call.op
        joined = {a.key for a in self.call.arguments if a.what == "communicator"} - {""}
        if joined:
            return self._collective("all" in joined)
        if op in LAYERS:
            return self._layer(*self.given.values())
        if "P" not in self.letters:
            return self._met()
        if op in LINEAR | COLLECTIVES.keys() and self.letters == {"P"}:  # these: along another axis
            return P
        if op in SUMS:
            return self._sum()
        tensors = [kind for kind in self.given.values() if kind.letter in "PR"]
        if op in PRODUCTS and self.letters <= {"P", "R"} and tensors.count(P) == 1:
            return P
        if op == "Div" and self.letters <= {"P", "R"} and self.given["y"] != P:
            return P
        raise self.error(
            "P goes into what is not linear, or meets what is not R: sum it over the ranks first"
        )

    def _collective(self, all_ranks: bool) -> Kind:
        if self.call.op not in COLLECTIVES:
            raise self.error("it has a collective along this axis inside, and no kinds in COLLECTIVES")
        takes, gives = COLLECTIVES[self.call.op]
        if not all_ranks and self.call.op not in AMONG_SOME:
            raise self.error("it is among some ranks of the axis, and others need what it gives as well")
        for name, letter in takes.items():
            if self.given[name] == C and letter in "IR":
                gives = C if self.call.op == "CopyTo" else gives
            elif self.given[name].letter != letter:
                raise self.error(f"{name} must be {letter}")
        return gives if all_ranks else V()

    def _met(self) -> Kind:
        """Of an op on what is no P."""
        if "P" in self.letters:
            raise self.error("P goes into what is not linear: sum it over the ranks first")
        if "I" in self.letters and len(self.letters) > 1:
            raise self.error(
                "I meets R or V: each rank has a part of the gradient of I, which nobody adds up"
            )
        return next((kind for kind in (V(), R, I) if kind.letter in self.letters), C)

    def _sum(self) -> Kind:
        """Of an op on P."""
        if any(kind != P for name, kind in self.given.items() if name != "axis"):
            raise self.error("what is not P is added on every rank, before the sum over them")
        return P

    def _layer(self, x: Kind, weight: Kind, bias: Kind) -> Kind:
        """Of x weight^T + bias."""
        linear = self.call.op == "Linear" and bias == C and "bias" not in self._tensor_names()
        if weight.cut == 1:
            if x.letter != "V":
                raise self.error("the weight is cut in its inputs, so x must be V")
            if not linear:
                raise self.error(
                    "what is not P is added on every rank, or a GELU comes, before the sum over them"
                )
            return P
        if weight.cut == 0 and x.letter not in "CR":
            raise self.error("each rank has other outputs, so x must be R")
        if weight.cut == 0 and bias.letter not in "CV":
            raise self.error("each rank has other outputs, so the bias must be V")
        if linear and x == P and weight in (C, R):
            return P
        return self._met()

    def _tensor_names(self) -> list[str]:
        return [n for n, a in zip(self.call.names, self.call.arguments, strict=True) if a.is_tensor]

    def error(self, why: str) -> KindError:
        """With the op, its module, and what it was given."""
        message = []
        for argument, (name, kind) in zip(self.call.arguments, self.given.items(), strict=True):
            if argument.is_tensor or kind != C:
                which = f" ({argument.key})" if argument.what == "parameter" else ""
                message.append(f"{name} is {kind}{which}")
        where = f" of {self.call.module}" if self.call.module else ""
        return KindError(f"{self.call.op}{where}: {', '.join(message)}; {why}")
