"""Who waits for whom: the gathers, reductions and releases of all units of one model.

    forward    enter(k): wait until k is gathered, issue the gather of k+1, compute, leave(k): release k
    backward   before_backward(k): wait until k is gathered, issue k-1, compute,
               after_backward(k): release k, hand its gradients to the reduce stream

Compute is a stream, gathers are one, reductions are one, and the last two have a communicator each: in one,
every gather would queue behind a reduction. Every decision here follows from the order of the program alone,
never from how far a stream has got, so all ranks issue the same collectives in the same order.
docs/fsdp.md walks through one step.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from shardrt import autograd, random, recompute
from shardrt.autograd import Function, on_tape
from shardrt.comm.mesh import DeviceMesh
from shardrt.device import timeline
from shardrt.device.arena import Arena, Slot
from shardrt.fsdp import collectives
from shardrt.fsdp.collectives import Lanes
from shardrt.fsdp.group import Group, OpenGradient
from shardrt.fsdp.nodes import Regather, Tape, mark, recorded
from shardrt.fsdp.plan import Plan
from shardrt.fsdp.trained import Trained
from shardrt.fsdp.unit import State, Unit
from shardrt.fsdp.used import Used


class Schedule:
    """What happens when, in every step of one model, on one rank. Built by setup.build."""

    def __init__(
        self,
        mesh: DeviceMesh,
        units: list[Unit],
        prefetch: int,
        lanes: Lanes,
        make_gradient_slots: Callable[[list[Unit]], None],
    ) -> None:
        self.mesh = mesh
        self.units = units
        self.root = units[0]
        self.prefetch = prefetch
        self.lanes = lanes
        self.control = mesh.communicator("control")
        self.written = lanes.device.new_event()  # the optimizer has written the shards
        self.plan = Plan(units)
        self._make_gradient_slots = make_gradient_slots
        self._accumulates: bool | None = None  # what the slots for gradients were made for; None: not made
        self._planned = False  # the present forward began with the outermost unit
        self.tape = Tape()  # of the present forward or backward
        # What backward must come to, on ranks whose loss does not need it too. With its place in the plan: a
        # unit that this rank skipped.
        self._to_come: list[tuple[int | None, Function]] = []
        self._backward: autograd.Backward | None = None  # that has begun and not ended; it may have raised
        self._micro_batch_begun = False  # whose backward has not ended
        self._flows = False  # the unit left last in this forward has given what requires a gradient
        self._calls = 0  # uses of random numbers before the first micro-batch of the step
        self._reduced: list[Group] = []  # in the present backward
        # Units entered and not left, one inside the other, with their Unshard nodes, which nothing else may
        # hold: where the unit's own module is recomputed, no node leads to Unshard before `leave`.
        self._entered: list[tuple[Unit, object]] = []
        self._started: dict[Unit, float] = {}
        self.trained = Trained((group for unit in units for group in unit.groups), self.control)
        self._used = Used(mesh)

    # -- forward

    @property
    def depth(self) -> int:
        """How many units are entered now, one inside the other."""
        return len(self._entered)

    def enter(self, unit: Unit) -> None:
        """The forward of `unit` begins: have its parameters gathered, and the next units' on the way."""
        again = recompute.recomputing()
        if self.depth == 0 and not again:
            self._begin_forward(unit)
        if self._planned and not again:
            self._pass_by(self.plan.skip_to(unit))
            self.plan.advance(used=True)
        self.ensure(unit)
        if again:
            self._prefetch(u for u in recompute.units_again() if u.state is State.SHARDED)
        elif self._planned:
            self._prefetch(self.plan.upcoming())
        self._entered.append((unit, unit.unshard_node() if autograd.is_grad_enabled() else None))
        piece = recompute.current()
        if piece is not None:
            if not piece.units:
                self._must_come(piece)
            piece.units.append(unit)
        self._started[unit] = time.perf_counter()

    def leave(self, unit: Unit, module: object, outputs: list) -> list:
        """The forward of a module of `unit` ends: mark its outputs on the tape, release what can go."""
        again = recompute.recomputing()
        self._draw("forward", unit)
        if self._planned and not again:
            self._pass_by(self.plan.skip_out_of(unit))
        comes = bool(recorded(unit, outputs))
        if autograd.is_grad_enabled():
            comes |= unit.partly_trained  # another rank may have used more of it
            unit.needed_in_backward = self._flows = comes
        unit.kept = comes and not unit.reshard_after_forward
        then: list[Function] = [Regather(unit, self.tape)] if comes else []
        for node in then:
            self._must_come(node)
        outputs = mark(unit, outputs, then if again or self.depth > 1 else self._settle(unit))
        self._entered.pop()
        unit.modules_done.add(id(module))
        self._release_after_forward(unit)
        if self.depth == 0 and not again:
            self._drop_prefetched()
            for other in self.units:
                self._release_after_forward(other)  # some of its modules were not called
        return outputs

    def abandon(self, unit: Unit, depth: int) -> None:
        """Something raised from `enter` to `leave` of `unit`: go back to the depth that was before.

        What is around it may catch that and go on.
        """
        self._started.pop(unit, None)
        del self._entered[depth:]
        if self.depth == 0 and not recompute.recomputing():
            self._drop_prefetched()
            for other in self.units:
                if other.gathered and not other.held and other.reshard_after_backward:
                    self._release(other)

    def _begin_forward(self, unit: Unit) -> None:
        if self._backward is not None:
            self._reset()
        self._planned = unit is self.root
        self._to_come = []
        if self._planned:
            self.plan.begin()
            self.tape = Tape()
            self.mesh.part("forward")
            self._show("forward", unit)
        for other in self.units:
            other.modules_done.clear()
        self._flows = False
        if self.trained.follow(self.lanes):
            for other in self.units:
                other.needed_in_backward = None
        if autograd.is_grad_enabled() or recompute.current() is not None:
            if not self.trained.changed:
                self._have_gradient_slots()
            if self.root.turns is not None and not self._micro_batch_begun:
                self._begin_micro_batch()
        self.refresh()

    def _begin_micro_batch(self) -> None:
        """Find which of the step's micro-batches this is: dropout masks depend on that, not on ranks."""
        done = {group.reductions for unit in self.units for group in unit.groups if group.trainable} or {0}
        turn, turns = max(done), self.root.turns
        if len(done) > 1 or turn >= turns:
            raise RuntimeError(
                f"set_world_invariant: a step has {turns} backwards of {self.mesh.size} micro-batches, then "
                "zero_grad of all parameters; "
                + (
                    f"this would be one more than {turns}"
                    if len(done) == 1
                    else "it was called for some only"
                )
            )
        if turn == 0:
            self._calls = random.calls()
        random.begin_micro_batch(turn * self.mesh.size + self.mesh.rank, self._calls)
        self._micro_batch_begun = True

    def refresh(self) -> None:
        """The shards may have been written since the last gather: by the optimizer, or by a load."""
        lanes = self.lanes
        lanes.compute.record(self.written)
        lanes.gather.wait(self.written)
        if lanes.upload is not lanes.gather:
            lanes.upload.wait(self.written)
        for unit in self.units:
            if unit.stale and unit.gathered:
                self._release(unit)
            unit.stale = False
        for unit in self.units:
            if unit.held:
                self.ensure(unit)

    def readers_done(self, unit: Unit) -> None:
        """Wait until no rank reads the shard of `unit`, where ranks share memory; then it may be written.

        The reduction of its gradients has waited for that, unless the unit was used again after it.
        """
        if unit.peers_may_read:
            self.control.barrier(stream=self.lanes.compute)
            for other in self.units:
                other.peers_may_read = False

    def _pass_by(self, count: int) -> None:
        """Do for the next `count` planned units what ranks that call them do, except the computing."""
        around: list[Unit] = []
        for _ in range(count):
            unit = self.plan.order[self.plan.place]
            while around and around[-1] not in unit.ancestors:
                self._release_after_forward(around.pop())
            place = self.plan.advance(used=False)
            self.ensure(unit)
            self._prefetch(self.plan.upcoming())
            needed = autograd.is_grad_enabled() and self._needed_in_backward(unit)
            unit.kept = needed and not unit.reshard_after_forward
            if needed:
                self._must_come(Regather(unit, self.tape), place)
            unit.modules_done.update(id(module) for module in unit.modules)
            around.append(unit)
        for unit in reversed(around):
            self._release_after_forward(unit)

    def _needed_in_backward(self, unit: Unit) -> bool:
        """Whether backward comes to `unit` on ranks that use it, as far as this one knows, which skips it."""
        if unit.needed_in_backward is not None:
            return unit.needed_in_backward
        return unit.trainable or self._flows

    def _must_come(self, node: Function, place: int | None = None) -> None:
        """Have backward come to `node` on this rank, whatever its loss uses: on others it does."""
        if recompute.recomputing():
            recompute.must_come(node)
        else:
            self._to_come.append((place, node))

    def _settle(self, unit: Unit) -> list[Function]:
        """At the end of the whole forward: what backward must come to, without units that no rank used."""
        unused: set[int] = set()
        if self._planned and unit is self.root:
            unused = self.plan.settle(self.control)
        to_come, self._to_come = self._to_come, []
        return [node for place, node in to_come if place not in unused and on_tape(node)]

    def _release_after_forward(self, unit: Unit) -> None:
        if self._is_entered(unit) or not unit.gathered or unit.held or recompute.recomputing():
            return  # what a recomputation gathers, backward needs at once
        if unit.reshard_after_backward and not unit.kept and self._is_done(unit):
            self._release(unit)

    def _is_done(self, unit: Unit) -> bool:
        """Whether the present forward comes to no other module of `unit`, as far as is known."""
        if len(unit.modules_done) == len(unit.modules) or self.depth == 0:
            return True
        return self._planned and self.plan.settled and unit not in self.plan.upcoming()

    def _is_entered(self, unit: Unit) -> bool:
        return any(entered is unit for entered, _ in self._entered)

    # -- backward

    def before_backward(self, unit: Unit, tape: Tape) -> None:
        """The backward of `unit` begins: as `enter`, with the order read off the tape."""
        self._begin_backward()
        self.tape = tape
        self.ensure(unit)
        self._prefetch(self._next_in_backward(autograd.running()))
        self._started.setdefault(unit, time.perf_counter())

    def _begin_backward(self) -> None:
        run = autograd.running().outermost
        if self._backward is run:
            return
        if self._backward is not None:
            self._reset()
        self._backward = run
        self.mesh.part("backward")
        run.at_end(self._end_backward)
        if self.trained.changed:
            self._have_gradient_slots()

    def _next_in_backward(self, run: autograd.Backward) -> Iterator[Unit]:
        for node in run.upcoming((Regather, recompute.Recompute)):
            for unit in (node.unit,) if isinstance(node, Regather) else node.units:
                if unit._schedule is self:
                    yield unit

    def _have_gradient_slots(self) -> None:
        """Slots for full gradients: one for each group once some backward does not reduce, else shared."""
        accumulates, changed = not all(unit.reduces for unit in self.units), self.trained.changed
        if changed:
            self.trained.agree(self.lanes)
        if changed or self._accumulates is None or (accumulates and not self._accumulates):
            self.lanes.reduce.synchronize()  # nothing reads the slots that go
            self._make_gradient_slots(self.units)
            self._accumulates = accumulates

    def open_gradient(self, group: Group) -> OpenGradient:
        """Memory for the full gradients of `group`, which backward is about to write."""
        if self._accumulates is None or self.trained.changed:
            self._have_gradient_slots()  # an op outside every forward
        slot = self._acquire(group.arenas["gradients"])
        self.lanes.compute.wait(slot.free)  # the reduction of the group that had the slot has read it
        group.open_gradient = group.opened(slot)
        return group.open_gradient

    def discard_gradient(self, group: Group) -> None:
        """Give back the slot of gradients that are not wanted any more."""
        slot, group.open_gradient = group.open_gradient.slot, None
        self.lanes.compute.record(slot.free)
        slot.arena.release(slot)

    def after_backward(self, unit: Unit) -> None:
        """All gradients of `unit` are complete: release its parameters, reduce its gradients."""
        self._begin_backward()  # where no Regather has: no tensor was found in what forward returned
        self._draw("backward", unit)
        if unit.gathered and not self._is_entered(unit) and unit.reshard_after_backward and not unit.held:
            self._release(unit)
        for group in unit.groups:
            if not group.trainable:
                continue
            opened = group.open_gradient or self.open_gradient(group)
            if unit.reduces and (unit.turns is None or not self._comes_again(unit)):
                self._reduce(group, opened)  # a turn's gradient has one place, and so one reduction

    def _comes_again(self, unit: Unit) -> bool:
        """Whether this backward has more to come of `unit`: another forward's part of the loss."""
        return unit in self._next_in_backward(autograd.running())

    def _reduce(self, group: Group, opened: OpenGradient) -> None:
        _zero_unwritten(group, opened)
        slot, group.open_gradient = opened.slot, None
        self.lanes.compute.record(slot.ready)
        collectives.reduce(group, slot, self.lanes, opened.written)
        slot.arena.release(slot)
        group.reduction_issued()
        group.unit.peers_may_read = False  # a reduction ends when every rank has come to it
        self._reduced.append(group)
        if group.finds_unused:
            group.used = True  # the reduction tells of each parameter
        else:
            self._used.reduced(group, bool(opened.written))
        self._show("reduce", group.unit)
        if group.on_gradient is not None and group.used and not self._comes_again(group.unit):
            self._tell(group)  # in this order: what comes again is read off the whole tape that is left

    def _tell(self, group: Group) -> None:
        """Let an optimizer that updates in backward have the gradient of `group`, if it is complete."""
        if group.on_gradient is not None and group.complete:
            group.on_gradient()

    def _end_backward(self) -> None:
        self._drop_prefetched()
        for unit in self.units:
            if unit.gathered and unit.reshard_after_backward and not unit.held:
                self._release(unit)  # gathered for a node that turned out to need no gradient
            for group in unit.groups:
                if unit.reduces and group.open_gradient is not None:
                    self._reduce(group, group.open_gradient)  # accumulated before, and not used this time
                elif group.trainable and unit.turns is not None and group not in self._reduced:
                    self._reduce(group, self.open_gradient(group))  # zeros have their place too
        for group in self._used.end_backward():
            if group.on_gradient is not None and group.used:
                self._tell(group)  # it updates now what only other ranks have used
        for group in self._reduced:
            self.lanes.compute.wait(group.gradient_ready)  # the optimizer and clipping read the gradients
        self._reduced = []
        self._backward = None
        self._end_micro_batch()

    def _end_micro_batch(self) -> None:
        if self._micro_batch_begun:
            self._micro_batch_begun = False
            random.end_micro_batch()

    # -- gather and release

    def hold(self, unit: Unit) -> None:
        """Have `unit` gathered until `let_go`. Collective."""
        if self.depth == 0:
            self.refresh()
        unit.held = True
        self.ensure(unit)

    def let_go(self, unit: Unit) -> None:
        """Release `unit`, unless its forward is running."""
        unit.held = False
        if unit.gathered and not self._is_entered(unit):
            self._release(unit)

    def ensure(self, unit: Unit) -> None:
        """Whatever comes later in the compute stream finds the parameters of `unit` gathered."""
        if unit.state is State.SHARDED:
            self._gather(unit, [self._acquire(group.arenas["gathered"]) for group in unit.groups])
        unit.peers_may_read = True
        if unit.state is State.GATHERING:
            for group in unit.groups:
                self.lanes.compute.wait(group.slot.ready)  # the all-gather has filled the slot
            unit.move(State.GATHERED)

    def _prefetch(self, upcoming: Iterable[Unit]) -> None:
        """Issue the gathers of the next `prefetch` units, as far as there are slots for them."""
        for unit in _first_distinct(upcoming, self.prefetch):
            if unit.state is State.SHARDED:
                slots = _acquire_all([group.arenas["gathered"] for group in unit.groups])
                if slots is None:
                    return
                self._gather(unit, slots)

    def _gather(self, unit: Unit, slots: list[Slot]) -> None:
        for group, slot in zip(unit.groups, slots, strict=True):
            group.attach(slot)
        unit.move(State.GATHERING)  # from here on abandon and _reset find the slots
        for group, slot in zip(unit.groups, slots, strict=True):
            collectives.gather(group, slot, self.lanes)
        self._show("gather", unit)

    def _release(self, unit: Unit) -> None:
        unit.move(State.SHARDED)
        for group in unit.groups:
            slot = group.detach()
            if slot.arena.poison:
                slot.array.fill(float("nan") if slot.array.dtype.kind == "f" else -1)
            self.lanes.compute.record(slot.free)
            slot.arena.release(slot)
        self._show("release", unit)

    def _acquire(self, arena: Arena) -> Slot:
        """A slot for a unit that is needed now: a free one, one that can be given up, or a new one."""
        slot = arena.acquire()
        if slot is None:
            prefetched = [u for u in self.units if u.state is State.GATHERING and _uses(u, arena)]
            waiting = [u for u in self.units if self._only_waits(u) and _uses(u, arena)]
            if prefetched:
                self._drop(prefetched[-1])
            elif waiting:
                self._release(waiting[0])
            else:
                arena.grow()
            slot = arena.acquire()
        return slot

    def _only_waits(self, unit: Unit) -> bool:
        """Whether `unit` is gathered just because some of its modules may yet be called in this forward."""
        if not unit.gathered or self._is_entered(unit) or unit.held or autograd.running() is not None:
            return False
        return unit.reshard_after_forward and 0 < len(unit.modules_done) < len(unit.modules)

    def _drop_prefetched(self) -> None:
        for unit in self.units:
            if unit.state is State.GATHERING:
                self._drop(unit)

    def _drop(self, unit: Unit) -> None:
        """Give back the slots of a gather that nobody waited for. The gather itself still runs."""
        for group in unit.groups:
            self.lanes.compute.wait(group.slot.ready)  # the release is recorded in compute: after the gather
        self._release(unit)

    def _reset(self) -> None:
        """The last backward raised: give every slot back."""
        self._entered.clear()
        self._backward = None
        self._end_micro_batch()
        self._reduced = []
        self._used.forget()
        self.tape = Tape()
        for unit in self.units:
            unit.to_come.clear()
            if unit.state is State.GATHERING:
                self._drop(unit)
            elif unit.state is State.GATHERED:
                self._release(unit)
            for group in unit.groups:
                if group.open_gradient is not None:
                    self.discard_gradient(group)  # half written

    # -- for people

    def _draw(self, phase: str, unit: Unit) -> None:
        start = self._started.pop(unit, None)
        if start is not None:
            timeline.add(self.lanes.compute.name, f"{phase} {unit.label}", start, time.perf_counter())

    def _show(self, what: str, unit: Unit) -> None:
        """SHARDRT_DEBUG=1 prints the schedule as it runs."""
        if _DEBUG:
            # Each line in one piece: ranks may be threads.
            sys.stderr.write(f"[rank {self.mesh.rank}] {what:8} {unit.label}\n")


def _first_distinct(units: Iterable[Unit], count: int) -> Iterator[Unit]:
    seen: list[Unit] = []
    for unit in units:
        if len(seen) == count:
            return
        if unit not in seen:
            seen.append(unit)
            yield unit


def _acquire_all(arenas: list[Arena]) -> list[Slot] | None:
    """A slot of each, or None, with nothing taken, if one has none left."""
    slots: list[Slot] = []
    for arena in arenas:
        slot = arena.acquire()
        if slot is None:
            for taken in slots:
                taken.arena.put_back(taken)
            return None
        slots.append(slot)
    return slots


def _uses(unit: Unit, arena: Arena) -> bool:
    return any(group.slot.arena is arena for group in unit.groups)


def _zero_unwritten(group: Group, opened: OpenGradient) -> None:
    """Slots are reused: clear the padding, and the gradients of parameters that nothing used."""
    for start, stop in group.layout.padding if group.rows is None else group.rows.gaps:
        opened.slot.array[start:stop].fill(0)
    for position, view in opened.views.items():
        if position not in opened.written:
            view.fill(0)


_DEBUG = os.environ.get("SHARDRT_DEBUG", "0") not in ("", "0")
