"""Seeded mutations of a training step, at seams that real ranks and the simulated world share.

A mutation changes one call of a seam, or all calls for one unit, in one setting: all ranks do the same wrong
thing. On real ranks the integers (integers.py) say whether it changes what the optimizer reads or an op
reads. In the simulated world `shardrt prove` must find it, if it does. On the CPU the host computes, and
needs fewer waits: missing waits are looked for in programs of a GPU, too.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import pytest

from shardrt import device, optim
from shardrt.comm import thread, world
from shardrt.comm.protocol import Communicator
from shardrt.device.cpu import CPUDevice, InlineStream, ThreadStream
from shardrt.device.cuda import CUDADevice
from shardrt.device.simulated import SimulatedStream
from shardrt.fsdp import collectives, units
from shardrt.fsdp.gathers import Gathers
from shardrt.fsdp.options import low_precision
from shardrt.fsdp.transfer import Transfer
from shardrt.fsdp.whole_gradient import WholeGradient
from tests.prove.integers import Setting, truth_of
from tests.prove.settings import Proof, proof_of, setting

OFFSET = 16  # elements: a shard begins at a multiple of these
EVERY = -1  # call of a mutation
PATIENCE = 20.0  # seconds until real ranks that wait for each other raise

GROUP, PLACE, DIVISOR, MISSING, DOUBLED, WAIT, STALE, SLICE, TIE = (
    "wrong group",
    "wrong offset",
    "wrong divisor",
    "missing reduction",
    "doubled reduction",
    "missing wait",
    "stale gather",
    "wrong slice",
    "broken tie",
)
KINDS = (GROUP, PLACE, DIVISOR, MISSING, DOUBLED, WAIT, STALE, SLICE, TIE)


class Ranks:
    """What a mutation needs of one rank: its groups, other communicators, and how often it came to a seam."""

    def __init__(self, mesh: Any, model: Any, others: bool) -> None:
        self.groups = {group.label: group for unit in units(model) for group in unit.groups}
        self.counts: Counter[tuple[str, str]] = Counter()
        self.others: dict[tuple[int, str], Communicator] = {}
        self.tags = {group.tag for group in self.groups.values()}
        self.gradient: Any = None  # of the last update that might have had another's
        self.axes: list[Communicator] = []
        if not others:
            return
        for label in sorted(self.groups):
            ranks = self.groups[label].ranks
            for communicator in (ranks.reduce, ranks.gather, ranks.replicate):
                if communicator is not None and communicator.size > 1:
                    self._add(communicator)
        self.axes = [mesh[name].communicator("mutant") for name in mesh.mesh_dim_names if len(mesh.shape) > 1]

    def _add(self, communicator: Communicator) -> None:
        if (id(communicator), "reversed") in self.others:
            return
        size, rank = communicator.size, communicator.rank
        self.others[id(communicator), "reversed"] = communicator.among(list(range(size))[::-1], 0)
        half = size // 2
        if half > 1:
            first = half * (rank >= half)
            members = list(range(first, half if first == 0 else size))
            self.others[id(communicator), "half"] = communicator.among(members, first)

    def other(self, communicator: Communicator, which: str) -> Communicator | None:
        if which != "axis":
            return self.others.get((id(communicator), which))
        alike = [axis for axis in self.axes if axis.size == communicator.size > 1]
        own = _members(communicator)
        return next((axis for axis in alike if _members(axis) != own), None)


def _members(communicator: Communicator) -> tuple[int, ...]:
    """Its world ranks."""
    while not hasattr(communicator, "channel") and not hasattr(communicator, "_group"):
        communicator = communicator._host
    if hasattr(communicator, "channel"):
        return tuple(communicator.channel.ranks)
    return tuple(communicator._group.members)


# -- what mutations do: do(call, here, *arguments of the seam), with the seam's own call. UNCHANGED: nothing.

UNCHANGED = object()


def _local(call, here, comm, output, buffer, *, stream, scale=1.0, accumulate=False, kind="", tag=""):
    """This rank's own part in the place of the sum."""
    if comm.size == 1:
        return UNCHANGED
    own = buffer[comm.rank * output.size : (comm.rank + 1) * output.size]
    kernels = device.of(output).kernels.reduce
    if kind:
        stream.submit(kernels.sum_packed, output, [own], scale, accumulate, kind)
    else:
        stream.submit(kernels.sum_into, output, [own], scale, accumulate)


