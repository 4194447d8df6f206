"""Which of four kinds each tensor is along an axis of the mesh, inferred from the ops of a forward.

I: the same on all ranks. R: the same, and each rank uses it in its own way. V: each rank has its own part. P:
each has a summand. Gradients of these are I, P, V and R (functional/collective.py). A kind says what is still to
be done with a gradient, so ranks that mix them train a model that is slightly wrong and says nothing.

    with recording():
        tapes = run_ranks(2, body)  # body: with on_tape(is_along) as tape: loss = ...; tape.result = loss; return tape
    infer(tapes, {"up.weight": V(0), "norm.weight": R, ...})

Each rank notes its ops as they run. `infer` goes through them, of all ranks of the axis at once, from the kinds
of parameters to that of the result, and raises KindError with the op, its module and its arguments at the first
op that mixes kinds. It believes no rule blindly: what a rule says is the same on all ranks must have equal bits
there, and what is given to an op from outside is own where ranks give different values.
"""

import inspect
import threading
from contextlib import contextmanager
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from shardrt import autograd
from shardrt.autograd import Function, Variable
from shardrt.comm import Communicator
from shardrt.nn import Parameter


class Kind(NamedTuple):
    """letter: I, R, V, P, or C: the same on all ranks, and no gradient is asked of it. cut: of a parameter."""

    letter: str
    cut: int | None = None

    def __str__(self) -> str:
        return self.letter if self.cut is None else f"{self.letter}({self.cut})"


C, I, R, P = Kind("C"), Kind("I"), Kind("R"), Kind("P")  # noqa: E741  the field's letters


def V(cut: int | None = None) -> Kind:  # noqa: N802
    """Own. cut: the dimension in which a parameter is cut."""
    return Kind("V", cut)


class KindError(Exception):
    """An op whose arguments' gradients would be wrong."""


# What ops do with kinds. All others: no P, and kinds that may meet.

CONVERTS = {  # functional/collective.py: from -> to
    "CopyTo": "IR",
    "ReduceFrom": "PI",
    "Gather": "VR",
    "GatherSame": "VI",
    "ScatterTo": "IV",
    "ReduceScatterTo": "PV",
    "AllToAll": "VV",
    "Exchange": "VV",
}
LINEAR = {  # in their one tensor
    *("Convert", "CumSum", "Expand", "GetItem", "MeanPool2d", "Neg", "Permute", "Reshape", "Round", "Split", "Sum"),
    *CONVERTS,  # on another axis
}
SUMS = {"Add", "Concatenate", "Sub"}  # linear in all of them together
PRODUCTS = {"MatMul", "Mul"}  # linear in each
LAYERS = {"Linear", "LinearGELU"}
LOSSES = {"ChunkedCrossEntropy", "CrossEntropy", "LinearCrossEntropy"}


# -- recording


class Argument(NamedTuple):
    """What an op was given.

    what: a "result", key (call, output); "parameter", key its name, bits whether it is trained; "leaf", key
    whether it requires a gradient; "communicator", key whether it is one of the axis; or "raw".
    """

    what: str
    key: Any = None
    bits: int = 0


class Call(NamedTuple):
    """One op. bits: a checksum of each result."""

    op: str
    module: str
    names: tuple[str, ...]  # of its arguments
    arguments: tuple[Argument, ...]
    bits: tuple[int, ...]


_here = threading.local()  # ranks are threads


class Tape:
    """What one rank's ops were given. is_along(communicator): whether it is one of the axis."""

    def __init__(self, is_along: Any) -> None:
        self.calls: list[Call] = []
        self.result: Variable | None = None
        self._is_along = is_along
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
        if isinstance(argument, Communicator):
            return Argument("communicator", bool(self._is_along(argument)))
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
def recording():
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
def on_tape(is_along=lambda communicator: True):
    """A tape of this rank's ops inside a with block."""
    _here.tape = Tape(is_along)
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


def infer(tapes: list[Tape], kinds: dict[str, Kind]) -> list[tuple[Kind, ...]]:
    """The kinds of the results of every call. tapes: of the ranks along the axis. kinds: of parameters, by name.

    Raises KindError, also where the tapes' result is not one loss, the same on all ranks.
    """
    first = tapes[0]
    for tape in tapes:
        if [call.op for call in tape.calls] != [call.op for call in first.calls]:
            raise KindError("ranks have run different ops")
    found: list[tuple[Kind, ...]] = []
    for number, call in enumerate(first.calls):
        calls = [tape.calls[number] for tape in tapes]
        given = [_kind(alike, found, kinds) for alike in zip(*(c.arguments for c in calls), strict=True)]
        result = _Step(call, given).result()
        same = {c.bits for c in calls}
        if result.letter in "CIR" and len(same) > 1:
            raise KindError(_Step(call, given).told(f"the result is {result}, but ranks have different values"))
        found.append((result,) * len(call.bits))
    place = first.place(first.result)
    kind = found[place[0]][place[1]]
    if kind.letter != "I":
        raise KindError(f"the loss is {kind}, but must be I: one loss, which all ranks have")
    return found


