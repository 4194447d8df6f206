"""Arena: a fixed number of equal slots of memory, each with a ready-event and a free-event.

Every buffer that crosses streams comes from an arena, allocated once. A slot changes hands in stream order,
not in host order: `release` may be called while the work that reads the slot is still queued, because the
next owner's stream waits for the slot's free-event first. So the number of slots bounds the memory in
flight; `grow` adds one where a program needs more at once than was planned.
"""

from collections.abc import Callable
from typing import Any

from shardrt.device.protocol import Device, Event

Array = Any
# Gets (name, arena, slots in use) while a recording is active: timeline.py sets it.
on_change: Callable[[str, object, int], None] | None = None


class Slot:
    """One buffer. `ready` is recorded by who filled it, `free` by who has finished with it.

    arena: that lends it; None for one that is its owner's alone. views: of it, kept by who uses it again.
    """

    __slots__ = ("array", "ready", "free", "arena", "views")

    def __init__(self, array: Array, ready: Event, free: Event, arena: "Arena | None" = None) -> None:
        self.array = array
        self.ready = ready
        self.free = free
        self.arena = arena
        self.views: dict[Any, tuple[Array, ...]] = {}

    def give_back(self) -> None:
        """To the arena, as Arena.release says."""
        if self.arena is not None:
            self.arena.release(self)


class Arena:
    """`count` slots, each made by `allocate()`: a 1-D array.

    poison: whoever releases a slot fills it with NaN (fsdp's Gathers), so that a read without the right wait
    shows. Only for slots that hold nothing of value once they are released. name: for traces.
    """

    def __init__(
        self,
        device: Device,
        allocate: Callable[[], Array],
        count: int,
        poison: bool = False,
        name: str = "",
    ) -> None:
        self._device = device
        self._allocate = allocate
        self.poison = poison
        self.name = name
        self.slots: list[Slot] = []
        self._available: list[Slot] = []
        self.peak_in_use = 0
        for _ in range(count):
            self.grow()

    @property
    def in_use(self) -> int:
        """Slots lent out now."""
        return len(self.slots) - len(self._available)

    def grow(self) -> None:
        """Add a slot: for a model that really uses more units at once than was planned."""
        slot = Slot(self._allocate(), self._device.new_event(), self._device.new_event(), self)
        self._device.set_tag(slot.array, self.name, "")
        self.slots.append(slot)
        self._available.append(slot)

    def acquire(self) -> Slot | None:
        """A slot whose contents are undefined, or None if all are lent out.

        Whoever fills it makes its stream wait for `slot.free` first.
        """
        if not self._available:
            return None
        slot = self._available.pop(0)  # the one released longest ago: its free-event is the likeliest reached
        self.peak_in_use = max(self.peak_in_use, self.in_use)
        self._tell()
        return slot

    def release(self, slot: Slot) -> None:
        """Take a slot back. `slot.free` must have been recorded in the stream that used it last."""
        self._available.append(slot)
        self._tell()

    def drop(self) -> None:
        """Let go of the memory now, not when the garbage collector finds the circle of arena and slots."""
        self.slots.clear()
        self._available.clear()

    def _tell(self) -> None:
        if self.name and on_change is not None:
            on_change(self.name, self, self.in_use)
