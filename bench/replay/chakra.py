"""Reads Chakra execution traces (MLCommons, github.com/mlcommons/chakra): a file NAME.RANK.et for each rank.

A file is GlobalMetadata and then Nodes, each behind its length. What `shardrt simulate --chakra` writes has
all that a replay can use. Traces of other programs may have less: a node without a group is of all ranks, one
without a stream is in that of its kind, one without a type moves bytes. `comm_size` is what a rank
gives: its slice of an all-gather, the whole buffer of a reduce-scatter (as ASTRA-sim and PARAM count).
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from shardrt.simulate import chakra as written
from shardrt.untrusted import Refused, open_regular

from .trace import COMPUTE, LARGEST, LONGEST, MOST_NODES, MOST_RANKS, Node, Trace, ranks_of, read_groups

HOST = "host"  # the stream of what the host does in shardrt's traces
_FILE = re.compile(r"(.*)\.(\d{1,9})\.et")
_LARGEST_FILE = 1 << 30
_LARGEST_MESSAGE = 16 << 20
_MOST_DEPS = 100_000  # of a node
_SMALLER = {"REDUCE_SCATTER_BLOCK": "reduce_scatter"}  # names of the schema that are another call here
_COMPUTING = ("COMP_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE")
_STREAMS = {"COMM_SEND_NODE": "send", "COMM_RECV_NODE": "recv", "COMM_COLL_NODE": "comm"}


def files(folder: Path) -> dict[int, Path]:
    """The file of each recorded rank. Raises ValueError where they are of two jobs."""
    found = {path: _FILE.fullmatch(path.name) for path in sorted(folder.iterdir())}
    named = {path: match for path, match in found.items() if match}
    names = sorted({match[1] for match in named.values()})
    if len(names) > 1:
        raise ValueError(f"{folder}: has traces of {len(names)} jobs: {names[0][:80]}, {names[1][:80]}")
    return {int(match[2]): path for path, match in named.items()}


def read(path: Path, rank: int, ranks: int) -> Trace:
    """The trace of a rank; ranks: how many there are, where the file does not say it.

    Raises:
        ValueError: for what is no such trace: it names the file and the node.
        OSError: if the file can't be read.
    """
    made = schema()
    messages = _messages(path)
    metadata = _parsed(made.GlobalMetadata, next(messages, (0, b"")), path)
    about = {attribute.name: _value(attribute) for attribute in metadata.attr}
    world = _natural(about.get("world_size", ranks), "world_size", str(path), below=MOST_RANKS)
    if not rank < world:
        raise ValueError(f"{path}: rank {rank} is not of the {world} ranks that the trace has")
    groups = next(
        (read_groups(each, world) for each in _group_files(path) if each.exists()), None
    )  # None: nothing names them
    nodes = []
    for message in messages:
        node = _node(made, _parsed(made.Node, message, path), str(path), groups)
        if node is not None:
            nodes.append(node)
        if len(nodes) > MOST_NODES:
            raise ValueError(f"{path}: has more than {MOST_NODES} nodes")
    expected = about.get("nodes", len(nodes))
    if expected != len(nodes):
        raise ValueError(f"{path}: has {len(nodes)} of {expected} nodes: it is cut off")
    alike = _alike(about.get("ranks", ""), rank, world, str(path))
    kind = "shardrt's" if about.get("schema") == "shardrt" else "Chakra"
    nodes = _hosted(nodes) if kind == "shardrt's" else nodes
    return Trace(str(path), kind, rank, world, _from_zero(nodes, kind), groups or {}, alike)


def _hosted(nodes: list[Node]) -> list[Node]:
    """Nodes of the host's thread: it is the stream that computes, or on a GPU it only issues."""
    if any(node.on_host and node.stream == COMPUTE for node in nodes):
        return [replace(node, stream=COMPUTE) if node.stream == HOST else node for node in nodes]
    return [replace(node, idles=True) if node.stream == HOST else node for node in nodes]


def schema() -> ModuleType:
    """mlc-chakra's messages. Raises ValueError where it is not installed."""
    try:
        return written.schema()
    except ImportError as error:
        raise ValueError(
            f"Chakra traces need mlc-chakra and protobuf: pip install 'shardrt[chakra]' ({error})"
        ) from None


def _group_files(path: Path) -> list[Path]:
    name = _FILE.fullmatch(path.name)[1]
    return [path.with_name(f"{name}.groups.json"), path.with_name("comm_group.json")]


