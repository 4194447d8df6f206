"""Reads pickles as data: what they name is looked up in a list, and nothing is imported or called.

An interpreter of pickle's opcodes (protocols 0 to 5, PEP 307 and PEP 3154) builds tables, lists, tuples,
text, numbers, and a Called for each object of an allowed class or function. Any other name is an error, as is
what could take more memory than the bytes of the pickle justify.
"""

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrt.exchange.checkpoint import BadCheckpoint
from shardrt.untrusted import Refused

DEPTH = 60  # levels of tables in tables
LARGEST = 20_000_000  # values, each shared one counted as often as it is met; containers and copies as made


@dataclass(frozen=True)
class Global:
    """A class, function or value by its name, "module.name"."""

    name: str


@dataclass(eq=False)
class Called:
    """An object that calling `name` with `args` would give, and the state that it would be set to."""

    name: str
    args: tuple
    state: Any = None


@dataclass(frozen=True)
class _Mark:
    """Where the items of a container begin on the stack."""


_MARK = _Mark()
_TABLES = {"collections.OrderedDict", "collections.defaultdict", "builtins.dict", "__builtin__.dict"}
_PLAIN = {
    *_TABLES,
    "_codecs.encode",
    "copy_reg._reconstructor",
    "copyreg._reconstructor",
    "builtins.object",
    "__builtin__.object",
    "builtins.set",
    "__builtin__.set",
    "torch.Size",
}


def unpickle(
    data: bytes,
    where: Path | str,
    allowed: Collection[str],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """What a pickle holds: plain values, Global and Called.

    Args:
        where: named in errors.
        allowed: names of classes and functions, "torch.FloatStorage".
        persistent: gives the value of a persistent id.

    Raises:
        BadCheckpoint: in one line, for a damaged pickle, and for one that names anything else.
    """
    reader = _Reader(frozenset(allowed) | _PLAIN, persistent)
    try:
        value = reader.read(data)
        _check(value)
    except Refused as error:
        raise BadCheckpoint(f"{where}: {str(error).removeprefix(f'{where}: ')}") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError) as error:
        message = str(error).replace("\n", " ")[:200]
        raise BadCheckpoint(f"{where}: the pickle is damaged ({type(error).__name__}: {message})") from None
    return value


