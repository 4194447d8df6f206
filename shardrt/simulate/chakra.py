"""A priced step as Chakra execution traces, one for each recorded rank: for ASTRA-sim, and to be replayed.

    write(timing, machine, Path("traces"), "train")     # traces/train.0.et, ..., traces/train.groups.json

A trace is the work of a rank in its last step, in the order of its issue. Waits and events become
dependencies. `nodes_of` makes the nodes, and `write` encodes them by the schema of the package mlc-chakra.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from shardrt import dtypes
from shardrt.device.program import (
    HOST,
    Collective,
    Free,
    HostWait,
    Item,
    Program,
    Record,
    Step,
    Take,
    Wait,
    Work,
)
from shardrt.simulate.machine import Machine
from shardrt.simulate.timing import Timing, label_of

__all__ = ["Node", "Trace", "schema", "traces_of", "with_length", "write"]

VERSION = "0.0.4"  # of the schema
_NOTHING = 0.5e-9  # seconds; attributes have nanoseconds
_MEMORY = {"to device": "MEM_LOAD_NODE", "to host": "MEM_STORE_NODE"}


@dataclass(slots=True)
class Node:
    """A piece of work of a rank.

    Attributes:
        id: from 1, in the order of issue.
        type: of Chakra's NodeType: COMP_NODE, COMM_COLL_NODE, COMM_SEND_NODE, COMM_RECV_NODE, MEM_LOAD_NODE
            (a copy from host memory to the device) or MEM_STORE_NODE (a copy to host memory).
        data_deps: the previous node of its stream, and the nodes whose events the stream waited for. None of
            them follows from another one.
        ctrl_deps: nodes that the host waited for, or ran itself, before it issued this one; without those
            that follow from other dependencies.
        start, stop: priced, in seconds from the start of the step, when the previous step is over. A node
            with a negative start ran while the previous step did; no other node starts before 0.
        values: attributes by Chakra's names, see `traces_of`.
    """

    id: int
    name: str
    type: str
    data_deps: tuple[int, ...]
    ctrl_deps: tuple[int, ...]
    start: float
    stop: float
    values: dict[str, Any]


@dataclass
class Trace:
    """The last step of a recorded rank.

    Attributes:
        stands_for: all ranks that issue the same; the figures of the trace are those of `rank`.
        start: of the step, in seconds from the earliest start of the recorded ranks.
        seconds: of the step.
    """

    rank: int
    world_size: int
    stands_for: Sequence[int]
    step: int
    start: float
    seconds: float
    nodes: list[Node] = field(default_factory=list)


def traces_of(timing: Timing, machine: Machine) -> tuple[list[Trace], dict[str, Sequence[int]]]:
    """The traces of all recorded ranks, and the world ranks of each group that a node names.

    A group is named by a number from "1", as ASTRA-sim needs it; its attribute `pg_desc` is its role.

    A node that had to wait until the host issued it depends on a COMP_NODE "host": the host's time since
    whatever it did or waited for before. So the longest path through the dependencies is as long as the step.

    Attributes of nodes, with Chakra's names and the types that ASTRA-sim's feeder reads:

    - all: `is_cpu_op` (whether a CPU computes it; never of communication, which ASTRA-sim refuses there),
      `stream`, `start_ns`, `duration_ns`, and `tag`, the unit;
    - COMP: `num_ops` (flops) and `tensor_size` (bytes moved to and from memory), where a kernel has them;
      MEM: `tensor_size`, bytes over the link;
    - communication: `comm_size`, the bytes that this rank gives: its slice in an all-gather, and the whole
      buffer in a reduce-scatter, as in ASTRA-sim's rings and PARAM's `in_msg_nelems`. `comm_count` is the
      same in elements of `comm_dtype`: a NumPy dtype or "bfloat16"; 16-bit floats that are only moved are
      "uint16". All-gathers of "uint8" are the host's, and ranks may give different lengths. `pg_name`,
      `pg_desc`, and `comm_tag`, which counts the group's collectives, or tells messages of two ranks apart;
    - collectives: `comm_type` and, of a broadcast, `root`, a world rank. A BARRIER has 0 bytes and no dtype;
    - messages: `comm_src` and `comm_dst`, world ranks, and `grouped` for a send that runs at the same time as
      the next recv of its stream.

    Raises:
        ValueError: if a rank has ended no step.
    """
    groups, sent = _Groups(), {}
    for number, program in enumerate(timing.programs):
        if not timing.steps[number]:
            raise ValueError(f"chakra: rank {program.rank} has ended no step")
        for index, item in timing.items_of(number):
            if isinstance(item, Collective):
                groups.add(program, item.group)
                if item.call == "send":
                    sent[_message(program, item)] = timing.began[number][index]
    windows = [timing.window(number) for number in range(len(timing.programs))]
    first, found = min(begin for begin, _ in windows), []
    for number, (program, (begin, end)) in enumerate(zip(timing.programs, windows, strict=True)):
        step = [item.number for item in program.items if isinstance(item, Step)][-1]
        alone = [program.rank] if len(timing.programs) > 1 else range(program.world_size)
        trace = Trace(
            program.rank, program.world_size, program.alike or alone, step, begin - first, end - begin
        )
        trace.nodes = _Step(timing, number, machine, groups, sent).nodes
        found.append(trace)
    return found, groups.ranks


def write(timing: Timing, machine: Machine, folder: Path, name: str) -> list[Path]:
    """Write NAME.RANK.et for each recorded rank, and NAME.groups.json, ASTRA-sim's communicator groups.

    Traces of the same name that were there before are removed.

    Returns:
        The paths of the traces.

    Raises:
        ImportError: without mlc-chakra.
        OSError: if `folder` can't be written.
    """
    schema()
    traces, groups = traces_of(timing, machine)
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if re.fullmatch(rf"{re.escape(name)}\.\d+\.et", path.name):
            path.unlink()
    paths = [folder / f"{name}.{trace.rank}.et" for trace in traces]
    for path, trace in zip(paths, traces, strict=True):
        path.write_bytes(b"".join(_messages(trace, machine)))
    lists = {group: list(ranks) for group, ranks in groups.items()}
    (folder / f"{name}.groups.json").write_text(json.dumps(lists) + "\n", encoding="utf-8")
    return paths


def schema() -> Any:
    """The module of mlc-chakra's messages. Raises ImportError where it is not installed."""
    from chakra.schema.protobuf import et_def_pb2

    return et_def_pb2