def _messages(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each message of a file, and the byte where it begins. Raises ValueError where the file is cut off."""
    try:
        file = open_regular(path, _LARGEST_FILE)
    except Refused as error:
        raise ValueError(str(error)) from None
    with file:
        while True:
            start = file.tell()
            size = _length(file, path)
            if size is None:
                return
            if size > _LARGEST_MESSAGE:
                raise ValueError(
                    f"{path}: the message at byte {start} has {size} bytes; the limit is {_LARGEST_MESSAGE}"
                )
            data = file.read(size)
            if len(data) < size:
                raise ValueError(
                    f"{path}: cut off: the message at byte {start} has {len(data)} of {size} bytes"
                )
            yield start, data


def _length(file: BinaryIO, path: Path) -> int | None:
    """A varint; None at the end of the file."""
    found = 0
    for place in range(5):
        byte = file.read(1)
        if not byte:
            if place:
                raise ValueError(f"{path}: cut off in a length, at byte {file.tell()}")
            return None
        found |= (byte[0] & 0x7F) << 7 * place
        if byte[0] < 0x80:
            return found
    raise ValueError(f"{path}: no length of a message ends at byte {file.tell()}")


def _parsed(kind: Any, message: tuple[int, bytes], path: Path) -> Any:
    from google.protobuf.message import DecodeError

    found = kind()
    try:
        found.ParseFromString(message[1])
    except (DecodeError, UnicodeDecodeError):
        raise ValueError(f"{path}: the message at byte {message[0]} is no {kind.__name__}") from None
    return found


def _value(attribute: Any) -> Any:
    """A number, a string, or a list of them; None where there is none."""
    kind = attribute.WhichOneof("value")
    value = None if kind is None else getattr(attribute, kind)
    return list(value.values) if kind is not None and kind.endswith("_list") else value


def _node(schema: ModuleType, given: Any, source: str, groups: dict | None) -> Node | None:
    """None for a node that does nothing."""
    what = f"{source}: node {given.id}"
    try:
        kind = schema.NodeType.Name(given.type)
    except ValueError:
        raise ValueError(f"{what} has the unknown type {given.type}") from None
    if len(given.data_deps) + len(given.ctrl_deps) > _MOST_DEPS:
        raise ValueError(f"{what} has more than {_MOST_DEPS} dependencies")
    if kind == "INVALID_NODE":
        raise ValueError(f"{what} has no type")
    has = {attribute.name: _value(attribute) for attribute in given.attr}
    computes = kind in _COMPUTING or kind == "METADATA_NODE"
    call = COMPUTE if computes else _call(schema, kind, has, what)
    return Node(
        id=given.id,
        name=given.name[:200],
        call=call,
        stream=_text(has, "stream", what) or _STREAMS.get(kind, COMPUTE),
        core=_seconds(has, "core_ns", 0, what),
        idles=kind != "COMP_NODE" and computes,
        on_host=has.get("is_cpu_op") is True,
        deps=tuple(dict.fromkeys((*given.data_deps, *given.ctrl_deps))),
        start=_seconds(has, "start_ns", given.start_time_micros, what, least=-LONGEST),
        seconds=_seconds(has, "duration_ns", given.duration_micros, what),
        nbytes=0 if computes or call == "barrier" else _natural(has.get("comm_size", 0), "comm_size", what),
        given=call in ("all_gather", "gather"),
        dtype=_text(has, "comm_dtype", what),
        group=_group(_text(has, "pg_name", what), groups, what),
        root=_natural(has["root"], "root", what) if "root" in has else -1,
        peer=_peer(call, has, what),
    )


def _call(schema: ModuleType, kind: str, has: dict[str, Any], what: str) -> str:
    if kind != "COMM_COLL_NODE":
        return {"COMM_SEND_NODE": "send", "COMM_RECV_NODE": "recv"}[kind]
    given = has.get("comm_type")
    try:
        name = schema.CollectiveCommType.Name(given)
    except (ValueError, TypeError):
        raise ValueError(f"{what} has the unknown comm_type {given!r:.80}") from None
    return _SMALLER.get(name, name.lower())


def _peer(call: str, has: dict[str, Any], what: str) -> int:
    if call not in ("send", "recv"):
        return -1
    name = "comm_dst" if call == "send" else "comm_src"
    if name not in has:
        raise ValueError(f"{what} is a {call} without {name}")
    return _natural(has[name], name, what, below=MOST_RANKS)


def _group(name: str, groups: dict | None, what: str) -> str:
    """The name, if the ranks of its group are known; without a file of groups it is of all ranks."""
    if groups is None or not name:
        return ""
    if name not in groups:
        raise ValueError(f"{what} is of the group {name[:80]!r}, which the file of groups does not have")
    return name


def _text(has: dict[str, Any], name: str, what: str) -> str:
    value = has.get(name, "")
    if not isinstance(value, str | int) or len(str(value)) > 200:
        raise ValueError(f"{what}: {name} must be a name, got {value!r:.80}")
    return str(value)


def _natural(value: Any, name: str, what: str, below: int = LARGEST) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{what}: {name} must be an integer from 0 to {below - 1}, got {value!r:.80}")
    return value


def _seconds(has: dict[str, Any], name: str, micros: int, what: str, least: float = 0.0) -> float | None:
    """By the attribute in nanoseconds, else by the node's own field; 0 there says nothing."""
    if name in has:
        value = has[name]
        if type(value) not in (int, float) or not least <= value / 1e9 <= LONGEST:
            raise ValueError(f"{what}: {name} must be nanoseconds up to 1e15, got {value!r:.80}")
        return value / 1e9
    return micros / 1e6 if micros else None


def _from_zero(nodes: list[Node], kind: str) -> list[Node]:
    """Times from the first start on: other programs take them from some clock. Raises ValueError."""
    starts = [node.start for node in nodes if node.start is not None]
    zero = min(starts) if starts and kind == "Chakra" else 0.0
    found = nodes
    if zero:
        found = [node if node.start is None else replace(node, start=node.start - zero) for node in nodes]
    for node in found:
        if (node.start or 0.0) + (node.seconds or 0.0) > LONGEST:
            raise ValueError(f"node {node.id} ends more than {LONGEST:g} s after the first")
    return found


def _alike(text: Any, rank: int, world: int, source: str) -> list[int] | range:
    """Ranks as "0-15" or "0,2,4-7"; without any, the rank alone. Raises ValueError."""
    if not isinstance(text, str) or not re.fullmatch(r"(\d{1,8}(-\d{1,8})?(,|$))*", text.replace(" ", "")):
        raise ValueError(f"{source}: ranks must be ranks such as 0-15, got {text!r:.80}")
    if not text:
        return [rank]
    found: list[int] = []
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if int(last or first) >= world:
            raise ValueError(f"{source}: ranks has rank {last or first} of {world}")
        found += range(int(first), int(last or first) + 1)
    return list(ranks_of(found, world, f"{source}: ranks"))
