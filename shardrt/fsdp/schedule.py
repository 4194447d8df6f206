"""Schedule: when each unit of one model is gathered, released and reduced.

    forward    enter(k): wait for the gather of k, issue the gather of k+1, compute, leave(k): release k
    backward   before_backward(k): wait for the gather of k, issue the gather of k-1, compute,
               after_backward(k): release k; complete(k): hand the gradients of k to the reduce stream

There are three streams: compute, gather and reduce (and two more with offload). Gather and reduce have a
communicator each: on a shared one, every gather would queue behind a reduction. All decisions follow from the
order of the program, never from the progress of a stream. So all ranks issue the same collectives in the same
order.
docs/learn/one_step.md walks through one step. This file drives backward; forward.py, gathers.py and
gradients.py have the rest.

A backward with `deferred` has two halves, and other forwards and backwards may run in between. Parameters are
needed until the first half ends; gradients are complete when the second half ends. Therefore the schedule
does not assume that one backward runs at a time. `Unit.pending` has the nodes that are still to be reduced,
and the open gradient paths of the groups have the gradients written so far.
"""

from collections.abc import Callable, Iterator

from shardrt import autograd
from shardrt.comm.ranks import Mesh
from shardrt.fsdp import trainable
from shardrt.fsdp.forward import ForwardPass
from shardrt.fsdp.gathers import Gathers
from shardrt.fsdp.gradients import Gradients
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.nodes import ForwardRecord, PreBackward
from shardrt.fsdp.observers import OBSERVERS, ScheduleObserver
from shardrt.fsdp.plan import Plan
from shardrt.fsdp.streams import Streams
from shardrt.fsdp.unit import State, Unit, root_of


