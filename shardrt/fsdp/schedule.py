"""Who waits for whom: the gathers, reductions and releases of all units of one model.

    forward    enter(k): wait until k is gathered, issue the gather of k+1, compute, leave(k): release k
    backward   before_backward(k): wait until k is gathered, issue k-1, compute,
               after_backward(k): release k; complete(k): hand its gradients to the reduce stream

Compute is a stream, gathers are one, reductions are one, and the last two have a communicator each: in one,
every gather would queue behind a reduction. Every decision here follows from the order of the program alone,
never from how far a stream has got, so all ranks issue the same collectives in the same order.
docs/fsdp.md walks through one step. Backward is here; the other parts are forward, gathers and gradients.

A backward with `late` has two halves, with other forwards and backwards in between: values are needed until
the first one ends, gradients are complete when the second one does. So there is nothing here of one backward
alone: what waits to be reduced is in `Unit.pending`, and what it has written in the groups' open gradients.
"""

from collections.abc import Callable, Iterator

from shardrt import autograd
from shardrt.comm.mesh import DeviceMesh
from shardrt.fsdp.forward import ForwardPass
from shardrt.fsdp.gathers import Gathers
from shardrt.fsdp.gradients import Gradients
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.nodes import Regather, Tape
from shardrt.fsdp.observers import ScheduleObserver, StepTrace
from shardrt.fsdp.plan import Plan
from shardrt.fsdp.sharded_gradient import Streams
from shardrt.fsdp.trained import Trained
from shardrt.fsdp.unit import State, Unit