def _skip(call, here, *args, **kwargs):
    pass


def _twice(call, here, comm, output, buffer, **how):
    call(comm, output, buffer, **how)
    call(comm, output, buffer, **{**how, "accumulate": True})


def _scaled(factor):
    def do(call, here, comm, output, buffer, *, scale=1.0, **how):
        call(comm, output, buffer, scale=scale * factor, **how)

    return do


def _unscaled(call, here, comm, output, buffer, *, scale=1.0, **how):
    if scale == 1:
        return UNCHANGED
    call(comm, output, buffer, scale=1.0, **how)


def _scaled_twice(call, here, comm, output, buffer, *, scale=1.0, **how):
    if scale == 1:
        return UNCHANGED
    call(comm, output, buffer, scale=scale * scale, **how)


def _forgets(call, here, comm, output, buffer, *, accumulate=False, **how):
    if not accumulate:
        return UNCHANGED
    call(comm, output, buffer, accumulate=False, **how)


def _adds(call, here, comm, output, buffer, *, accumulate=False, **how):
    if accumulate:
        return UNCHANGED
    call(comm, output, buffer, accumulate=True, **how)


def _over(which):
    def do(call, here, comm, output, buffer, **how):
        other = here.other(comm, which)
        if other is None:
            return UNCHANGED
        call(other, output, buffer[: output.size * other.size], **how)

    return do