class Schedule:
    """The schedule of one model on one rank. Built by setup.build.

    UnitBoundary calls it around each forward, the nodes of nodes.py in backward, groups by group.Runtime.
    """

    def __init__(
        self,
        mesh: Mesh,
        units: list[Unit],
        prefetch: int,
        streams: Streams,
        make_gradient_slots: Callable[[list[Unit], bool], None],
    ) -> None:
        self.mesh = mesh
        self.units = units
        self.root_unit = root_of(units)
        self.prefetch = prefetch
        self.streams = streams
        self.control = mesh.communicator("control")
        makers = (*OBSERVERS, *self.root_unit.observers)
        self.observers: list[ScheduleObserver] = [make(self) for make in makers]
        self.plan = Plan(units)
        self.trained = trainable.active(units, self.control)
        self.gathers = Gathers(units, prefetch, streams, self.control, self.observers)
        self.gradients = Gradients(mesh, units, streams, self.trained, make_gradient_slots)
        self.forward = ForwardPass(self.plan, self.gathers, self.observers, self._new_record)
        self._begun: list[autograd.Backward] = []  # in their first or second half; one may have raised
        self._resets = 0  # how often a raised backward was discarded

    def _new_record(self) -> ForwardRecord:
        return ForwardRecord(self.before_backward, self.after_backward, self.complete)

    # -- forward

    def enter(self, unit: Unit) -> None:
        """Begin the forward of a module of `unit`; `forward.leave` or `forward.abandon` ends it."""
        if self.forward.depth == 0 and autograd.in_second_run() is None:
            self._begin_forward(unit)
        self.forward.enter(unit)

    def _begin_forward(self, unit: Unit) -> None:
        self._reset()
        self.forward.begin(unit)
        # The set of trained parameters decides what is sent, so take it over before anything is issued.
        if self.trained.follow(self.streams):
            self.forward.trained_changed()
        # The first run of a recomputed module records nothing, but backward will follow it.
        if autograd.is_grad_enabled() or autograd.in_first_run() is not None:
            # If the trained parameters changed, wait with new slots until backward: only then is it known
            # that every rank made the same change (options/trained.py).
            if not self.trained.changed:
                self.gradients.have_slots()
            for observer in self.observers:
                observer.recording_begins()
        self.gathers.refresh()

    # -- backward

    def before_backward(self, unit: Unit, record: ForwardRecord) -> None:
        """Begin the backward of a call of `unit`: as `enter`, but the tape gives the order of units."""
        self._begin_backward()
        self.forward.record = record
        self.gathers.ensure(unit)
        self.gathers.prefetch(self._upcoming())
        for observer in self.observers:
            observer.before_backward(unit)

    def after_backward(self, unit: Unit) -> None:
        """Release the parameters of `unit`, which backward has used for the last time."""
        self._begin_backward()  # no PreBackward did so if forward returned no tensor of the tape
        for observer in self.observers:
            observer.after_backward(unit)
        if unit.gathered and unit not in self.forward.entered:
            self.gathers.finish(unit, unit.state_after(needed=False, done=True))

    def complete(self, unit: Unit) -> None:
        """Reduce the gradients of `unit`, which are complete, unless no_sync or a fixed tree defers that."""
        self._begin_backward()
        for group in unit.groups:
            if not group.trainable:
                continue
            if not group.has_unreduced_gradient:
                self.gradients.open(group)
            # A fixed tree (options/fixed_tree.py) has one place for each micro-batch's gradient, so that must
            # be reduced once: wait until the last forward in this backward has added its part.
            waits = group.sharded_gradient.fixed_tree and self._comes_again(unit)
            if unit.choices.reduces and not waits:
                self._reduce(unit, group)

    def _begin_backward(self) -> None:
        """Register the running backward at the first event of each of its halves."""
        run = autograd.running().outermost
        if run in self._begun:
            return
        self._reset()
        self._begun.append(run)
        self.gathers.follow_writes(self.forward.entered)
        for observer in self.observers:
            observer.backward_begins()
        if run.second_half:
            return
        run.after_nodes(self._end_nodes)
        run.at_end(self._end_backward)
        autograd.call_or_defer(self._begin_second_half, self._resets)  # at once unless deferred
        if run.deferred is not None or self.trained.changed:
            self.gradients.have_slots(own_slots=run.deferred is not None)

    def _begin_second_half(self, resets: int) -> tuple:
        """Raise RuntimeError if gradients were discarded since the first half, when _resets was `resets`."""
        self._begin_backward()
        if resets != self._resets:
            raise RuntimeError(
                "flush: another backward has raised since, which discarded the gradients of this one; "
                "run forward and backward again"
            )
        return ()

    def _upcoming(self) -> Iterator[Unit]:
        """The units that backward will come to, one for each call; other models' units are left out."""
        for node in autograd.running().upcoming((PreBackward, autograd.Segment)):
            for unit in (node.unit,) if isinstance(node, PreBackward) else node.units:
                if unit.schedule is self:
                    yield unit

    def _comes_again(self, unit: Unit) -> bool:
        """Whether this backward will come to `unit` again, since another forward contributes to the loss."""
        run = autograd.running().outermost
        return any(node.run is run for node in unit.pending) or unit in self._upcoming()

    def _reduce(self, unit: Unit, group: ParameterGroup) -> None:
        self.gradients.reduce(group)
        self.gathers.reduction_issued(unit)
        for observer in self.observers:
            observer.reduce(unit)
        # _comes_again may look through all nodes that are left, so it is tested last.
        if group.on_gradient is None or not group.sharded_gradient.wait_whether_written():
            return
        if not self._comes_again(unit):
            self.gradients.notify_optimizer(group)

    def _end_nodes(self) -> None:
        """Release units that are not kept: this backward reads no parameters any more."""
        self.gathers.drop_prefetched()
        # A unit is still gathered if it was gathered for a node that then received no gradient.
        self.gathers.finish_all(self.forward.entered, also_kept=True)
        run = autograd.running()
        if run.deferred is not None:
            self._begun.remove(run)

    def _end_backward(self) -> None:
        """Reduce the groups that are left: all gradients of this backward are complete."""
        self.gathers.finish_all(self.forward.entered)  # deferred calls may have gathered units
        for unit in self.units:
            for group in self.gradients.left_out(unit):
                if not group.has_unreduced_gradient:
                    self.gradients.open(group)
                self._reduce(unit, group)
        self.gradients.end_backward()
        self._begun.remove(autograd.running())
        for observer in self.observers:
            observer.backward_ends()

    def _reset(self) -> None:
        """Before a new pass: if a backward has raised, discard unreduced gradients, give slots back."""
        if all(run.busy for run in self._begun):
            return
        self._begun = [run for run in self._begun if run.busy]
        self._resets += 1
        self.forward.reset()
        for observer in self.observers:
            observer.backward_ends()
        for unit in self.units:
            unit.pending.clear()
        self.gathers.reset()
        self.gradients.reset()

    # -- for groups

    def post_backward_node(self, group: ParameterGroup) -> autograd.Function:
        return self.forward.record.post_backward(group.unit)

    def ensure_readable(self, group: ParameterGroup) -> bool:
        """Whether ops may read the gathered parameters now. In backward, gather them if nothing has."""
        unit = group.unit
        if autograd.running() is not None:
            if not unit.gathered:
                self.gathers.ensure(unit)  # an op of backward reads the parameter, but no PreBackward ran
            return True
        if not unit.gathered:
            return False
        return self.forward.depth > 0 or (unit.choices.kept_unsharded and unit.state is not State.STALE)

    def open_gradient(self, group: ParameterGroup) -> None:
        self.gradients.open(group)

    def readers_done(self, group: ParameterGroup) -> None:
        self.gathers.readers_done(group.unit)

    def shards_written(self, group: ParameterGroup) -> None:
        self.gathers.shards_written(group.unit)

    def awaits_backward(self, group: ParameterGroup) -> bool:
        return bool(group.unit.pending)