class Schedule:
    """What happens when, in every step of one model, on one rank. Built by setup.build.

    Modules call it when a forward begins, nodes of the tape in backward, groups as group.Runtime says.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        units: list[Unit],
        prefetch: int,
        streams: Streams,
        make_gradient_slots: Callable[[list[Unit], bool], None],
    ) -> None:
        self.mesh = mesh
        self.units = units
        self.root = units[0]
        self.prefetch = prefetch
        self.streams = streams
        self.control = mesh.communicator("control")
        self.observers: list[ScheduleObserver] = [StepTrace(mesh, streams.compute.name)]
        self.observers += [make(self) for make in self.root.observers]
        self.plan = Plan(units)
        self.trained = Trained(units, self.control)
        self.gathers = Gathers(units, prefetch, streams, self.control, self.observers)
        self.gradients = Gradients(mesh, units, streams, self.trained, make_gradient_slots)
        self.forward = ForwardPass(self.plan, self.gathers, self.observers, self._new_tape)
        self._begun: list[autograd.Backward] = []  # whose present half has not ended; it may have raised
        self._resets = 0

    def _new_tape(self) -> Tape:
        return Tape(self.before_backward, self.after_backward, self.complete)

    # -- forward

    def enter(self, unit: Unit) -> None:
        """The forward of a module of `unit` begins; `forward.leave` or `forward.abandon` ends it."""
        if self.forward.depth == 0 and autograd.in_second_run() is None:
            self._begin_forward(unit)
        self.forward.enter(unit)

    def _begin_forward(self, unit: Unit) -> None:
        self._reset()
        self.forward.begin(unit)
        # What is trained decides what is gathered and sent, so it is fixed before anything is.
        if self.trained.follow(self.streams):
            self.forward.trained_anew()
        # A recomputed module records nothing now, but will in backward.
        if autograd.is_grad_enabled() or autograd.in_first_run() is not None:
            # After a change of what is trained, not before backward: then all are known to have made it.
            if not self.trained.changed:
                self.gradients.have_slots()
            for observer in self.observers:
                observer.recording_begins()
        self.gathers.refresh()

    def hold(self, unit: Unit) -> None:
        """Have `unit` gathered until `let_go`. Collective."""
        if self.forward.depth == 0:
            self.gathers.refresh()
        unit.choices.held = True
        self.gathers.ensure(unit)
        if unit not in self.forward.entered:
            self.gathers.finish(unit, State.KEPT)

    def let_go(self, unit: Unit) -> None:
        """Release `unit`, unless its forward is running."""
        unit.choices.held = False
        if unit.gathered and unit not in self.forward.entered:
            self.gathers.finish(unit, State.SHARDED)

    # -- backward

    def before_backward(self, unit: Unit, tape: Tape) -> None:
        """The backward of a call of `unit` begins: as `enter`, with the order read off the tape."""
        self._begin_backward()
        self.forward.tape = tape
        self.gathers.ensure(unit)
        self.gathers.prefetch(self._upcoming())
        for observer in self.observers:
            observer.before_backward(unit)

    def after_backward(self, unit: Unit) -> None:
        """Backward has used the parameters of `unit`: release them."""
        self._begin_backward()  # where no Regather has: no tensor was found in what forward returned
        for observer in self.observers:
            observer.after_backward(unit)
        if unit.gathered and unit not in self.forward.entered:
            self.gathers.finish(unit, unit.state_after(needed=False, done=True))

    def complete(self, unit: Unit) -> None:
        """All gradients of `unit` are complete: reduce them, if its choice is that now."""
        self._begin_backward()
        for group in unit.groups:
            if not group.trainable:
                continue
            if not group.accumulates:
                self.gradients.open(group)
            # In a fixed tree, the gradient of a micro-batch has one place, and so one reduction.
            waits = group.sharded_gradient.fixed_tree and self._comes_again(unit)
            if unit.choices.reduces and not waits:
                self._reduce(unit, group)

    def _begin_backward(self) -> None:
        """Take note of the backward that runs, at the first that its present half has for us."""
        run = autograd.running().outermost
        if run in self._begun:
            return
        self._reset()
        self._begun.append(run)
        for observer in self.observers:
            observer.backward_begins()
        if run.second_half:
            return
        run.after_nodes(self._end_nodes)
        run.at_end(self._end_backward)
        autograd.later(self._begin_second_half, self._resets)
        if run.late is not None or self.trained.changed:
            self.gradients.have_slots(of_their_own=run.late is not None)

    def _begin_second_half(self, resets: int) -> tuple:
        """resets: as many as there were at the beginning of the first."""
        self._begin_backward()
        if resets != self._resets:
            raise RuntimeError(
                "late.run: another backward has raised since, and the gradients that were there are "
                "discarded; run forward and backward again"
            )
        return ()

    def _upcoming(self) -> Iterator[Unit]:
        """The units to come in backward, one for each call, without those of other models on the tape."""
        for node in autograd.running().upcoming((Regather, autograd.Segment)):
            for unit in (node.unit,) if isinstance(node, Regather) else node.units:
                if unit.schedule is self:
                    yield unit

    def _comes_again(self, unit: Unit) -> bool:
        """Whether this backward has more to come of `unit`: another forward's part of the loss."""
        run = autograd.running().outermost
        return any(node.run is run for node in unit.pending) or unit in self._upcoming()

    def _reduce(self, unit: Unit, group: ParameterGroup) -> None:
        self.gradients.reduce(group)
        self.gathers.reduction_issued(unit)
        for observer in self.observers:
            observer.reduce(unit)
        # What comes again is asked last: it is read off the whole tape that is left.
        if group.on_gradient is None or not group.sharded_gradient.any_rank_wrote_gradient():
            return
        if not self._comes_again(unit):
            self.gradients.tell_optimizer(group)

    def _end_nodes(self) -> None:
        """This backward needs no parameters any more."""
        self.gathers.drop_prefetched()
        # Some units were gathered for a node that turned out to need no gradient.
        self.gathers.finish_all(self.forward.entered, also_kept=True)
        run = autograd.running()
        if run.late is not None:
            self._begun.remove(run)

    def _end_backward(self) -> None:
        """All gradients of this backward are complete."""
        self.gathers.finish_all(self.forward.entered)  # something that was put off has read a parameter
        for unit in self.units:
            for group in self.gradients.left_out(unit):
                if not group.accumulates:
                    self.gradients.open(group)
                self._reduce(unit, group)
        self.gradients.end_backward()
        self._begun.remove(autograd.running())
        for observer in self.observers:
            observer.backward_ends()

    def _reset(self) -> None:
        """A new pass begins. If a backward has raised: give every slot back."""
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

    def unshard_node(self, group: ParameterGroup) -> autograd.Function:
        return self.forward.tape.unshard(group.unit)

    def readable(self, group: ParameterGroup) -> bool:
        unit = group.unit
        if autograd.running() is not None:
            if not unit.gathered:
                self.gathers.ensure(unit)  # an op of backward needs it although no Regather ran
            return True
        if not unit.gathered:
            return False
        return self.forward.depth > 0 or (unit.choices.held and unit.state is not State.STALE)

    def open_gradient(self, group: ParameterGroup) -> None:
        self.gradients.open(group)

    def readers_done(self, group: ParameterGroup) -> None:
        self.gathers.readers_done(group.unit)

    def shards_written(self, group: ParameterGroup) -> None:
        self.gathers.shards_written(group.unit)

    def awaits_backward(self, group: ParameterGroup) -> bool:
        return bool(group.unit.pending)
