"""Who waits for whom: the gathers, reductions and releases of all units of one model.

    forward    enter(k): wait until k is gathered, issue the gather of k+1, compute, leave(k): release k
    backward   before_backward(k): wait until k is gathered, issue k-1, compute,
               after_backward(k): release k, hand its gradients to the reduce stream

Three streams: compute (the ops), gather, reduce. The last two have a communicator each: in one, every gather
would queue behind a reduction. Every decision here follows from the order of the program alone, never from
how far a stream has got, so all ranks issue the same collectives in the same order.
docs/fsdp.md walks through one step.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from shardrt import autograd
from shardrt.comm.mesh import DeviceMesh
from shardrt.device import timeline
from shardrt.device.arena import Arena, Slot
from shardrt.fsdp.ops import Exit
from shardrt.fsdp.unit import OpenGradient, State, Unit

Array = Any

GRADIENT_SLOTS = 2  # one that backward fills while the other is reduced


class Schedule:
    """One step of one model, on one rank. Built by setup.build."""

    def __init__(self, mesh: DeviceMesh, units: list[Unit], prefetch: int) -> None:
        self.mesh = mesh
        self.rank = mesh.rank
        self.device = mesh.device
        self.units = units
        self.prefetch = prefetch
        self.compute = self.device.current_stream
        self.gather_stream = self.device.new_stream("gather")
        self.reduce_stream = self.device.new_stream("reduce")
        self.gather = mesh.communicator("gather")
        self.reduce = mesh.communicator("reduce")
        self.control = mesh.communicator("control")
        self.written = self.device.new_event()  # the optimizer has written the shards
        self.reduced = self.device.new_event()  # the last reduction of a backward
        self.order: list[Unit] = []  # units as the last forward entered them
        self.place = 0  # where the present forward stands in it
        self.drifts = 0  # forwards that left the recorded order
        self.depth = 0  # units entered and not left, one inside the other
        self._in_backward = False
        self._started: dict[Unit, float] = {}

    # -- forward

    def enter(self, unit: Unit) -> None:
        """The forward of `unit` begins: have its parameters gathered, and the next units' on the way."""
        if self.depth == 0:
            self._begin_forward()
        self.depth += 1
        unit.entered += 1
        self._follow(unit)
        self.ensure(unit)
        self._prefetch(self.order[self.place :])
        if autograd.is_grad_enabled():
            unit.unshard_node()
        self._started[unit] = time.perf_counter()

    def leave(self, unit: Unit, outputs: list) -> list:
        """The forward of `unit` ends: mark its outputs on the tape and release what backward won't need."""
        self._draw("forward", unit)
        outputs = Exit.mark(unit, outputs)
        recorded = autograd.is_grad_enabled() and any(output.requires_grad for output in outputs)
        unit.entered -= 1
        if unit.entered == 0 and (unit.reshard_after_forward or not recorded):
            self._release(unit)
        self.depth -= 1
        if self.depth == 0:
            self._drop_prefetched()
        return outputs

    def abandon(self) -> None:
        """A forward raised: forget where it was."""
        self.depth = 0
        self._reset()

    def _begin_forward(self) -> None:
        if self._in_backward:  # the last backward raised
            self._reset()
        self.place = 0
        # The shards may have been written since the last gather: by the optimizer, or by a load.
        self.compute.record(self.written)
        self.gather_stream.wait(self.written)

    def _follow(self, unit: Unit) -> None:
        """Compare with the order of the last forward; from where it differs, record anew."""
        if self.place < len(self.order) and self.order[self.place] is not unit:
            self.drifts += 1
            _log(self.rank, f"order changes at {unit.label}: was {self.order[self.place].label}")
            del self.order[self.place :]
        if self.place == len(self.order):
            self.order.append(unit)
        self.place += 1

    # -- backward

    def before_backward(self, unit: Unit) -> None:
        """The backward of `unit` begins: as `enter`, with the order read off the tape."""
        run = autograd.running()
        if not self._in_backward:
            self._in_backward = True
            run.at_end(self._end_backward)
        self.ensure(unit)
        self._prefetch(node.unit for node in run.upcoming(Exit) if node.unit._schedule is self)
        self._started.setdefault(unit, time.perf_counter())

    def open_gradient(self, unit: Unit) -> OpenGradient:
        """Memory for the full gradients of `unit`, which backward is about to write."""
        slot = self._acquire(unit.gradient_arena)
        self.compute.wait(slot.free)  # the reduction of the unit that had the slot has read it
        unit.open_gradient = OpenGradient(slot, unit.views_of(slot))
        return unit.open_gradient

    def after_backward(self, unit: Unit) -> None:
        """All gradients of `unit` are complete: release its parameters, reduce its gradients."""
        self._draw("backward", unit)
        if unit.state is State.GATHERED and unit.entered == 0:
            self._release(unit)
        unit.forget_node()
        if unit.trainable:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        opened = unit.open_gradient or self.open_gradient(unit)
        _zero_unwritten(unit, opened)
        slot, unit.open_gradient = opened.slot, None
        self.compute.record(slot.ready)
        self.reduce_stream.wait(slot.ready)  # compute has written the gradients
        self.reduce.reduce_scatter(
            unit._reduced,
            slot.array[: unit.layout.total],
            stream=self.reduce_stream,
            scale=1.0 / unit.divide_factor,
            accumulate=unit.has_gradient,
        )
        self.reduce_stream.record(slot.free)
        self.reduce_stream.record(self.reduced)
        slot.arena.release(slot)
        unit.has_gradient = True
        _log(self.rank, f"reduce   {unit.label}")

    def _end_backward(self) -> None:
        self._drop_prefetched()
        for unit in self.units:  # gathered for a node that turned out to need no gradient
            if unit.state is State.GATHERED:
                self._release(unit)
        self.compute.wait(self.reduced)  # the optimizer and clipping read the sharded gradients
        self._in_backward = False

    # -- gather and release

    @contextmanager
    def gathered(self, unit: Unit) -> Iterator[None]:
        """The whole parameters of `unit`, to be read, inside a with block outside forward. Collective."""
        if self.depth == 0:
            self._begin_forward()
        before = unit.state
        self.ensure(unit)
        try:
            yield
        finally:
            if before is State.SHARDED:
                self._release(unit)

    def ensure(self, unit: Unit) -> None:
        """Have the parameters of `unit` gathered, as far as the compute stream is concerned."""
        if unit.state is State.SHARDED:
            self._gather(unit, self._acquire(unit.parameter_arena))
        if unit.state is State.GATHERING:
            self.compute.wait(unit.slot.ready)  # the all-gather has filled the slot
            unit.move(State.GATHERED)

    def _prefetch(self, upcoming: Iterable[Unit]) -> None:
        """Issue the gathers of the next `prefetch` units, as far as there are slots for them."""
        for unit in _first_distinct(upcoming, self.prefetch):
            if unit.state is State.SHARDED:
                slot = unit.parameter_arena.acquire()
                if slot is None:
                    return
                self._gather(unit, slot)

    def _gather(self, unit: Unit, slot: Slot) -> None:
        unit.move(State.GATHERING)
        unit.attach(slot)
        layout, stream = unit.layout, self.gather_stream
        stream.wait(slot.free)  # compute has finished with the unit that had the slot
        start, stop = layout.shard_range(self.rank)
        own = slot.array[start:stop]
        if not unit.shard_in_slot:
            stream.submit(self.device.copy, own, unit._shard, label="")
        self.gather.all_gather(slot.array[: layout.total], stream=stream)
        stream.record(slot.ready)
        _log(self.rank, f"gather   {unit.label}")

    def _release(self, unit: Unit) -> None:
        unit.move(State.SHARDED)
        slot = unit.detach()
        if slot.arena.poison:
            slot.array.fill(float("nan"))
        self.compute.record(slot.free)
        slot.arena.release(slot)
        _log(self.rank, f"release  {unit.label}")

    def _acquire(self, arena: Arena) -> Slot:
        """A slot for a unit that is needed now: a free one, one of an unused prefetch, or a new one."""
        slot = arena.acquire()
        if slot is None:
            prefetched = [u for u in self.units if u.state is State.GATHERING and u.slot.arena is arena]
            if prefetched:
                self._drop(prefetched[-1])
            else:
                arena.grow()
            slot = arena.acquire()
        return slot

    def _drop_prefetched(self) -> None:
        for unit in self.units:
            if unit.state is State.GATHERING:
                self._drop(unit)

    def _drop(self, unit: Unit) -> None:
        """Give back the slot of a gather that nobody waited for. The gather itself still runs."""
        self.compute.wait(unit.slot.ready)  # the release below is recorded in compute: after the gather
        self._release(unit)

    def _reset(self) -> None:
        """After an error: give every slot back."""
        self._in_backward = False
        for unit in self.units:
            unit.entered = 0
            unit.forget_node()
            if unit.state is State.GATHERING:
                self._drop(unit)
            elif unit.state is State.GATHERED:
                self._release(unit)
            if unit.open_gradient is not None:
                slot, unit.open_gradient = unit.open_gradient.slot, None
                self.compute.record(slot.free)
                slot.arena.release(slot)

    # -- for people

    def _draw(self, phase: str, unit: Unit) -> None:
        start = self._started.pop(unit, None)
        if start is not None:
            timeline.add(self.compute.name, f"{phase} {unit.label}", start, time.perf_counter())


def _first_distinct(units: Iterable[Unit], count: int) -> Iterator[Unit]:
    seen: list[Unit] = []
    for unit in units:
        if len(seen) == count:
            return
        if unit not in seen:
            seen.append(unit)
            yield unit


def _zero_unwritten(unit: Unit, opened: OpenGradient) -> None:
    """Slots are reused: clear the padding, and the gradients of parameters that nothing used."""
    for start, stop in unit.layout.padding:
        opened.slot.array[start:stop].fill(0)
    for position, view in enumerate(opened.views):
        if position not in opened.written:
            view.fill(0)


_DEBUG = os.environ.get("SHARDRT_DEBUG", "0") not in ("", "0")


def _log(rank: int, text: str) -> None:
    """SHARDRT_DEBUG=1 prints the schedule as it runs."""
    if _DEBUG:
        print(f"[rank {rank}] {text}", file=sys.stderr, flush=True)
