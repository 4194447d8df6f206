"""Gathers and releases the parameters of units, and moves them from state to state.

Forward and backward say which unit is needed now, and which will be. All that is decided here follows from
the order of those calls: never from how far a stream has got, which differs between ranks.
"""

from collections.abc import Collection, Iterable

from shardrt.comm.protocol import Communicator
from shardrt.device.arena import Arena, Slot
from shardrt.fsdp.observers import ScheduleObserver
from shardrt.fsdp.sharded_gradient import Streams
from shardrt.fsdp.unit import State, Unit


class Gathers:
    """The units of one schedule, and the slots that they are gathered in."""

    def __init__(
        self,
        units: list[Unit],
        prefetch: int,
        streams: Streams,
        control: Communicator,
        observers: list[ScheduleObserver],
    ) -> None:
        self.units = units
        self.ahead = prefetch
        self.streams = streams
        self.control = control
        self._observers = observers
        self._shards_ready = streams.device.new_event()  # the optimizer has written the shards
        self._peers_may_read: set[Unit] = set()  # where ranks share memory: since its last reduction

    def ensure(self, unit: Unit) -> None:
        """Whatever comes later in the compute stream finds the parameters of `unit` gathered."""
        # Three steps, of which a unit that was prefetched, or is kept, needs only the later ones.
        if unit.state is State.SHARDED:
            self._gather(unit, [self._acquire(group.arenas["gathered"]) for group in unit.groups])
        self._peers_may_read.add(unit)
        if unit.state is State.GATHERING:
            for group in unit.groups:
                self.streams.compute.wait(group.slot.ready)  # the all-gather has filled the slot
        if unit.state not in (State.IN_USE, State.STALE):
            unit.move(State.IN_USE)

    def prefetch(self, upcoming: Iterable[Unit]) -> None:
        """Issue the gathers of the next `depth` units, as far as there are slots for them."""
        seen: list[Unit] = []
        for unit in upcoming:  # which looks no further than it is asked
            if len(seen) == self.ahead:
                return
            if unit in seen:
                continue
            seen.append(unit)
            if unit.state is State.SHARDED:
                arenas = [group.arenas["gathered"] for group in unit.groups]  # each another
                if any(arena.in_use == len(arena.slots) for arena in arenas):
                    return
                self._gather(unit, [arena.acquire() for arena in arenas])

    def finish(self, unit: Unit, state: State) -> None:
        """A pass through `unit` has ended: release it, or leave it gathered in this state."""
        if state is State.SHARDED:
            self._release(unit)
        elif unit.state not in (state, State.STALE):
            unit.move(state)

    def finish_all(self, entered: Collection[Unit] = (), also_kept: bool = False) -> None:
        """A pass has ended: release what it gathered, but for `entered`. also_kept: also units in KEPT."""
        for unit in self.units:
            ends = unit.gathered if also_kept else unit.state in (State.IN_USE, State.WAITING)
            if ends and unit not in entered:
                self.finish(unit, unit.state_after(needed=False, done=True))

    def refresh(self) -> None:
        """The shards may have been written since the last gather: by the optimizer, or by a load."""
        streams = self.streams
        streams.compute.record(self._shards_ready)
        streams.gather.wait(self._shards_ready)
        if streams.upload is not streams.gather:
            streams.upload.wait(self._shards_ready)
        for unit in self.units:
            if unit.state is State.STALE:
                self._release(unit)
        for unit in self.units:
            if unit.choices.held:
                self.ensure(unit)
                self.finish(unit, State.KEPT)

    def shards_written(self, unit: Unit) -> None:
        """The shards of `unit` have new values."""
        if unit.state is State.GATHERING:
            self._drop(unit)
        elif unit.gathered and unit.state is not State.STALE:
            unit.move(State.STALE)

    def reduction_issued(self, unit: Unit) -> None:
        """A reduction of `unit` was issued, which ends when every rank has come to it and read the shards."""
        self._peers_may_read.discard(unit)

    def readers_done(self, unit: Unit) -> None:
        """Wait until no rank reads the shard of `unit`, where ranks share memory; then it may be written.

        The reduction of its gradients has waited for that, unless the unit was used again after it.
        """
        if unit in self._peers_may_read:
            self.control.barrier(stream=self.streams.compute)
            self._peers_may_read.clear()

    def drop_prefetched(self) -> None:
        """Give back the slots of gathers that nobody has waited for."""
        for unit in self.units:
            if unit.state is State.GATHERING:
                self._drop(unit)

    def reset(self) -> None:
        """A pass has raised: give every slot back."""
        self.drop_prefetched()
        for unit in self.units:
            if unit.gathered:
                self._release(unit)

    def _gather(self, unit: Unit, slots: list[Slot]) -> None:
        for group, slot in zip(unit.groups, slots, strict=True):
            group.attach(slot)
        unit.move(State.GATHERING)  # from here on `drop_prefetched` finds the slots, whatever is raised
        try:
            for group, slot in zip(unit.groups, slots, strict=True):
                group.transfer(group, slot, self.streams)
        except BaseException:
            for slot in slots:
                self.streams.gather.record(slot.ready)  # what was issued so far may still write it
            raise
        for observer in self._observers:
            observer.gather(unit)

    def _release(self, unit: Unit) -> None:
        unit.move(State.SHARDED)
        for group in unit.groups:
            slot = group.detach()
            if slot.arena.poison:
                group.copy_is_fresh = False
                slot.array.fill(float("nan") if slot.array.dtype.kind == "f" else -1)
            self.streams.compute.record(slot.free)
            slot.arena.release(slot)
        for observer in self._observers:
            observer.release(unit)

    def _drop(self, unit: Unit) -> None:
        """Give back the slots of a gather that nobody waited for. The gather itself still runs."""
        for group in unit.groups:
            # The release is recorded in compute, so it comes after the gather.
            self.streams.compute.wait(group.slot.ready)
        self._release(unit)

    def _acquire(self, arena: Arena) -> Slot:
        """A slot for a unit that is needed now: a free one, one that can be taken away, or a new one."""
        slot = arena.acquire()
        if slot is None:
            holders = [u for u in self.units if any(g.slot and g.slot.arena is arena for g in u.groups)]
            prefetched = [unit for unit in holders if unit.state is State.GATHERING]
            waiting = [unit for unit in holders if unit.state is State.WAITING]
            if prefetched:
                self._drop(prefetched[-1])  # it is needed last
            elif waiting:
                self._release(waiting[0])
            else:
                arena.grow()
            slot = arena.acquire()
        return slot
