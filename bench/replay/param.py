"""Reads traces of PARAM (github.com/facebookresearch/param): its basic ones, and PyTorch's execution traces.

A basic trace is a list of communications in the order in which a rank issued them, with sizes in elements.
An execution trace is all that PyTorch ran: its `record_param_comms` nodes are communication. Neither says for
how long anything ran. A basic trace may say when communication began.
"""

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from shardrt.untrusted import natural, number, open_regular, strict_json

from .trace import COMPUTE, LARGEST, LONGEST, MOST_NODES, MOST_RANKS, Node, Trace, ranks_of

_FILE = re.compile(r"(?:.*?\D)?(\d{1,9})\.json(?:\.gz)?")
_LARGEST_FILE = 32 << 20  # bytes of JSON
_CALLS = {
    "allgather": "all_gather",
    "allgatherbase": "all_gather",
    "allgatherintotensorcoalesced": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "reducescattertensorcoalesced": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreducecoalesced": "all_reduce",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "alltoallbase": "all_to_all",
    "alltoallsingle": "all_to_all",
    "alltoallv": "all_to_all",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "isend": "send",
    "recv": "recv",
    "irecv": "recv",
}
_SKIPPED = ("init", "wait", "batchisendirecv")
_DTYPES = {
    **{"float": "float32", "half": "float16", "double": "float64", "int": "int32", "long": "int64"},
    **{"long int": "int64", "byte": "uint8", "char": "int8", "bool": "bool", "unsigned char": "uint8"},
    **{"signed char": "int8", "c10::half": "float16", "c10::bfloat16": "bfloat16", "short": "int16"},
    **{name: name for name in ("float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8")},
}
_SIZES = {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "float16": 2, "bfloat16": 2}
_SIZES |= {"float32": 4, "int32": 4, "float64": 8, "int64": 8}


def files(folder: Path) -> dict[int, Path]:
    """The file of each recorded rank, by the number at the end of its name; a lone file is rank 0's."""
    paths = [path for path in sorted(folder.iterdir()) if path.name.endswith((".json", ".json.gz"))]
    if len(paths) == 1:
        return {0: paths[0]}
    found: dict[int, Path] = {}
    for path in paths:
        match = _FILE.fullmatch(path.name)
        if match is None:
            raise ValueError(f"{path}: its name has no rank at its end, such as in 0.json")
        if int(match[1]) in found:
            raise ValueError(f"{folder}: {found[int(match[1])].name} and {path.name} are both of one rank")
        found[int(match[1])] = path
    return found


def read(path: Path, rank: int, ranks: int) -> Trace:
    """The trace of a rank. Raises as chakra.read does."""
    given = _json(path)
    if isinstance(given, list):
        return _basic(given, path, rank, ranks)
    if isinstance(given, dict) and isinstance(given.get("nodes"), list):
        return _execution(given["nodes"], path, rank, ranks)
    raise ValueError(f"{path}: is neither a list of communications nor an execution trace with nodes")


def _json(path: Path) -> Any:
    try:
        with open_regular(path, _LARGEST_FILE) as file:
            opened = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            data = opened.read(_LARGEST_FILE + 1)
        if len(data) > _LARGEST_FILE:
            raise ValueError(f"has more than {_LARGEST_FILE} bytes, the limit")
        return strict_json(data, any_number=True)
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def _basic(given: list, path: Path, rank: int, ranks: int) -> Trace:
    groups: dict[str, tuple[int, ...]] = {}
    world = max([ranks, *(each["world_size"] for each in _objects(given, path) if _size(each))])
    if world >= MOST_RANKS:
        raise ValueError(f"{path}: world_size is {world}")
    nodes: list[Node] = []
    skipped: Counter[str] = Counter()
    for place, each in enumerate(given):
        what = f"{path}: entry {place}"
        if "comms" in each:
            call = _call(each["comms"], what, skipped)
            group = str(each.get("pg_id", ""))[:80]
            if each.get("global_ranks"):
                groups[group] = ranks_of(each["global_ranks"], world, f"{what}: global_ranks")
            if call:
                nodes.append(_of_basic(each, place, call, group if group in groups else "", rank, what))
        elif each.get("compute") == "gemm":
            nodes.append(_gemm(each, place, what))
        elif "compute" in each:
            skipped[str(each["compute"])[:80]] += 1
        else:
            raise ValueError(f"{what} is neither comms nor compute")
    zero = min((node.start for node in nodes if node.start is not None), default=0.0)
    return _traced("PARAM's basic", path, rank, world, nodes, groups, skipped, zero)


