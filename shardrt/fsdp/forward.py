"""The forward of a model, unit by unit: what is gathered when, what is left on the tape, what can go."""

from collections import defaultdict
from collections.abc import Callable

from shardrt import autograd
from shardrt.autograd import Function, on_tape
from shardrt.fsdp.gathers import Gathers
from shardrt.fsdp.nodes import Regather, Tape, mark, recorded
from shardrt.fsdp.observers import ScheduleObserver
from shardrt.fsdp.plan import Plan, Replay, Route
from shardrt.fsdp.unit import Unit


class ForwardPass:
    """Where the present forward is, and what the last ones have left for backward."""

    def __init__(
        self,
        plan: Plan,
        gathers: Gathers,
        observers: list[ScheduleObserver],
        new_tape: Callable[[], Tape],
    ) -> None:
        self._plan = plan
        self._gathers = gathers
        self._observers = observers
        self._new_tape = new_tape
        self.tape = new_tape()  # of the present forward or backward
        self._route = Route()  # what the present forward follows
        # Units entered and not left, one inside the other, with their Unshard nodes, which nothing else may
        # hold: where the unit's own module is recomputed, no node leads to Unshard before `leave`.
        self._entered: list[tuple[Unit, object]] = []
        self._done: defaultdict[Unit, set[int]] = defaultdict(set)  # its modules whose forward has ended
        # Whether the last forward that was recorded left the unit work, as it is trained now:
        self._needed: dict[Unit, bool] = {}

    @property
    def depth(self) -> int:
        """How many units are entered now, one inside the other."""
        return len(self._entered)

    @property
    def entered(self) -> list[Unit]:
        """Those units."""
        return [unit for unit, _ in self._entered]

    def begin(self, unit: Unit) -> None:
        """The first unit of a forward is about to be entered. Only from the outermost one is there a plan."""
        self._done.clear()
        self._route = Route()
        if unit is self._plan.units[0]:
            self._route = self._plan
            self._plan.begin()
            self.tape = self._new_tape()
            for observer in self._observers:
                observer.forward_begins(unit)

    def trained_anew(self) -> None:
        """Other parameters are trained than before."""
        self._needed.clear()

    def reset(self) -> None:
        """A pass has raised, and nobody goes on with it."""
        self._entered.clear()
        self.tape = self._new_tape()

    def _present_route(self) -> Route:
        segment = autograd.in_second_run()
        return self._route if segment is None else Replay(segment)

    def enter(self, unit: Unit) -> None:
        """The forward of `unit` begins: have its parameters gathered, and the next units' on the way."""
        route = self._present_route()
        self._skip(route.skip_to(unit))
        route.advance(visited=True)
        self._gathers.ensure(unit)
        self._gathers.prefetch(route.upcoming())
        self._entered.append((unit, self.tape.unshard(unit) if autograd.is_grad_enabled() else None))
        segment = autograd.in_first_run()
        if segment is not None:
            if not segment.units:
                route.nodes.append(segment)
            segment.units.append(unit)
        for observer in self._observers:
            observer.enter(unit)

    def leave(self, unit: Unit, module: object, outputs: list) -> list:
        """The forward of a module of `unit` ends: mark its outputs on the tape, release what can go."""
        route = self._present_route()
        for observer in self._observers:
            observer.leave(unit)
        self._skip(route.skip_out_of(unit))
        needed = bool(recorded(unit, outputs))
        if autograd.is_grad_enabled():
            needed |= unit.partly_trained  # another rank may have used more of it
            self._needed[unit] = route.gives_gradients = needed
        then = [Regather(unit, self.tape)] if needed else []
        route.nodes += then
        ends = self.depth == 1 and not route.replay  # the whole forward
        outputs = mark(unit, outputs, self._what_backward_needs() if ends else then)
        self._entered.pop()
        self._done[unit].add(id(module))
        if route.replay:
            return outputs  # what a recomputation gathers, backward needs at once
        self._finish(unit, needed)
        if self.depth == 0:
            self._gathers.drop_prefetched()
            self._gathers.finish_all()  # some modules were not called
        return outputs

    def abandon(self, unit: Unit, depth: int) -> None:
        """Something raised from `enter` to `leave` of `unit`: go back to the depth that was before.

        What is around it may catch that and go on.
        """
        for observer in self._observers:
            observer.raised(unit)
        del self._entered[depth:]
        if self.depth == 0 and autograd.in_second_run() is None:
            self._gathers.drop_prefetched()
            self._gathers.finish_all(also_kept=True)

    def _skip(self, count: int) -> None:
        """Do for the next `count` planned units what ranks that call them do, except the computing.

        Their collectives need every rank. A rank that only learned at the end of forward which units it has
        not used would have to gather them all then, while the others wait for it in the first of them.
        """
        around: list[tuple[Unit, bool]] = []
        for _ in range(count):
            unit = self._plan.order[self._plan.place]
            while around and around[-1][0] not in unit.ancestors:
                self._finish(*around.pop())
            place = self._plan.advance(visited=False)
            self._gathers.ensure(unit)
            self._gathers.prefetch(self._plan.upcoming())
            needed = autograd.is_grad_enabled() and self._is_needed(unit)
            if needed:
                self._route.nodes.append(Regather(unit, self.tape, skipped=place))
            self._done[unit].update(id(module) for module in unit.modules)
            around.append((unit, needed))
        for unit, needed in reversed(around):
            self._finish(unit, needed)

    def _what_backward_needs(self) -> list[Function]:
        """At the end of the whole forward: what backward must come to, without units that no rank used."""
        unused = self._route.agree(self._gathers.control)
        nodes, self._route.nodes = self._route.nodes, []
        struck = {node for node in nodes if isinstance(node, Regather) and node.skipped in unused}
        return [node for node in nodes if node not in struck and on_tape(node)]

    def _is_needed(self, unit: Unit) -> bool:
        """Whether backward comes to `unit` on ranks that use it, as far as this one knows, which skips it."""
        return self._needed.get(unit, unit.trainable or self._route.gives_gradients)

    def _finish(self, unit: Unit, needed: bool) -> None:
        """A call of `unit` has ended, or was skipped."""
        if unit.gathered and unit not in self.entered:
            all_called = len(self._done[unit]) == len(unit.modules)
            last = self._route.agreed and unit not in self._route.upcoming()
            done = all_called or self.depth == 0 or last
            self._gathers.finish(unit, unit.state_after(needed=needed, done=done))
