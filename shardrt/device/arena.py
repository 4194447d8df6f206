"""Arena: a fixed number of equal slots of memory, each with a ready-event and a free-event.

An arena allocates its slots once, and groups take them in turn. Slots change owners in stream order, not in
host order: a caller may release a slot while work that reads it is still queued, because the next owner's
stream waits for the slot's free-event first. So the number of slots bounds the memory in use.
"""

from collections.abc import Callable
from typing import Any

from shardrt.device.protocol import Array, Device, Event

# Called with (name, arena, slots in use) while a recording is active; timeline.py sets it.
on_change: Callable[[str, object, int], None] | None = None


class Slot:
    """One buffer. The stream that fills it records `ready`; the stream that uses it last records `free`.

    arena: the arena that lends the slot; None if one owner keeps it. views: cached views of `array`.
    """

    __slots__ = ("array", "ready", "free", "arena", "views")

    def __init__(self, array: Array, ready: Event, free: Event, arena: "Arena | None" = None) -> None:
        self.array = array
        self.ready = ready
        self.free = free
        self.arena = arena
        self.views: dict[Any, tuple[Array, ...]] = {}

    def give_back(self) -> None:
        """Release this slot to its arena, if it has one (see Arena.release)."""
        if self.arena is not None:
            self.arena.release(self)


class Arena:
    """`count` slots, each made by `allocate()`: a 1-D array.

    poison: the code that releases a slot (fsdp's Gathers) fills it with NaN first, so that a read without the
    right wait shows. The contents of a released slot must be worthless. name: for traces.
    """

    def __init__(
        self,
        device: Device,
        allocate: Callable[[], Array],
        count: int,
        name: str = "",
    ) -> None:
        self._device = device
        self._allocate = allocate
        self.poison = False
        self.name = name
        self.slots: list[Slot] = []
        self._available: list[Slot] = []
        self.peak_in_use = 0
        for _ in range(count):
            self.grow()

    @property
    def in_use(self) -> int:
        """Number of slots that are lent now."""
        return len(self.slots) - len(self._available)

    def grow(self) -> None:
        """Add a slot, for a model that uses more units at once than planned."""
        slot = Slot(self._allocate(), self._device.new_event(), self._device.new_event(), self)
        self._device.set_tag(slot.array, self.name, "")
        self.slots.append(slot)
        self._available.append(slot)

    def acquire(self) -> Slot | None:
        """A slot with undefined contents, or None if all are lent.

        The caller makes the stream that fills the slot wait for `slot.free` first.
        """
        if not self._available:
            return None
        slot = self._available.pop(0)  # the first released: its free-event is most likely reached
        self.peak_in_use = max(self.peak_in_use, self.in_use)
        self._report()
        return slot

    def release(self, slot: Slot) -> None:
        """Take a slot back. The stream that used it last must have recorded `slot.free`."""
        self._available.append(slot)
        self._report()

    def drop(self) -> None:
        """Free the memory now. The cycle of arena and slots would keep it until garbage collection."""
        self.slots.clear()
        self._available.clear()

    def _report(self) -> None:
        if self.name and on_change is not None:
            on_change(self.name, self, self.in_use)