def _objects(given: list, path: Path) -> list[dict]:
    if len(given) > MOST_NODES:
        raise ValueError(f"{path}: has more than {MOST_NODES} nodes")
    for place, each in enumerate(given):
        if not isinstance(each, dict):
            raise ValueError(f"{path}: entry {place} must be an object")
    return given


def _size(each: dict) -> bool:
    return natural(each.get("world_size"), 1 << 31)


def _of_basic(each: dict, place: int, call: str, group: str, rank: int, what: str) -> Node:
    start = each.get("startTime_ns")
    if start is not None and not number(start, 1e30):
        raise ValueError(f"{what}: startTime_ns must be nanoseconds, got {start!r:.80}")
    sizes = _sizes(call, each.get("in_msg_size", 0), each.get("out_msg_size", 0), each.get("dtype"), what)
    of = {name: each.get(key) or [] for name, key in (("sent", "in_split"), ("received", "out_split"))}
    peer = each.get("dst_rank" if call == "send" else "src_rank") if call in ("send", "recv") else -1
    root = each.get("root")
    marks = each.get("markers")
    return Node(
        id=place,
        name=str(marks[0])[:200] if isinstance(marks, list) and marks else call,
        call=call,
        stream=f"pg {group}".strip(),
        start=None if start is None else start / 1e9,
        group=group,
        root=-1 if root is None else _rank(root, f"{what}: root"),
        peer=_rank(peer, f"{what}: peer") if call in ("send", "recv") else -1,
        **sizes,
        **_splits(call, of, sizes, what),
    )


def _gemm(each: dict, place: int, what: str) -> Node:
    side = each.get("mm_dim")
    names = ("mm0_dim0", "mm0_dim1", "mm1_dim1")
    dims = [each.get(name) if side is None else side for name in names]
    count = each.get("count", 1)
    if not all(natural(size, 1 << 20) for size in (*dims, count)):
        raise ValueError(f"{what}: sizes of a gemm must be natural numbers, got {dims!r:.80}, {count!r:.80}")
    return Node(place, "gemm", COMPUTE, COMPUTE, flops=2.0 * prod(dims) * count)


def _execution(given: list, path: Path, rank: int, ranks: int) -> Trace:
    groups = _process_groups(given, path)
    world = max([ranks, *(max(members) + 1 for members in groups.values())])
    nodes: list[Node] = []
    skipped: Counter[str] = Counter()
    for place, each in enumerate(_objects(given, path)):
        if each.get("name") != "record_param_comms":
            continue
        what = f"{path}: node {each.get('id', place)!r:.20}"
        if True not in [isinstance(value, str) for value in _values(each, "inputs")]:
            raise ValueError(f"{what} is a record_param_comms without the name of a call")
        try:
            node = _of_execution(each, place, groups, rank, what, skipped)
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ValueError(f"{what} is no record_param_comms that is known") from None
        nodes += [] if node is None else [node]
    return _traced("PyTorch's execution", path, rank, world, nodes, groups, skipped, 0.0)


def _process_groups(given: list, path: Path) -> dict[str, tuple[int, ...]]:
    """The ranks of each process group, by its name; without ranks it is of all."""
    inits = (each for each in _objects(given, path) if "process_group:init" in _name(each))
    text = next((_values(each, "inputs")[:1] for each in inits), [])
    if not text:
        return {}
    found = {}
    try:
        for group in strict_json(text[0]):
            size = group.get("group_size", 0)
            ranks = group["ranks"] or list(range(size if natural(size, MOST_RANKS) else 0))
            found[str(group["pg_name"])[:80]] = ranks_of(ranks, MOST_RANKS, f"{path}: process group")
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{path}: the process groups are no list of pg_name and ranks") from None
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: groups: {error}") from None
    return found


def _name(each: dict) -> str:
    return each["name"] if isinstance(each.get("name"), str) else ""


def _values(each: dict, which: str) -> list:
    """Inputs or outputs, of older and newer schemas."""
    given = each.get(which)
    given = given.get("values") if isinstance(given, dict) else given
    return given if isinstance(given, list) else []


def _types(each: dict, which: str) -> list:
    given = each.get(which)
    return given["types"] if isinstance(given, dict) else each[f"{which[:-1]}_types"]