# -- groups and messages


class _Groups:
    """Numbers of the groups that nodes name."""

    def __init__(self) -> None:
        self.ranks: dict[str, Sequence[int]] = {}
        self._names: dict[tuple[str, Sequence[int]], str] = {}
        self._of: dict[tuple[int, str], str] = {}  # by rank and name: ranks are long to compare

    def add(self, program: Program, group: str) -> None:
        if (program.rank, group) not in self._of:
            ranks = program.groups[group].ranks
            number = self._names.setdefault((group, ranks), str(len(self._names) + 1))
            self.ranks[number] = ranks
            self._of[program.rank, group] = number

    def name(self, program: Program, group: str) -> str:
        return self._of[program.rank, group]


def _ends(program: Program, item: Collective) -> tuple[int, int]:
    """The world ranks that send and receive a message."""
    there = program.groups[item.group].ranks[item.peer]
    return (program.rank, there) if item.call == "send" else (there, program.rank)


def _message(program: Program, item: Collective) -> tuple[str, tuple[int, int], int]:
    """What both ends of a message have in common."""
    return item.group, _ends(program, item), item.number


# -- nodes


class _Step:
    """The nodes of one rank's last step.

    A thread is a stream or the host; streams whose work the host does itself are the host's.
    """

    def __init__(
        self,
        timing: Timing,
        number: int,
        machine: Machine,
        groups: _Groups,
        sent: Mapping[Any, float],
    ) -> None:
        self.nodes: list[Node] = []
        self._machine, self._groups, self._sent = machine, groups, sent
        self._program = timing.programs[number]
        self._began, self._ended = timing.began[number], timing.ended[number]
        self._over_host = {} if machine.of_cpus else timing.copies[number]
        self._begin, end = timing.window(number)
        self._after: dict[str, tuple[int, ...]] = {}  # thread -> what its next node comes after
        self._beside: dict[str, tuple[int, ...]] = {}  # thread -> sends that run with its next message
        self._marks: dict[int, tuple[int, ...]] = {}
        self._lanes: list[str] = []  # of each node: nodes of one lane come one after the other
        self._known: list[dict[str, int]] = []  # of each node: lane -> the last node that is over before it
        items = timing.items_of(number)
        self._issued = self._ended[items[0][0] - 1] if items[0][0] else 0.0  # until then the host has issued
        self._first = min(0.0, self._issued - self._begin)
        for index, item in items:
            self._pass(index, item)
        if end - self._begin > max((node.stop for node in self.nodes), default=0.0) + _NOTHING:
            self._host_until(end - self._begin)

    def _pass(self, index: int, item: Item) -> None:
        """Do as the clock does with an item, but take its times as they are."""
        if isinstance(item, Take | Free):
            return
        host, stream = self._machine.host, getattr(item, "stream", HOST) or HOST
        if stream != HOST:
            self._issued += host.item + host.launch * getattr(item, "launches", 0)
        thread = HOST if stream in self._machine.host_streams else stream
        if isinstance(item, Record):
            self._marks[item.mark] = (*self._after.get(thread, ()), *self._beside.get(thread, ()))
        elif isinstance(item, Wait | HostWait):
            waited = self._marks.get(item.mark, ())  # of a step before: nothing
            self._after[thread] = self._least((*self._after.get(thread, ()), *waited))
        elif isinstance(item, Work | Collective):
            self._work(index, item, stream, thread)
        if thread == HOST and not isinstance(item, Record):
            self._issued = self._ended[index]

    def _work(self, index: int, item: Work | Collective, stream: str, thread: str) -> None:
        before, beside = self._after.get(thread, ()), self._beside.pop(thread, ())
        if isinstance(item, Work) or item.peer < 0:
            before, beside = (*before, *beside), ()
        start, issued = self._began[index], self._issued - self._begin
        ready = min(0.0, start - self._begin), self._stop_of((*before, *self._after.get(HOST, ())))
        if issued > max(ready) + _NOTHING:
            self._host_until(issued)
            before = self._after[HOST] if thread == HOST else before
        needed = self._least((*before, *self._after.get(HOST, ())))
        data = tuple(node for node in needed if node in before)
        control = tuple(node for node in needed if node not in before)
        if isinstance(item, Collective):
            kind, values = self._communication(item)
            if item.call == "recv":  # the time in which it waits for the message to leave is none of it
                start = max(start, self._sent.get(_message(self._program, item), start))
            name = label_of(item)
        else:
            kind, values, name = "COMP_NODE", {}, item.name
            values |= {"num_ops": item.flops} if item.flops else {}
            values |= {"tensor_size": item.nbytes} if item.nbytes else {}
            if index in self._over_host:
                direction, nbytes = self._over_host[index]
                kind, values = _MEMORY[direction], {"tensor_size": nbytes}
        own = thread == HOST and isinstance(item, Work)
        times = start - self._begin, self._ended[index] - self._begin
        values |= {"tag": unit} if (unit := _unit(item)) else {}
        if isinstance(item, Collective) and item.grouped:
            lane = f"{thread}, {len(beside)} grouped"
            node = self._add(name, kind, (data, control), times, own, stream, lane, values)
            self._beside[thread] = (*beside, node)
        else:
            node = self._add(name, kind, (data, control), times, own, stream, thread, values)
            self._after[thread] = (node, *beside)

    def _host_until(self, stop: float) -> None:
        """What the host does until then, since all that comes before its next node."""
        before = self._after.get(HOST, ())
        start = self._stop_of(before) if before else self._first
        node = self._add("host", "COMP_NODE", (before, ()), (start, stop), True, HOST, HOST, {})
        self._after[HOST] = (node,)

    def _add(
        self,
        name: str,
        kind: str,
        after: tuple[tuple[int, ...], tuple[int, ...]],
        times: tuple[float, float],
        on_cpu: bool,
        stream: str,
        lane: str,
        values: dict[str, Any],
    ) -> int:
        number = len(self.nodes) + 1
        known: dict[str, int] = {}
        for node in (*after[0], *after[1]):
            for other, last in self._known[node - 1].items():
                if last > known.get(other, 0):
                    known[other] = last
        known[lane] = number
        self._known.append(known)
        self._lanes.append(lane)
        values = {"is_cpu_op": on_cpu, "stream": stream} | values
        self.nodes.append(Node(number, name, kind, *after, *times, values))
        return number

    def _stop_of(self, nodes: Sequence[int]) -> float:
        return max((self.nodes[node - 1].stop for node in nodes), default=-inf)

    def _follows(self, first: int, second: int) -> bool:
        """Whether the second comes after the first."""
        return self._known[second - 1].get(self._lanes[first - 1], 0) >= first

    def _least(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """Those of which no other one comes after them."""
        each = tuple(dict.fromkeys(nodes))
        if len(each) < 2:
            return each
        return tuple(a for a in each if not any(a != b and self._follows(a, b) for b in each))

    def _communication(self, item: Collective) -> tuple[str, dict[str, Any]]:
        """The type of its node, and its attributes."""
        program, groups = self._program, self._groups
        group = program.groups[item.group]
        size = item.nbytes // len(group.ranks) if item.call == "all_gather" else item.nbytes
        name = groups.name(program, item.group)
        values = {"pg_name": name, "pg_desc": group.role or item.group, "comm_size": size}
        if size:
            dtype = item.dtype or "uint8"  # bytes of the host
            values |= {"comm_count": size // dtypes.storage(dtype).itemsize, "comm_dtype": dtype}
        if item.peer < 0:
            values |= {"comm_type": item.call.upper(), "comm_tag": item.number}
            values |= {"root": group.ranks[item.root]} if item.root >= 0 else {}
            return "COMM_COLL_NODE", values
        source, to = _ends(program, item)
        tag = item.number * len(groups.ranks) + int(name) - 1
        values |= {"comm_src": source, "comm_dst": to, "comm_tag": tag}
        values |= {"grouped": True} if item.grouped else {}
        return f"COMM_{item.call.upper()}_NODE", values


def _unit(item: Work | Collective) -> str:
    """Without the name of the call, which labels of collectives begin with."""
    return item.label.removeprefix(getattr(item, "call", "")).strip()


# -- files


def _messages(trace: Trace, machine: Machine) -> Iterator[bytes]:
    """Each message behind its length."""
    made = schema()
    facts = {
        "schema": "shardrt",
        "world_size": trace.world_size,
        "rank": trace.rank,
        "ranks": _runs(trace.stands_for),
        "machine": machine.name,
        "step": trace.step,
        "nodes": len(trace.nodes),  # a reader finds by it that a file is cut off between two of them
        "start_ns": round(1e9 * trace.start),
        "duration_ns": round(1e9 * trace.seconds),
    }
    attributes = _Attributes(made)
    yield with_length(made.GlobalMetadata(version=VERSION, attr=attributes.of(facts)))
    for node in trace.nodes:
        start, stop = round(1e9 * node.start), round(1e9 * node.stop)
        values = node.values | {"start_ns": start, "duration_ns": stop - start}
        yield with_length(
            made.Node(
                id=node.id,
                name=node.name,
                type=node.type,
                data_deps=node.data_deps,
                ctrl_deps=node.ctrl_deps,
                start_time_micros=max(0, round(start / 1e3)),
                duration_micros=round((stop - start) / 1e3),
                attr=attributes.of(values),
            )
        )


class _Attributes:
    """Makes attributes. Those of one name and value are made once."""

    _INT32 = ("comm_src", "comm_dst", "comm_tag", "root", "rank", "world_size", "step")
    _KINDS = dict.fromkeys(_INT32, "int32_val") | {"tensor_size": "uint64_val"}

    def __init__(self, made: Any) -> None:
        self._made = made
        self._kept: dict[tuple[str, Any], Any] = {}

    def of(self, values: Mapping[str, Any]) -> list[Any]:
        return [self._one(name, value) for name, value in values.items()]

    def _one(self, name: str, value: Any) -> Any:
        found = self._kept.get((name, value))
        if found is None:
            found = self._made.AttributeProto(name=name, **self._typed(name, value))
            if not name.endswith("_ns"):
                self._kept[name, value] = found
        return found

    def _typed(self, name: str, value: Any) -> dict[str, Any]:
        """Its field of the message, of the type that ASTRA-sim's feeder reads."""
        if name == "comm_type":
            return {"int64_val": self._made.CollectiveCommType.Value(value)}
        if isinstance(value, bool):
            return {"bool_val": value}
        return {"string_val" if isinstance(value, str) else self._KINDS.get(name, "int64_val"): value}


def with_length(message: Any) -> bytes:
    """A message behind its length, a varint: how the files of mlc-chakra's protolib hold it."""
    data = message.SerializeToString()
    length, head = len(data), bytearray()
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*head, length]) + data


def _runs(ranks: Sequence[int]) -> str:
    """Ranks as text: "0-15", "0,2,4", "0-7,64-71"."""
    each = sorted(ranks)
    ends = [place for place, (a, b) in enumerate(pairwise(each)) if b != a + 1]
    runs = zip([0, *(place + 1 for place in ends)], [*ends, len(each) - 1], strict=True)
    return ",".join(str(each[a]) if a == b else f"{each[a]}-{each[b]}" for a, b in runs)
