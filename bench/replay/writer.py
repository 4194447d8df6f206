"""Writes traces as Chakra's, as `shardrt simulate --chakra` does: of measured steps, and of tests."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shardrt.simulate.chakra import with_length

from .chakra import schema
from .trace import COMPUTE, MESSAGES, Node, Trace


def write(folder: Path, name: str, traces: Iterable[Trace]) -> None:
    """NAME.RANK.et for each, and the groups of all as NAME.groups.json."""
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[str, Sequence[int]] = {}
    for trace in traces:
        (folder / f"{name}.{trace.rank}.et").write_bytes(b"".join(messages(trace)))
        groups |= trace.groups
    (folder / f"{name}.groups.json").write_text(json.dumps(groups) + "\n", encoding="utf-8")


def messages(trace: Trace) -> Iterator[bytes]:
    """Each message behind its length."""
    made = schema()
    alike = ",".join(map(str, trace.alike or [trace.rank]))
    facts = {"schema": "shardrt", "world_size": trace.world, "rank": trace.rank, "ranks": alike}
    facts |= {"nodes": len(trace.nodes)}
    yield with_length(made.GlobalMetadata(version="0.0.4", attr=_attributes(made, facts)))
    for node in trace.nodes:
        yield with_length(_message(made, node, trace))


def _message(made: Any, node: Node, trace: Trace) -> Any:
    ranks = len(trace.groups.get(node.group) or range(trace.world))
    values: dict[str, Any] = {"is_cpu_op": node.call == COMPUTE, "stream": node.stream}
    values |= {} if node.start is None else {"start_ns": round(1e9 * node.start)}
    values |= {} if node.seconds is None else {"duration_ns": round(1e9 * node.seconds)}
    values |= {} if node.core is None else {"core_ns": round(1e9 * node.core)}
    kind = "COMP_NODE"
    if node.call in MESSAGES:
        kind = f"COMM_{node.call.upper()}_NODE"
        values["comm_dst" if node.call == "send" else "comm_src"] = node.peer
    elif node.call != COMPUTE:
        kind = "COMM_COLL_NODE"
        values["comm_type"] = made.CollectiveCommType.Value(node.call.upper())
        values |= {"root": node.root} if node.root >= 0 else {}
    if node.call != COMPUTE:
        sliced = node.call in ("all_gather", "gather")
        values |= {"comm_size": node.nbytes // ranks if sliced else node.nbytes, "comm_dtype": node.dtype}
        values |= {"pg_name": node.group} if node.group else {}
    return made.Node(
        id=node.id,
        name=node.name,
        type=kind,
        data_deps=node.deps,
        start_time_micros=max(0, round(1e6 * (node.start or 0.0))),
        duration_micros=max(0, round(1e6 * (node.seconds or 0.0))),
        attr=_attributes(made, values),
    )


def _attributes(made: Any, values: dict[str, Any]) -> list[Any]:
    found = []
    for name, value in values.items():
        kind = "bool" if isinstance(value, bool) else "string" if isinstance(value, str) else "int64"
        found.append(made.AttributeProto(name=name, **{f"{kind}_val": value}))
    return found