def _of_execution(
    each: dict, place: int, groups: dict, rank: int, what: str, skipped: Counter[str]
) -> Node | None:
    """Its inputs are [tensors], request, process group, rank, name of the call, split of each side, ..."""
    inputs = _values(each, "inputs")
    has = {attribute["name"]: attribute["value"] for attribute in each.get("attrs", [])}
    index = [isinstance(value, str) for value in inputs].index(True)
    call = _call(has.get("collective_name", inputs[index]), what, skipped)
    if not call:
        return None
    name = has.get("pg_name", inputs[index - 2])
    name = str(name[0] if isinstance(name, list) else name)[:80]
    members = groups.get(name)
    recorded = inputs[index - 1]
    if "in_msg_nelems" in has:
        counts, dtype = (has["in_msg_nelems"], has["out_msg_nelems"]), has["dtype"]
    else:
        counts = tuple(_elements(_values(each, which)[0]) for which in ("inputs", "outputs"))
        dtype = re.sub(r".*\(|\).*", "", _types(each, "inputs")[0])
    sizes = _sizes(call, *counts, dtype, what)
    of = {"sent": inputs[index + 1], "received": inputs[index + 2]}
    world = members[_rank(recorded, what)] if members and call in ("send", "recv", "broadcast") else None
    return Node(
        id=place,
        name=call,
        call=call,
        stream=f"pg {name}" if members else "pg",
        group=name if members else "",
        root=-1 if world is None or call != "broadcast" else world,
        peer=-1 if call not in ("send", "recv") else _rank(recorded, what) if world is None else world,
        **sizes,
        **_splits(call, of, sizes, what),
    )


def _elements(tensors: Any) -> int:
    """Of tensors [id, storage, offset, elements, bytes of one, device], however deep in lists."""
    if isinstance(tensors[0], list):
        return sum(map(_elements, tensors))
    return tensors[3]


def _call(given: Any, what: str, skipped: Counter[str]) -> str:
    """A call by our name; "" for what is no communication of its own."""
    name = re.sub(r"[^a-z]", "", given.lower()) if isinstance(given, str) else ""
    if name in _SKIPPED:
        skipped[name] += name == "batchisendirecv"
        return ""
    if name not in _CALLS:
        raise ValueError(f"{what} has the unknown communication {given!r:.80}")
    return _CALLS[name]


def _sizes(call: str, sent: Any, received: Any, dtype: Any, what: str) -> dict[str, Any]:
    """Bytes of the larger side, and the type."""
    if call == "barrier":
        return {"nbytes": 0, "dtype": ""}
    known = _DTYPES.get(dtype.lower()) if isinstance(dtype, str) else None
    if known is None:
        raise ValueError(f"{what} has the unknown type {dtype!r:.80}")
    if not natural(sent, LARGEST // 8) or not natural(received, LARGEST // 8):
        raise ValueError(f"{what}: sizes must be numbers of elements, got {sent!r:.80}, {received!r:.80}")
    return {"nbytes": max(sent, received) * _SIZES[known], "dtype": known}


def _splits(call: str, given: dict[str, Any], sizes: dict, what: str) -> dict[str, tuple[int, ...]]:
    """Elements by rank, of an all_to_all that names its parts; a split may count rows of elements."""
    if call != "all_to_all":
        return {}
    given = {name: strict_json(split) if isinstance(split, str) else split for name, split in given.items()}
    for split in given.values():
        if not isinstance(split, list) or not all(natural(count, LARGEST // 8) for count in split):
            raise ValueError(f"{what}: a split must be a list of natural numbers, got {split!r:.80}")
    if not any(given.values()):
        return {}
    if not all(given.values()):
        raise ValueError(f"{what}: has the split of one side alone")
    elements = sizes["nbytes"] // _SIZES[sizes["dtype"]]
    most = max(map(sum, given.values()))
    row = elements // most if most and elements % most == 0 else 0
    if not row and elements:
        raise ValueError(f"{what}: splits add up to {most}, which does not divide {elements} elements")
    return {name: tuple(count * row for count in split) for name, split in given.items()}


def _rank(value: Any, what: str) -> int:
    if not natural(value, MOST_RANKS):
        raise ValueError(f"{what}: must be a rank, got {value!r:.80}")
    return value


def _traced(
    kind: str,
    path: Path,
    rank: int,
    world: int,
    nodes: Sequence[Node],
    groups: dict[str, tuple[int, ...]],
    skipped: Counter[str],
    zero: float,
) -> Trace:
    found = [node if node.start is None else replace(node, start=node.start - zero) for node in nodes]
    for node in found:
        if (node.start or 0.0) > LONGEST:
            raise ValueError(f"{path}: entry {node.id} begins more than {LONGEST:g} s after the first")
        if node.peer >= world or node.root >= world:
            raise ValueError(f"{path}: entry {node.id} names a rank that is not of the {world} ranks")
    notes = tuple(f"not replayed: {count} x {name}" for name, count in skipped.items() if count)
    return Trace(str(path), kind, rank, world, found, groups, [rank], notes)