def _gather_over(which):
    def do(call, here, comm, buffer, **how):
        other = here.other(comm, which)
        if other is None:
            return UNCHANGED
        call(other, buffer[: buffer.size // comm.size * other.size], **how)

    return do


def _gather_part(call, here, comm, buffer, **how):
    """Ranks gather as if shards were half as long."""
    if buffer.size % (2 * comm.size):
        return UNCHANGED
    call(comm, buffer[: buffer.size // 2], **how)


def _gather_twice(call, here, comm, buffer, **how):
    call(comm, buffer, **how)
    call(comm, buffer, **how)


def _again(call, here, comm, buffer, **how):
    call(comm, buffer, **how)
    call(comm, buffer, **how)


def _of_next(call, here, transfer, slot, output, streams):
    """To the place of the next rank's shard."""
    group = transfer.group
    if group.ranks.size == 1:
        return UNCHANGED
    low, high = group.layout.shard_range((group.ranks.rank + 1) % group.ranks.size)
    call(transfer, slot, slot.array[low:high], streams)


def _moved_fill(call, here, transfer, slot, output, streams):
    shard = transfer.group.shard
    streams.gather.wait(slot.free)
    streams.gather.submit(streams.device.copy, output[: shard.size - 1], shard[1:])


def _no_issue(call, here, transfer, slot, streams):
    streams.gather.record(slot.ready)


def _stays(call, here, gathers, unit):
    """Gathered parameters are taken to be those of before the update still."""
    gathers.written = True


def _first_only(call, here, path, position):
    if position not in path.written:
        return UNCHANGED
    return call(path, position)[0], False


def _to_old(call, here, path, position):
    if position in path.written:
        return UNCHANGED
    return call(path, position)[0], True


def _shifted_target(by):
    def do(call, here, path, position):
        entry = path.layout.entries[position]
        if type(path) is not WholeGradient or entry.stop + by > path.slot.array.size:
            return UNCHANGED
        _, accumulate = call(path, position)
        return path.slot.array[entry.offset + by : entry.stop + by].reshape(entry.shape), accumulate

    return do


def _target_of_another(call, here, path, position):
    entries = path.layout.entries
    alike = [n for n, e in enumerate(entries) if n != position and e.shape == entries[position].shape]
    if type(path) is not WholeGradient or not alike:
        return UNCHANGED
    _, accumulate = call(path, position)
    return path.view(alike[0]), accumulate


def _send_from(by):
    def do(call, here, path, slot, out, accumulate):
        if type(path) is not WholeGradient or slot.array.size < path.full + by:
            return UNCHANGED
        full = slot.array[by : path.full + by]
        collectives.reduce_scatter(path.group, slot, full, out, accumulate, path.streams)

    return do


def _send_how(before):
    def do(call, here, path, slot, out, accumulate):
        if accumulate is not before:
            return UNCHANGED
        call(path, slot, out, not before)

    return do


def _send_twice(call, here, path, slot, out, accumulate):
    call(path, slot, out, accumulate)
    call(path, slot, out, True)


def _next_piece(call, here, group, output, wire, kind, streams, scale=1.0):
    """Copies sum the next rank's part of the shard. (What is summed in place must be the own part.)"""
    copies, stream = group.ranks.replicate, streams.reduce
    if group.ranks.size > 1 or copies.size == 1 or not kind:
        return UNCHANGED
    count, place = output.size // copies.size, (copies.rank + 1) % copies.size
    piece = output[place * count : (place + 1) * count]
    copies.reduce_scatter(piece, wire, stream=stream, scale=scale, kind=kind, tag=group.tag)
    copies.all_gather(output, stream=stream, tag=group.tag)
    return None


def _clears_nothing(call, here, path):
    pass


def _shifted_update(call, here, optimizer, kernels, update):
    arrays = {name: array[1:] if name == "gradient" else array[:-1] for name, array in update.arrays.items()}
    ranges = update.ranges
    if type(ranges) is np.ndarray:
        ranges = ranges.copy()
        ranges[:, :2] = np.minimum(ranges[:, :2], update.arrays["shard"].size - 1)
    call(optimizer, kernels, replace(update, arrays=arrays, ranges=ranges))


def _update_with_last(call, here, optimizer, kernels, update):
    """The gradient of the unit before, where it is as long."""
    before, here.gradient = here.gradient, update.arrays["gradient"]
    if before is None or before.size != here.gradient.size:
        return UNCHANGED
    call(optimizer, kernels, update.on({"gradient": before}))


def _update_twice(call, here, optimizer, kernels, update):
    call(optimizer, kernels, update)
    call(optimizer, kernels, update)


# -- seams


@dataclass(frozen=True)
class Seam:
    """owners: what has the attribute. key: what a call is for, from its arguments; "" for no mutation."""

    name: str
    owners: tuple[Any, ...]
    attribute: str
    key: Callable[..., str]


def _of_call(comm, *args, tag="", **how):
    """Calls of units' parameters and gradients. (Those of activations have no tag, or a module's.)"""
    return f"{tag} {comm.role}" if here_now() is not None and tag in here_now().tags else ""


def _of_tied(comm, *args, tag="", **how):
    name, _, elements = tag.partition(", elements ")
    return name if elements else ""


def _step_of(optimizer):
    return f"step {max(int(piece.steps.max()) for piece in optimizer.slices)}"


def _of_wait(stream, event):
    frame = sys._getframe(2)
    place = f"{frame.f_code.co_filename.rpartition('shardrt/')[2]} {frame.f_code.co_qualname}"
    return f"{stream.name} {place}" if place.startswith(("fsdp", "optim")) else ""


STREAMS = (InlineStream, ThreadStream, SimulatedStream)
TRANSFERS = (
    Transfer,
    low_precision.NativeTransfer,
    low_precision.PackedTransfer,
    low_precision.RoundedTransfer,
)
REDUCE = Seam("reduce_scatter", (Communicator,), "reduce_scatter", _of_call)
GATHER = Seam("all_gather", (Communicator,), "all_gather", _of_call)
TIED = Seam("all_reduce", (Communicator,), "all_reduce", _of_tied)
FILL = Seam("fill", (Transfer,), "fill", lambda transfer, *args: transfer.group.label or "root")
ISSUE = Seam("issue", TRANSFERS, "issue", lambda transfer, *args: transfer.group.label or "root")
WRITTEN = Seam("shards_written", (Gathers,), "shards_written", lambda gathers, unit: unit.label)
TARGET = Seam("target", (WholeGradient,), "target", lambda path, position: f"{path.group.label} {position}")
TIED_TARGET = Seam(
    "target of a tied parameter",
    (WholeGradient,),
    "target",
    lambda path, position: (
        f"{path.group.label} {position}" if path.layout.entries[position].name == "embed.weight" else ""
    ),
)
SEND = Seam("send", (WholeGradient,), "send", lambda path, *args: path.group.label or "root")
CLEAR = Seam("clear", (WholeGradient,), "_clear_unwritten", lambda path: path.group.label or "root")
COPIES = Seam("copies", (collectives,), "sum_over_ranks", lambda group, *args: group.label or "root")
UPDATE = Seam("update", (optim.AdamW, optim.SGD), "update", lambda optimizer, *args: _step_of(optimizer))
STREAM = Seam("wait", STREAMS, "wait", _of_wait)
RECORD = Seam("record", STREAMS, "record", _of_wait)

# name: (kind, seam, what it does)
WAYS: dict[str, tuple[str, Seam, Callable]] = {
    "over another axis": (GROUP, REDUCE, _over("axis")),
    "over half of the ranks": (GROUP, REDUCE, _over("half")),
    "over ranks in reverse": (GROUP, REDUCE, _over("reversed")),
    "gather over another axis": (GROUP, GATHER, _gather_over("axis")),
    "gather over half of the ranks": (GROUP, GATHER, _gather_over("half")),
    "gather over ranks in reverse": (GROUP, GATHER, _gather_over("reversed")),
    "gradient one element on": (PLACE, TARGET, _shifted_target(1)),
    "gradient 16 elements on": (PLACE, TARGET, _shifted_target(OFFSET)),
    "sent from one element on": (PLACE, SEND, _send_from(1)),
    "sent from 16 elements on": (PLACE, SEND, _send_from(OFFSET)),
    "shard one element on": (PLACE, FILL, _moved_fill),
    "update one element on": (PLACE, UPDATE, _shifted_update),
    "twice the scale": (DIVISOR, REDUCE, _scaled(2.0)),
    "a third of the scale": (DIVISOR, REDUCE, _scaled(1 / 3)),
    "no scale": (DIVISOR, REDUCE, _unscaled),
    "the scale twice": (DIVISOR, REDUCE, _scaled_twice),
    "no sum": (MISSING, REDUCE, _skip),
    "own part only": (MISSING, REDUCE, _local),
    "forgets micro-batches before": (MISSING, SEND, _send_how(True)),
    "sends nothing": (MISSING, SEND, _skip),
    "forgets the use before": (MISSING, TARGET, _first_only),
    "forgets the sum before": (MISSING, REDUCE, _forgets),
    "no update": (MISSING, UPDATE, _skip),
    "reduced twice": (DOUBLED, REDUCE, _twice),
    "sent twice": (DOUBLED, SEND, _send_twice),
    "adds to the step before": (DOUBLED, SEND, _send_how(False)),
    "adds to what was there": (DOUBLED, REDUCE, _adds),
    "adds to what the slot had": (DOUBLED, TARGET, _to_old),
    "gathered twice": (DOUBLED, GATHER, _gather_twice),
    "updated twice": (DOUBLED, UPDATE, _update_twice),
    "no wait": (WAIT, STREAM, _skip),
    "no record": (WAIT, RECORD, _skip),
    "not gathered": (STALE, GATHER, _skip),
    "shard not filled in": (STALE, FILL, _skip),
    "nothing issued": (STALE, ISSUE, _no_issue),
    "update not noticed": (STALE, WRITTEN, _stays),
    "gaps and unused not cleared": (STALE, CLEAR, _clears_nothing),
    "shard of the next rank": (SLICE, FILL, _of_next),
    "half of each shard gathered": (SLICE, GATHER, _gather_part),
    "gradient in another's place": (SLICE, TARGET, _target_of_another),
    "next rank's part of the copies": (SLICE, COPIES, _next_piece),
    "updated with another's gradient": (SLICE, UPDATE, _update_with_last),
    "tied copies not summed": (TIE, TIED, _skip),
    "tied copies summed twice": (TIE, TIED, _again),
    "first use of a tied parameter forgotten": (TIE, TIED_TARGET, _first_only),
}
SEAMS = tuple({way[1].name: way[1] for way in WAYS.values()}.values())

_here: dict[int, Ranks] = {}  # by world rank


def here_now() -> Ranks | None:
    return _here.get(world.current().rank)


@dataclass(frozen=True)
class Mutant:
    """way: of WAYS. key, call: of the seam's calls; EVERY call has the key."""

    seed: int
    way: str
    key: str
    call: int

    @property
    def kind(self) -> str:
        return WAYS[self.way][0]

    @property
    def setting(self) -> Setting:
        return setting(self.seed)

    def __str__(self) -> str:
        which = "each call" if self.call == EVERY else f"call {self.call}"
        seam = WAYS[self.way][1].name
        return f"{self.kind}: {self.way}, {which} of {seam} for {self.key!r} in setting {self.seed}"


class Switch:
    """A mutation as it acts on the ranks of one run. changed: how many calls it has changed."""

    def __init__(self, mutant: Mutant | None) -> None:
        self.mutant, self.changed = mutant, 0
        self.calls: Counter[tuple[str, str]] = Counter()  # of rank 0, and of others what it has not

    def begun(self, mesh: Any, model: Any, optimizer: Any) -> None:
        others = self.mutant is not None and self.mutant.kind == GROUP
        _here[world.current().rank] = Ranks(mesh, model, others)

    def wrap(self, seam: Seam, call: Callable) -> Callable:
        way = WAYS[self.mutant.way] if self.mutant is not None else None

        def mutated(*args, **kwargs):
            here = here_now()
            key = seam.key(*args, **kwargs) if here is not None else ""
            if not key:
                return call(*args, **kwargs)
            place = seam.name, key
            number = here.counts[place]
            here.counts[place] += 1
            self.calls[place] = max(self.calls[place], number + 1)
            if way is None or way[1] is not seam or key != self.mutant.key:
                return call(*args, **kwargs)
            if self.mutant.call not in (EVERY, number):
                return call(*args, **kwargs)
            result = way[2](call, here, *args, **kwargs)
            if result is UNCHANGED:
                return call(*args, **kwargs)
            self.changed += 1
            return result

        return mutated

    @contextmanager
    def on(self) -> Iterator[None]:
        _here.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(thread, "_PATIENCE", PATIENCE)
            for seam in SEAMS:
                for owner in seam.owners:
                    if seam.attribute in vars(owner):
                        patch.setattr(owner, seam.attribute, self.wrap(seam, vars(owner)[seam.attribute]))
            yield
        _here.clear()


@cache
def calls_of(seed: int) -> dict[tuple[str, str], int]:
    """How many calls of each seam there are for each key in a setting, where nothing is wrong."""
    switch = Switch(None)
    with switch.on():
        proof = proof_of(setting(seed), switch.begun)
    assert not proof.raised, proof.raised
    return dict(switch.calls)


# Settings of integers' seeds: each strategy, axis and option; without in_backward, whose updates run in a
# thread that does not know its rank.
BASES = (
    0,
    3,
    6,
    8,
    9,
    11,
    18,
    19,
    20,
    21,
    22,
    27,
    36,
    38,
    49,
    51,
    54,
    60,
    68,
    70,
    78,
    91,
    105,
    126,
    129,
    149,
    154,
    187,
    195,
)


@cache
def mutants(count: int, seed: int = 0) -> list[Mutant]:
    """As many different ones, each of which changes a call: one of each way, then a second of each, ..."""
    random, found, names = np.random.default_rng(seed), {}, list(WAYS)
    for turn in range(100 * count):
        if len(found) == count:
            break
        way = names[turn % len(names)]
        keys: list[str] = []
        for base in random.permutation(BASES).tolist():
            keys = sorted(key for name, key in calls_of(base) if name == WAYS[way][1].name)
            if keys:
                break
        key = str(random.choice(keys))
        calls = calls_of(base)[WAYS[way][1].name, key]
        mutant = Mutant(base, way, key, EVERY if random.random() < 0.4 else int(random.integers(calls)))
        if mutant not in found and _proved(mutant, 0)[1]:
            found[mutant] = None
    return list(found)


@dataclass
class Result:
    """differences: what real ranks had wrong. rank: the first in whose program something is found."""

    mutant: Mutant
    differences: list[str]
    proof: Proof
    rank: int

    @property
    def verdict(self) -> str:
        if self.proof.found_by:
            return "found" if self.differences else "found, unchanged"
        return "missed" if self.differences else "equivalent"


def result_of(mutant: Mutant) -> Result:
    switch = Switch(mutant)
    with switch.on():
        try:
            differences = truth_of(mutant.setting, switch.begun).differences()
        except Exception as error:
            differences = [f"raises {type(error).__name__}: {error}"]
    for rank in range(1 if mutant.kind == WAIT else mutant.setting.of_a_stage):
        proof = _proved(mutant, rank)[0]
        if proof.found_by and (rank == 0 or not _without(mutant.seed, rank).found_by):
            return Result(mutant, differences, proof, rank)
    return Result(mutant, differences, _proved(mutant, 0)[0], 0)


@cache
def _without(seed: int, rank: int) -> Proof:
    """What the checks say of the program of a rank where nothing is wrong."""
    return proof_of(setting(seed), rank=rank)


@lru_cache(4096)
def _proved(mutant: Mutant, rank: int) -> tuple[Proof, int]:
    """What the checks say, with races for waits, of the program of a rank; and how many calls are changed."""
    waits, changed = mutant.kind == WAIT, 0
    for like in (CPUDevice, CUDADevice) if waits else (CPUDevice,):
        switch = Switch(mutant)
        with switch.on():
            proof = proof_of(mutant.setting, switch.begun, races=waits, rank=rank, like=like)
        changed += switch.changed
        if waits:
            proof = replace(proof, findings=[])  # which do not depend on waits
        if proof.races:
            break
    return proof, changed


# Why a mutation may change nothing.
SLOT = "the slot has these values from the gather before, no op reads them, or only padding is moved"
ZEROS = "the memory that is added to has zeros still, or what is left out is zeros of an unused unit"
EQUIVALENT = {
    "no wait": "other waits order the same uses of memory",
    "no record": "the event's mark of before, or other waits, order the same uses of memory",
    "update not noticed": "the unit is not gathered when it is updated",
    "gaps and unused not cleared": "only gaps between parameters, which no update reads",
    "gathered twice": "a second gather writes what is there",
    "next rank's part of the copies": "only padding is summed in the wrong place",
    **dict.fromkeys(
        (
            "not gathered",
            "shard not filled in",
            "nothing issued",
            "shard of the next rank",
            "shard one element on",
            "half of each shard gathered",
            "gather over another axis",
            "gather over half of the ranks",
            "gather over ranks in reverse",
        ),
        SLOT,
    ),
    **dict.fromkeys(
        ("adds to what the slot had", "adds to what was there", "adds to the step before"), ZEROS
    ),
}
MEAN_OF_MEANS = "a mean over ranks that all have the mean is the mean"
UNFILLED = "it reads what nothing has filled, which held zeros; the proof knows nothing of it"
REPORTED = {
    **dict.fromkeys(("reduced twice", "sent twice"), MEAN_OF_MEANS),
    **dict.fromkeys(
        (
            "gaps and unused not cleared",
            "adds to what the slot had",
            "adds to what was there",
            "adds to the step before",
            "half of each shard gathered",
        ),
        UNFILLED,
    ),
}


def unexplained(result: Result) -> str:
    """What is wrong with the proof of a mutation; "" for nothing."""
    way, kind, found_by = result.mutant.way, result.mutant.kind, result.proof.found_by
    if result.verdict == "missed":
        return "missed"
    if result.verdict == "equivalent":
        return "" if way in EQUIVALENT else "changes nothing"
    if result.verdict == "found, unchanged" and kind != WAIT and way not in REPORTED:
        return "changes nothing, but is reported"
    by = {"races"} if kind == WAIT else {"gradients", "order", "raises"}
    return "" if by & set(found_by) else f"found by {', '.join(found_by)} alone"
