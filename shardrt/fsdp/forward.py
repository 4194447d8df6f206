"""ForwardPass: the forward of a model, unit by unit.

It asks Gathers for each unit before the unit runs, marks the unit's outputs on the tape, and releases the
unit afterwards. It also joins the collectives of units that this rank skips but other ranks may use.
"""

from collections import defaultdict
from collections.abc import Callable

from shardrt import autograd
from shardrt.autograd import Function, on_tape
from shardrt.fsdp.gathers import Gathers
from shardrt.fsdp.nodes import ForwardRecord, PreBackward, mark, recorded
from shardrt.fsdp.observers import ScheduleObserver
from shardrt.fsdp.plan import Plan, Replay, Route
from shardrt.fsdp.unit import Unit, root_of


class ForwardPass:
    """The position of the present forward, and the tape that it leaves for backward."""

    def __init__(
        self,
        plan: Plan,
        gathers: Gathers,
        observers: list[ScheduleObserver],
        new_record: Callable[[], ForwardRecord],
    ) -> None:
        self._plan = plan
        self._gathers = gathers
        self._observers = observers
        self._new_record = new_record
        self.record = new_record()  # of the present forward or backward
        self._route = Route()  # the order of units that the present forward follows
        # The units entered and not left, outermost first, each with its PostBackward node. The ForwardRecord
        # refers to PostBackward weakly. This reference keeps the node alive until `leave`.
        self._entered: list[tuple[Unit, object]] = []
        self._done: defaultdict[Unit, set[int]] = defaultdict(set)  # ids of modules whose forward ended
        # Whether backward comes to the unit, as the last recorded forward has shown. Cleared when other
        # parameters are trained.
        self._needed: dict[Unit, bool] = {}

    @property
    def depth(self) -> int:
        """Number of units that are entered now, one inside the other."""
        return len(self._entered)

    @property
    def entered(self) -> list[Unit]:
        """The units entered now, outermost first."""
        return [unit for unit, _ in self._entered]

    def begin(self, unit: Unit) -> None:
        """Begin a forward with `unit`. It follows the plan only if `unit` is the outermost unit."""
        self._done.clear()
        self._route = Route()
        if unit is root_of(self._plan.units):
            self._route = self._plan
            self._plan.begin()
            self.record = self._new_record()
            for observer in self._observers:
                observer.forward_begins(unit)

    def trained_changed(self) -> None:
        """Forget which units backward comes to: other parameters are trained now."""
        self._needed.clear()

    def reset(self) -> None:
        """Discard the state of a pass that has raised."""
        self._entered.clear()
        self.record = self._new_record()

    def _present_route(self) -> Route:
        segment = autograd.in_second_run()
        return self._route if segment is None else Replay(segment)

    def enter(self, unit: Unit) -> None:
        """Begin the forward of `unit`: wait for its parameters and issue the gathers of the next units."""
        route = self._present_route()
        self._gather_skipped(route.skip_to(unit))
        route.advance(visited=True)
        self._gathers.ensure(unit)
        self._gathers.prefetch(route.upcoming())
        self._entered.append((unit, self.record.post_backward(unit) if autograd.is_grad_enabled() else None))
        segment = autograd.in_first_run()
        if segment is not None:
            if not segment.units:
                route.nodes.append(segment)
            segment.units.append(unit)
        for observer in self._observers:
            observer.enter(unit)

    def leave(self, unit: Unit, module: object, outputs: list) -> list:
        """End the forward of a module of `unit`: mark its outputs on the tape, release it if allowed."""
        route = self._present_route()
        for observer in self._observers:
            observer.leave(unit)
        self._gather_skipped(route.skip_out_of(unit))
        needed = bool(recorded(unit, outputs))
        if autograd.is_grad_enabled():
            needed |= unit.partly_trained  # another rank may have used trained parameters of it
            self._needed[unit] = route.gives_gradients = needed
        then = [PreBackward(unit, self.record)] if needed else []
        route.nodes += then
        ends = self.depth == 1 and not route.replay  # the whole forward: its Exit runs every PreBackward
        outputs = mark(unit, outputs, self._what_backward_needs() if ends else then)
        self._entered.pop()
        self._done[unit].add(id(module))
        if route.replay:
            return outputs  # stay gathered: backward of the recomputed ops follows at once
        self._finish(unit, needed)
        if self.depth == 0:
            self._gathers.drop_prefetched()
            self._gathers.finish_all()  # some modules were not called
        return outputs

    def abandon(self, unit: Unit, depth: int) -> None:
        """Go back to `depth` after an exception between `enter` and `leave` of `unit`.

        A caller may catch the exception and continue the forward.
        """
        for observer in self._observers:
            observer.raised(unit)
        del self._entered[depth:]
        if self.depth == 0 and autograd.in_second_run() is None:
            self._gathers.drop_prefetched()
            self._gathers.finish_all(also_kept=True)

    def _gather_skipped(self, count: int) -> None:
        """Gather and release the next `count` planned units, which this rank's forward has passed over.

        Another rank may call them, and their collectives need every rank. This rank issues them here, in the
        planned order. At the end of forward it would be too late: the other ranks would wait in the first
        collective until then.
        """
        outer: list[tuple[Unit, int, object]] = []  # (unit, place, PostBackward) around the next unit
        for _ in range(count):
            unit = self._plan.order[self._plan.place]
            while outer and outer[-1][0] not in unit.ancestors:
                self._leave_skipped(*outer.pop())
            self._gathers.ensure(unit)
            node = self.record.post_backward(unit) if autograd.is_grad_enabled() else None
            outer.append((unit, self._plan.advance(visited=False), node))
            self._gathers.prefetch(self._plan.upcoming())
        while outer:
            self._leave_skipped(*outer.pop())

    def _leave_skipped(self, unit: Unit, place: int, _: object) -> None:
        """End a skipped call of `unit` after those of the units inside: backward begins with `unit`."""
        needed = autograd.is_grad_enabled() and self._is_needed(unit)
        if needed:
            self._route.nodes.append(PreBackward(unit, self.record, skipped=place))
        self._done[unit].update(id(module) for module in unit.modules)
        self._finish(unit, needed)

    def _what_backward_needs(self) -> list[Function]:
        """At the end of the whole forward: the nodes that backward must run, without units no rank used."""
        unused = self._route.agree(self._gathers.control)
        nodes, self._route.nodes = self._route.nodes, []
        struck = {node for node in nodes if isinstance(node, PreBackward) and node.skipped in unused}
        return [node for node in nodes if node not in struck and on_tape(node)]

    def _is_needed(self, unit: Unit) -> bool:
        """Whether backward comes to `unit` on ranks that use it, judged by this rank, which skips it."""
        return self._needed.get(unit, unit.trainable or self._route.gives_gradients)

    def _finish(self, unit: Unit, needed: bool) -> None:
        """After a call of `unit` that ran or was skipped: release the unit, or leave it gathered."""
        if unit.gathered and unit not in self.entered:
            all_called = len(self._done[unit]) == len(unit.modules)
            last = self._route.agreed and unit not in self._route.upcoming()
            done = all_called or self.depth == 0 or last
            self._gathers.finish(unit, unit.state_after(needed=needed, done=done))
