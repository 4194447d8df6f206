"""Gathers: issues all-gathers of units, releases units, and changes their states.

Forward and backward ask for the unit that is needed now and name the units that come next. All decisions
follow from the order of these calls. They never depend on the progress of a stream, which differs between
ranks: ranks would then issue different collectives.
"""

from collections.abc import Collection, Iterable

from shardrt.comm.protocol import Communicator
from shardrt.device.arena import Arena, Slot
from shardrt.fsdp.observers import ScheduleObserver
from shardrt.fsdp.streams import Streams
from shardrt.fsdp.unit import State, Unit


class Gathers:
    """The units of one schedule and the slots that hold their gathered parameters."""

    def __init__(
        self,
        units: list[Unit],
        prefetch: int,
        streams: Streams,
        control: Communicator,
        observers: list[ScheduleObserver],
    ) -> None:
        self.units = units
        self.prefetch_count = prefetch
        self.streams = streams
        self.control = control
        self._observers = observers
        self._shards_ready = streams.device.new_event()  # recorded in compute after writes to shards
        self.written = True  # shards have been written since gathers last waited for compute
        # Units gathered since their last reduction: where ranks share memory, peers may still read shards.
        self._peers_may_read: set[Unit] = set()

    def ensure(self, unit: Unit) -> None:
        """Gather `unit` if necessary; later work in the compute stream may read its parameters."""
        # A prefetched unit needs only the wait; a kept unit needs only the change of state.
        if unit.state is State.SHARDED:
            self._gather(unit, [self._acquire(group.arenas["gathered"]) for group in unit.groups])
        self._peers_may_read.add(unit)
        if unit.state is State.GATHERING:
            for group in unit.groups:
                self.streams.compute.wait(group.slot.ready)  # the all-gather has filled the slot
        if unit.state not in (State.IN_USE, State.STALE):  # backward of a kept loss reads the old values
            unit.move(State.IN_USE)

    def prefetch(self, upcoming: Iterable[Unit]) -> None:
        """Issue the gathers of the next `prefetch_count` units, until an arena has no free slot."""
        seen: list[Unit] = []
        for unit in upcoming:  # may be a lazy search of the tape: stop as soon as enough units are found
            if len(seen) == self.prefetch_count:
                return
            if unit in seen:
                continue
            seen.append(unit)
            if unit.state is State.SHARDED:
                arenas = [group.arenas["gathered"] for group in unit.groups]  # all different
                if any(arena.in_use == len(arena.slots) for arena in arenas):
                    return
                self._gather(unit, [arena.acquire() for arena in arenas])

    def finish(self, unit: Unit, state: State) -> None:
        """End a pass through `unit`: release it (SHARDED), or leave it gathered in this state."""
        if state is State.SHARDED:
            self._release(unit)
        elif unit.state not in (state, State.STALE):
            unit.move(state)

    def finish_all(self, entered: Collection[Unit] = (), also_kept: bool = False) -> None:
        """End a pass: release the units it gathered, except `entered`. also_kept: units in KEPT, too."""
        for unit in self.units:
            ends = unit.gathered if also_kept else unit.state in (State.IN_USE, State.WAITING)
            if ends and unit not in entered:
                self.finish(unit, unit.state_after(needed=False, done=True))

    def refresh(self) -> None:
        """Before a forward: let later gathers read the shards as they are now.

        Out-of-date units are released, and units that the user holds are gathered again.
        """
        self._await_writes()
        for unit in self.units:
            if unit.state is State.STALE:
                self._release(unit)
        for unit in self.units:
            if unit.choices.kept_unsharded:
                self.ensure(unit)
                self.finish(unit, State.KEPT)

    def follow_writes(self, entered: Collection[Unit]) -> None:
        """Before a backward whose forward came before an update: let its gathers wait for the update.

        Units that kept the values of their forward keep them. Where a shared slot is the shard itself, it has
        the new values: release it, so that the next gather waits for the updates of the other ranks.
        """
        if not self.written:
            return
        self._await_writes()
        for unit in self.units:
            is_shard = any(g.memory.slot_shared and g.memory.shard_in_slot for g in unit.groups)
            if unit.state is State.STALE and is_shard and unit not in entered:
                self._release(unit)

    def _await_writes(self) -> None:
        """Let gather and upload wait for compute, where the optimizer or a load has written shards."""
        streams = self.streams
        streams.compute.record(self._shards_ready)
        streams.gather.wait(self._shards_ready)
        if streams.upload is not streams.gather:
            streams.upload.wait(self._shards_ready)
        self.written = False

    def shards_written(self, unit: Unit) -> None:
        """Mark gathered parameters of `unit` as out of date: its shards have new values."""
        self.written = True
        if unit.state is State.GATHERING:
            self._drop(unit)
        elif unit.gathered and unit.state is not State.STALE:
            unit.move(State.STALE)

    def reduction_issued(self, unit: Unit) -> None:
        """Note that a reduction of `unit` was issued. It ends after every rank has read the shards.

        A unit that the user holds (unshard) stays readable, so its readers may come later.
        """
        if not unit.choices.kept_unsharded:
            self._peers_may_read.discard(unit)

    def readers_done(self, unit: Unit) -> None:
        """Wait until no rank reads this rank's shard of `unit`, where ranks share memory, before a write.

        The last reduction of the unit's gradients was such a wait: every rank entered it after its reads. A
        barrier is only needed if the unit was gathered again since.
        """
        if unit in self._peers_may_read:
            self.control.barrier(stream=self.streams.compute)
            self._peers_may_read.clear()

    def drop_prefetched(self) -> None:
        """Give back the slots of prefetched units that were not used."""
        for unit in self.units:
            if unit.state is State.GATHERING:
                self._drop(unit)

    def reset(self) -> None:
        """Give every slot back, after a pass has raised."""
        self.drop_prefetched()
        for unit in self.units:
            if unit.gathered:
                self._release(unit)

    def _gather(self, unit: Unit, slots: list[Slot]) -> None:
        for group, slot in zip(unit.groups, slots, strict=True):
            group.attach(slot)
        unit.move(State.GATHERING)  # so that `drop_prefetched` finds the slots if a transfer raises
        try:
            for group, slot in zip(unit.groups, slots, strict=True):
                group.transfer.issue(slot, self.streams)
        except BaseException:
            for slot in slots:
                self.streams.gather.record(slot.ready)  # transfers issued before the error may still write it
            raise
        for observer in self._observers:
            observer.gather(unit)

    def _release(self, unit: Unit) -> None:
        """Give back the slots of a gathered unit. The next gather into a slot waits for `slot.free`."""
        unit.move(State.SHARDED)
        for group in unit.groups:
            slot = group.detach()
            if slot.arena.poison:
                group.transfer.slot_overwritten()
                slot.array.fill(float("nan") if slot.array.dtype.kind == "f" else -1)
            self.streams.compute.record(slot.free)  # behind compute's last read of the slot
            slot.arena.release(slot)
        for observer in self._observers:
            observer.release(unit)

    def _drop(self, unit: Unit) -> None:
        """Give back the slots of a gather that compute has not waited for, and that may still run."""
        for group in unit.groups:
            # Compute reads nothing. The wait puts slot.free, which _release records, after the gather.
            self.streams.compute.wait(group.slot.ready)
        self._release(unit)

    def _acquire(self, arena: Arena) -> Slot:
        """A slot for a unit that is needed now: a free slot, one taken from another unit, or a new one."""
        slot = arena.acquire()
        if slot is None:
            holders = [u for u in self.units if any(g.slot and g.slot.arena is arena for g in u.groups)]
            prefetched = [unit for unit in holders if unit.state is State.GATHERING]
            waiting = [unit for unit in holders if unit.state is State.WAITING]
            if prefetched:
                self._drop(prefetched[-1])  # in a forward, the one that is needed last
            elif waiting:
                self._release(waiting[0])
            else:
                arena.grow()
            slot = arena.acquire()
        return slot