class _Reader:
    def __init__(self, allowed: frozenset[str], persistent: Callable[[Any], Any] | None) -> None:
        self._allowed, self._persistent = allowed, persistent
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._left = LARGEST  # containers, memo entries and copies that may be made yet

    def read(self, data: bytes) -> Any:
        """Follow the opcodes up to STOP."""
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in _CONTAINERS:
                self._spend(1)
            if opcode.name == "STOP":
                if len(self._stack) != 1:
                    raise BadCheckpoint("the pickle ends with another number of values than one")
                return self._stack[0]
            if opcode.name in _VALUES:
                self._stack.append(argument)
            elif opcode.name in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode.name]())
            elif opcode.name not in ("PROTO", "FRAME"):
                step = _STEPS.get(opcode.name)
                if step is None:
                    raise BadCheckpoint(f"the pickle uses {opcode.name}, which no checkpoint needs")
                step(self, argument)
        raise BadCheckpoint("the pickle has no end")

    def _spend(self, count: int) -> None:
        """Count what takes memory: a short pickle could copy one long list many times."""
        self._left -= count
        if self._left < 0:
            raise BadCheckpoint("the pickle makes more values than a checkpoint has")

    def _marked(self) -> list[Any]:
        """Take the items down to the last mark."""
        for at in range(len(self._stack) - 1, -1, -1):
            if self._stack[at] is _MARK:
                items = self._stack[at + 1 :]
                del self._stack[at:]
                return items
        raise BadCheckpoint("the pickle ends a list that it has not begun")

    def _take(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise BadCheckpoint("the pickle uses a mark as a value")
        return value

    def put(self, at: int | None) -> None:
        """PUT and its kin."""
        self._memo[len(self._memo) if at is None else at] = self._stack[-1]

    def get(self, at: int) -> None:
        """GET and its kin."""
        self._stack.append(self._memo[at])

    def tuple_of(self, count: int | None) -> None:
        """TUPLE, TUPLE1 to TUPLE3."""
        if count is None:
            items = self._marked()
        else:
            items = [self._take() for _ in range(count)][::-1]
        self._stack.append(tuple(items))

    def collection(self, kind: Callable[[list], Any]) -> None:
        """LIST, DICT."""
        self._stack.append(kind(self._marked()))

    def append(self, items: list[Any]) -> None:
        """APPEND and APPENDS."""
        if type(self._stack[-1]) is not list:
            raise BadCheckpoint("the pickle appends to what is no list")
        self._stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        """SETITEM and SETITEMS."""
        if type(self._stack[-1]) is not dict:
            raise BadCheckpoint("the pickle sets items of what is no table")
        self._stack[-1].update(_pairs(items))

    def named(self, name: str) -> None:
        """GLOBAL: "module name"."""
        name = name.replace(" ", ".", 1)
        if name not in self._allowed:
            raise BadCheckpoint(f"the pickle names {name[:120]!r}, which is not among what a checkpoint has")
        self._stack.append(Global(name))

    def named_on_stack(self) -> None:
        """STACK_GLOBAL."""
        name, module = self._take(), self._take()
        if type(name) is not str or type(module) is not str:
            raise BadCheckpoint("the pickle names a class by what is no text")
        self.named(f"{module} {name}")

    def call(self) -> None:
        """REDUCE and NEWOBJ."""
        args, function = self._take(), self._take()
        if type(function) is not Global or type(args) is not tuple:
            raise BadCheckpoint("the pickle calls what is no class or function")
        if function.name in _PLAIN:
            self._spend(sum(_copied(arg) for arg in args))
        self._stack.append(_called(function.name, args))

    def build(self) -> None:
        """BUILD."""
        state, value = self._take(), self._stack[-1]
        if type(value) is Called:
            value.state = state
        elif not (
            type(value) is dict and type(state) is dict and "_metadata" in state
        ):  # PyTorch's state_dict
            raise BadCheckpoint("the pickle sets the state of what has none")

    def refer(self) -> None:
        """BINPERSID."""
        if self._persistent is None:
            raise BadCheckpoint("the pickle refers to what is outside of it")
        self._stack.append(self._persistent(self._take()))


def _copied(value: Any) -> int:
    """How many containers take as much memory as a copy of a value."""
    return (
        len(value) // 8 if type(value) is str else 5 * len(value) if type(value) in (list, tuple, dict) else 0
    )


def _called(name: str, args: tuple) -> Any:
    """The value of a call: plain where it can be."""
    if name in _TABLES:
        pairs = args[-1] if args and type(args[-1]) in (list, dict) else []
        return dict(pairs) if type(pairs) is dict else _pairs([item for pair in pairs for item in _two(pair)])
    if name == "torch.Size" and len(args) == 1 and type(args[0]) in (tuple, list):
        return tuple(args[0])
    if name == "_codecs.encode" and args[1:] == ("latin1",) and type(args[0]) is str:
        return args[0].encode("latin1")
    if name.endswith("._reconstructor") and args and type(args[0]) is Global:
        return Called(args[0].name, ())
    return Called(name, args)


def _two(pair: Any) -> tuple[Any, Any]:
    if type(pair) not in (tuple, list) or len(pair) != 2:
        raise BadCheckpoint("the pickle makes a table of what are no pairs")
    return pair[0], pair[1]


def _pairs(items: list[Any]) -> dict[Any, Any]:
    """A table of keys and values in turn. Keys are checked: hashing a deep tuple would overflow the stack."""
    keys, values = items[::2], items[1::2]
    for key in keys:
        plain = all(map(_is_key, key)) if type(key) is tuple else _is_key(key)
        if not plain:
            raise BadCheckpoint(f"the pickle has a table with a {type(key).__name__} as a key")
    return dict(zip(keys, values, strict=True))


def _is_key(value: Any) -> bool:
    return value is None or type(value) in (str, bytes, int, float, bool, Called, Global)


def _check(value: Any) -> None:
    """Refuse values that contain themselves, or have more levels than DEPTH or values than LARGEST."""
    sizes: dict[int, tuple[int, int]] = {}  # container -> (levels, values inside)
    open_ones: set[int] = set()
    todo = [(value, False)]
    while todo:
        item, seen = todo.pop()
        if id(item) in sizes:
            continue
        children = _children(item)
        if not seen and children is not None:
            if id(item) in open_ones:
                raise BadCheckpoint("the pickle has a value that contains itself")
            open_ones.add(id(item))
            todo.append((item, True))
            todo.extend((child, False) for child in children)
            continue
        inside = [sizes[id(child)] for child in children or ()]
        levels, count = max((n for n, _ in inside), default=0), sum(n for _, n in inside)
        sizes[id(item)] = (levels + (children is not None), count + 1)
        open_ones.discard(id(item))
        if levels > DEPTH or count > LARGEST:
            raise BadCheckpoint("the pickle's tables are nested too deeply, or share too much")


def _children(item: Any) -> list[Any] | None:
    """What a value holds; None if it is no container."""
    if type(item) is dict:
        return [*item.keys(), *item.values()]
    if type(item) in (list, tuple):
        return list(item)
    return [item.args, item.state] if type(item) is Called else None


_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: _MARK,
}
_CONTAINERS = {  # what a byte or two make; a pickle's other values are not much larger than their bytes
    *("EMPTY_DICT", "EMPTY_LIST", "LIST", "DICT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "NEWOBJ"),
    *("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"),
}
_STEPS: dict[str, Callable[[_Reader, Any], None]] = {
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda reader, at: reader.put(at)),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda reader, at: reader.get(at)),
    "MEMOIZE": lambda reader, _: reader.put(None),
    "TUPLE": lambda reader, _: reader.tuple_of(None),
    "TUPLE1": lambda reader, _: reader.tuple_of(1),
    "TUPLE2": lambda reader, _: reader.tuple_of(2),
    "TUPLE3": lambda reader, _: reader.tuple_of(3),
    "LIST": lambda reader, _: reader.collection(list),
    "DICT": lambda reader, _: reader.collection(_pairs),
    "APPEND": lambda reader, _: reader.append([reader._take()]),
    "APPENDS": lambda reader, _: reader.append(reader._marked()),
    "SETITEM": lambda reader, _: reader.set_items([reader._take(), reader._take()][::-1]),
    "SETITEMS": lambda reader, _: reader.set_items(reader._marked()),
    "GLOBAL": lambda reader, name: reader.named(name),
    "STACK_GLOBAL": lambda reader, _: reader.named_on_stack(),
    "REDUCE": lambda reader, _: reader.call(),
    "NEWOBJ": lambda reader, _: reader.call(),
    "BUILD": lambda reader, _: reader.build(),
    "BINPERSID": lambda reader, _: reader.refer(),
}
