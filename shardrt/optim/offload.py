"""Updates in streams of their own: of arrays on the host, piece by piece, or while backward still runs.

    upload    host -> staging slot        of chunk i + 1
    optimizer the kernel, on the slot     of chunk i
    download  staging slot -> host        of chunk i - 1; then to its file, where the host array is one

Only arrays on the host are staged, the others are used where they are. With offloaded.step "host" nothing is
staged and the host's kernels run. Results are bitwise identical in all cases. docs/howto/fit_in_memory.md has
the costs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import numpy as np

from shardrt.device import Array, Device, Event, Stream, host
from shardrt.device.arena import Arena, Slot
from shardrt.nn.storage import Offloaded
from shardrt.optim.slices import Slice, Update

CHUNK = 1 << 20  # elements that are staged at a time; 4 MiB of float32 per array saturate a link
SLOTS = 2  # one that is copied while the other is used
_ALIGNMENT = 16  # elements: every array in a slot begins a cache line


def slot_bytes(count: int, itemsize: int, offloaded: Offloaded, states: float) -> int:
    """Bytes that one staging slot needs for a shard of `count` elements with `states` state arrays.

    One in half as many bytes counts as half an array.
    """
    if offloaded.step == "host":
        return 0
    staged = offloaded.parameters + offloaded.gradients + states * offloaded.optimizer_state
    return int(staged * _capacity(count) * itemsize)


def _capacity(count: int) -> int:
    """Elements that a slot has per array."""
    return -(-min(CHUNK, count) // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Route:
    """How the updates of one storage go."""

    kernels: ModuleType
    stream: Stream  # that the kernel runs in
    staged: tuple[str, ...]  # arrays that are copied to the device
    mapped: tuple[str, ...]  # arrays that are memory-mapped files
    updated: Event  # the last update is complete, in host memory too

    @property
    def chunked(self) -> bool:
        """Whether an update is made piece by piece."""
        return bool(self.staged or self.mapped)


Kernel = Callable[[ModuleType, Update], None]


class Updates:
    """Issues the updates of one optimizer; `wait` makes the compute stream wait for them.

    Staging memory, `staging_bytes`, is taken here once: SLOTS slots for the largest chunk of all `slices`.

    Raises:
        ValueError: for a storage with step "host" of which something is on the device.
    """

    def __init__(self, here: Device, slices: list[Slice]) -> None:
        self.device = here
        self._issued = here.new_event()  # compute has issued the work before the update
        self._streams = {
            step: self._device_of(step).new_stream("optimizer")
            for step in sorted({piece.storage.offloaded.step for piece in slices})
        }
        self._routes = {piece: self._route(piece) for piece in slices}
        self._pending: list[Route] = []
        if any(route.chunked for route in self._routes.values()):
            self._upload = here.new_stream("optimizer upload")
            self._download = here.new_stream("optimizer download")
            nbytes = max(_bytes_of_slot(piece) for piece in slices)
            allocate = partial(here.buffer, nbytes // 4, np.float32)
            self.staging = Arena(here, allocate, SLOTS, name="staging of the optimizer")
            self.staging_bytes = SLOTS * nbytes
        else:
            self.staging_bytes = 0

    def issue(self, piece: Slice, update: Update, kernel: Kernel) -> None:
        """Issue `kernel(kernels, update)`, after the gradient and all that compute has issued so far."""
        route = self._routes[piece]
        self.device.current_stream.record(self._issued)
        for stream in (self._upload, route.stream) if route.staged else (route.stream,):
            stream.wait(self._issued)  # a load may have written the shard, clipping the gradient
            stream.wait(route.updated)  # the update before has been written back
            if piece.storage.gradient_ready is not None:
                stream.wait(piece.storage.gradient_ready)  # backward may still be reducing it
        last = self._issue_chunks(piece, route, update, kernel) if route.chunked else route.stream
        if not route.chunked:
            route.stream.submit(kernel, route.kernels, update, label=f"update {piece.name}")
        last.record(route.updated)
        self._pending.append(route)

    def wait(self) -> None:
        """Let nothing in the compute stream run before all updates issued so far are complete."""
        for route in self._pending:
            self.device.current_stream.wait(route.updated)
        self._pending.clear()

    def _issue_chunks(self, piece: Slice, route: Route, update: Update, kernel: Kernel) -> Stream:
        """Gives the stream that works on a chunk last."""
        last = route.stream
        for start in range(update.start, update.stop, CHUNK):
            part = update.part(start, min(start + CHUNK, update.stop))
            if len(part.ranges):
                slot = self.staging.acquire()
                last = self._issue_chunk(piece, route, slot, part, kernel)
                if self.staging.poison:
                    last.submit(slot.array.fill, float("nan"))
                last.record(slot.free)
                self.staging.release(slot)
        return last

    def _issue_chunk(self, piece: Slice, route: Route, slot: Slot, part: Update, kernel: Kernel) -> Stream:
        staged = _views(slot.array, part, route.staged)
        first = self._upload if staged else route.stream
        first.wait(slot.free)  # the chunk that had the slot is back on the host, and in its file
        if staged:
            pairs = [(view, part.arrays[name]) for name, view in staged.items()]
            self._upload.submit(self._copy, pairs, label=f"upload {piece.name}")
            self._upload.record(slot.ready)
            route.stream.wait(slot.ready)  # the chunk has come from the host
        route.stream.submit(kernel, route.kernels, part.on(staged), label=f"update {piece.name}")
        back = [(part.arrays[name], view) for name, view in staged.items() if name != "gradient"]
        if not back and not route.mapped:
            return route.stream
        route.stream.record(slot.ready)
        self._download.wait(slot.ready)  # the chunk is updated
        if back:
            self._download.submit(self._copy, back, label=f"download {piece.name}")
        if route.mapped:
            self._download.submit(_spill, part, route.mapped, label=f"write {piece.name}")
        return self._download

    def _copy(self, pairs: list[tuple[Array, Array]]) -> None:
        for target, source in pairs:
            self.device.copy(target, source)

    def _device_of(self, step: str) -> Device:
        return self.device.host if step == "host" else self.device

    def _route(self, piece: Slice) -> Route:
        offloaded, on_host = piece.storage.offloaded, _on_host(piece)
        if offloaded.step == "host":
            _check_all_on_host(piece)
        where = self._device_of(offloaded.step)
        return Route(
            kernels=where.kernels,
            stream=self._streams[offloaded.step],
            staged=on_host if offloaded.step == "device" else (),
            mapped=on_host if offloaded.directory is not None else (),
            updated=where.new_event(),
        )


def _on_host(piece: Slice) -> tuple[str, ...]:
    offloaded = piece.storage.offloaded
    return (
        *(("shard",) if offloaded.parameters else ()),
        *(("gradient",) if offloaded.gradients else ()),
        *(piece.state if offloaded.optimizer_state else ()),
    )


def _bytes_of_slot(piece: Slice) -> int:
    shard = piece.storage.shard
    states = sum(array.itemsize for array in piece.state.values()) / shard.itemsize
    return slot_bytes(shard.size, shard.dtype.itemsize, piece.storage.offloaded, states)


def _check_all_on_host(piece: Slice) -> None:
    offloaded = piece.storage.offloaded
    missing = [
        name for name in ("parameters", "gradients", "optimizer_state") if not getattr(offloaded, name)
    ]
    if missing:
        raise ValueError(
            f"optimizer: the storage of {piece.name!r} has step='host', but {' and '.join(missing)} on the "
            "device; put all three on the host, or choose step='device'"
        )


def _views(slot: Array, part: Update, names: tuple[str, ...]) -> dict[str, Array]:
    """Where in a slot the staged arrays of a chunk go, one after the other."""
    views, first = {}, 0
    for name in names:
        array = part.arrays[name]
        views[name] = slot.view(np.uint8)[first : first + array.nbytes].view(array.dtype)
        first += _capacity(array.size) * array.itemsize
    return views


def _spill(part: Update, names: tuple[str, ...]) -> None:
    """Of a gradient only the pages are dropped: the next one overwrites it, no need to have it on disk."""
    for name in names:
        (host.drop if name == "gradient" else host.write_out)(part.arrays[name])