def _kind(alike: tuple[Argument, ...], found: list, kinds: dict[str, Kind]) -> Kind | None:
    """That of an argument, given that of every rank. None: a communicator, or nothing."""
    argument = alike[0]
    if argument.what == "result":
        call, index = argument.key
        return found[call][index]
    if argument.what == "parameter":
        kind = kinds[argument.key]
        return C if kind.letter in "IR" and not argument.bits else kind
    if argument.what == "communicator":
        return None
    if len({each.bits for each in alike}) > 1:
        return V()
    return I if argument.what == "leaf" and argument.key else C


class _Step:
    """The rule for one call."""

    def __init__(self, call: Call, given: list[Kind | None]) -> None:
        self.call = call
        self.given = given
        self.tensors = {
            name: kind for name, kind in zip(call.names, given, strict=True) if kind is not None and kind != C
        }
        self.letters = "".join(sorted({kind.letter for kind in self.tensors.values()}))

    def result(self) -> Kind:
        op = self.call.op
        along = [a.key for a in self.call.arguments if a.what == "communicator"]
        if any(along):
            if op not in CONVERTS:
                raise self.error("it has a collective along this axis inside, and the table does not say of which kinds")
            return self._converted(*CONVERTS[op])
        if op in LAYERS:
            return self._layer()
        if op == "Embedding":
            return self._embedding()
        if op in LOSSES:
            return self._met("is not linear")
        if "P" not in self.letters:
            return self._met()
        if op in LINEAR or op in SUMS:
            if self.letters != "P" or (op in SUMS and C in self._summands()):
                raise self.error("a sum of what is P and what is not has that once for every rank")
            return P
        if op in PRODUCTS and list(self._kinds()).count("P") == 1 and self.letters in ("P", "PR"):
            return P
        if op == "Div" and self.letters in ("P", "PR") and self.tensors["x"] == P != self.tensors.get("y"):
            return P
        raise self.error("P goes into what is not linear, or meets what is not R: sum it over the ranks first")

    def _converted(self, source: str, to: str) -> Kind:
        kind = self.given[0]
        if kind.letter != source and (kind, source) != (C, "I"):
            raise self.error(f"it takes what is {source}")
        return Kind(to)

    def _met(self, why: str = "") -> Kind:
        """Of an op that takes no P: I with I alone."""
        if "P" in self.letters:
            raise self.error(f"P goes into an op that {why}: sum it over the ranks first")
        if "I" in self.letters and self.letters != "I":
            raise self.error("I meets R or V: each rank has a part of the gradient of what is I, and nobody adds them up")
        return Kind(next(letter for letter in "VRIC" if letter in (self.letters or "C")))

    def _layer(self) -> Kind:
        """x weight^T + bias."""
        x, weight, bias = self.given
        if weight.cut == 1:
            if x.letter != "V":
                raise self.error("the weight is cut in its inputs, and x is not")
            if bias != C:
                raise self.error("a bias is added on every rank, before the sum over them")
            if self.call.op != "Linear":
                raise self.error("P goes into a GELU: sum it over the ranks first")
            return P
        if weight.cut == 0 and x.letter not in "CR":
            raise self.error("each rank has other outputs, so x must be R")
        if x == P and self.letters == "PR" and bias == C and self.call.op == "Linear":
            return P
        if weight.cut is None and weight.letter == "V":
            raise self.error("a weight that is cut, and it is not said in which dimension")
        if weight.cut == 0 and bias.letter not in "CV":
            raise self.error("each rank has other outputs, so the bias must be V")
        return self._met("adds a bias or is not linear")

    def _embedding(self) -> Kind:
        """Rows of other ranks are zeros where the table is cut in rows."""
        _, weight = self.given
        return P if weight.cut == 0 else self._met("picks rows")

    def _kinds(self) -> str:
        return "".join(kind.letter for kind in self.tensors.values())

    def _summands(self) -> list[Kind]:
        arguments = zip(self.given, self.call.arguments, strict=True)
        return [kind for kind, argument in arguments if argument.what in ("result", "leaf", "parameter")]

    def error(self, why: str) -> KindError:
        return KindError(self.told(why))

    def told(self, why: str) -> str:
        where = f" of {self.call.module}" if self.call.module else ""
        parts = [
            f"{name} is {kind}" + (f" ({argument.key})" if argument.what == "parameter" else "")
            for name, kind, argument in zip(self.call.names, self.given, self.call.arguments, strict=True)
            if argument.what in ("result", "leaf", "parameter") or kind not in (None, C)
        ]
        return f"{self.call.op}{where}: {', '.join(parts)}; {why}"
