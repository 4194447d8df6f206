"""Communicators of ranks that have one GPU each, over NCCL by cupy.cuda.nccl.

There are two reductions. "nccl": NCCL's own reduce-scatter and all-reduce. It is one call for any number of
ranks and needs no memory. NCCL sums in its own order, and in the type that it sends. "tree": ranks exchange
slices (grouped sends and receives, the bytes of a ring's reduce-scatter), and our kernel sums them by the
fixed tree over ranks. So it is bitwise identical to every other backend, and sums 16-bit types in float32.
Its calls and memory grow with the number of ranks (docs/explanation/gpu.md).

Never run on a GPU yet (docs/reference/limits.md); tests/softgpu runs it on the real CuPy over a GPU emulator.
"""

import ctypes
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import numpy as np

from shardrt.comm import counts, nccl_watchdog, supervision
from shardrt.comm import world as worlds
from shardrt.comm.checks import address
from shardrt.comm.protocol import Communicator
from shardrt.comm.reduction import Reduction, combine
from shardrt.comm.transport import Transport
from shardrt.device import Device

__all__ = ["NCCLCommunicator", "TYPES", "a_gpu_for_each"]

Array = Any

# NCCL's numbers (nccl.h)
TYPES = {"uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
TYPES["uint16"] = 6  # bits without arithmetic travel as float16
_UNHANDLED_CUDA_ERROR, _IN_PROGRESS = 1, 7
_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3}

# Words of NCCL's last warning if a GPU is full: from CUDA, or later from NCCL's src/include/alloc.h.
_FULL = "out of memory", "Failed to CUDA"
_PATIENCE = 60.0  # seconds in which all communicators must end
# Transports of ranks that are processes, in the order of all ranks. Destroying one is collective, so it must
# not depend on a rank's garbage collection.
_open: "dict[NCCLTransport, None]" = {}
_warned: "weakref.WeakSet[worlds.World]" = (
    weakref.WeakSet()
)  # runs that have had the warning about shared GPUs


@cache
def _library() -> ctypes.CDLL:
    """The NCCL library that CuPy has loaded."""
    library = ctypes.CDLL("libnccl.so.2")
    library.ncclGetLastError.restype = ctypes.c_char_p
    return library


def _lack(error: Exception, gpu: int) -> str:
    """The error message if NCCL has failed because the GPU is full; else "".

    NCCL has one status for all failed CUDA calls. Only the text of its last warning names the call.
    """
    from cupy.cuda import runtime

    if error.status != _UNHANDLED_CUDA_ERROR:
        return ""
    try:
        warning = _library().ncclGetLastError(None).decode(errors="replace")
        free, _ = runtime.memGetInfo()
    except (OSError, RuntimeError):  # another NCCL; a GPU on which a kernel has failed
        return ""
    full = any(words in warning for words in _FULL)
    return f"no room for NCCL on GPU {gpu}: {warning}, and {free} bytes are free" if full else ""


def _takes_memory(call: Callable) -> Callable:
    """Let `call` raise MemoryError if the GPU has no room for NCCL, which allocates at first calls, too."""

    @wraps(call)
    def checked(self: "NCCLTransport", *args: Any) -> Any:
        try:
            return call(self, *args)
        except self.nccl.NcclError as error:
            lack = _lack(error, self._device.index)
            if not lack:
                raise
            raise MemoryError(lack) from error

    return checked


class NCCLTransport(Transport):
    """The NCCL transport of one stream.

    Making one is collective: rank 0 broadcasts its id over `host`.

    Args:
        host: a communicator over the same ranks, used only here.
    """

    def __init__(self, host: Communicator, device: Device) -> None:
        from cupy.cuda import nccl, runtime

        if not nccl.available:
            wheel = f"nvidia-nccl-cu{runtime.runtimeGetVersion() // 1000}"
            raise RuntimeError(f"communicator 'nccl': CuPy finds no NCCL: pip install '{wheel}>=2.27.7'")
        self.nccl = nccl
        self.role = host.role
        self._device = device
        self._graphs: weakref.WeakSet = weakref.WeakSet()  # captured graphs with its calls
        self._life = threading.Lock()  # of `comm`: the watchdog asks it while another thread destroys it
        self.rank, self.world_rank = host.rank, worlds.current().rank
        self._size = host.size
        key = host.all_gather_bytes(bytes(nccl.get_unique_id()) if host.rank == 0 else b"")[0]
        device.empty_cache()  # NCCL takes memory of its own, now and at its first calls
        self.comm = self._create(key)
        self._closed = False
        if worlds.current().kind == "mpi":  # threads share the collector, and NCCL waits for none of them
            _open[self] = None
        nccl_watchdog.watch(self)

    @_takes_memory
    def _create(self, key: bytes) -> Any:
        return self.nccl.NcclCommunicator(self._size, key, self.rank)

    @property
    def _stream(self) -> int:
        graph = self._device.capturing
        if graph is not None:
            self._graphs.add(graph)
        return self._device.stream_here()

    @_takes_memory
    def gather(self, buffer: Array) -> None:
        n, place = buffer.size // self._size, buffer.data.ptr
        own = place + self.rank * n * buffer.itemsize
        self.comm.allGather(own, place, n, TYPES[buffer.dtype.name], self._stream)

    @_takes_memory
    def reduce_scatter(self, output: Array, buffer: Array, op: str, kind: str) -> None:
        places = buffer.data.ptr, output.data.ptr
        self.comm.reduceScatter(*places, output.size, TYPES[kind], _OPS[op], self._stream)

    @_takes_memory
    def all_reduce(self, buffer: Array, op: str) -> None:
        place = buffer.data.ptr
        self.comm.allReduce(place, place, buffer.size, TYPES[buffer.dtype.name], _OPS[op], self._stream)

    @_takes_memory
    def broadcast(self, buffer: Array, root: int) -> None:
        place = buffer.data.ptr
        self.comm.broadcast(place, place, buffer.size, TYPES[buffer.dtype.name], root, self._stream)

    @_takes_memory
    def send(self, buffer: Array, peer: int) -> None:
        self.comm.send(buffer.data.ptr, buffer.size, TYPES[buffer.dtype.name], peer, self._stream)

    @_takes_memory
    def recv(self, buffer: Array, peer: int) -> None:
        self.comm.recv(buffer.data.ptr, buffer.size, TYPES[buffer.dtype.name], peer, self._stream)

    @_takes_memory
    def exchange(self, output: Array, buffer: Array, to: int, source: int) -> None:
        self.nccl.groupStart()  # neither waits for the other
        try:
            self.send(buffer, to)
            self.recv(output, source)
        finally:
            self.nccl.groupEnd()

    @_takes_memory
    def swap(self, output: Array, buffer: Array, received: Sequence[slice], sent: Sequence[slice]) -> None:
        """Send and receive in one group, without messages for empty parts."""
        kind, calls = TYPES[buffer.dtype.name], []
        for call, array, parts in ((self.comm.send, buffer, sent), (self.comm.recv, output, received)):
            calls += [(call, array, peer, part) for peer, part in enumerate(parts)]
        self.nccl.groupStart()
        try:
            for call, array, peer, part in calls:
                n = part.stop - part.start
                if n:
                    place = array.data.ptr + part.start * array.itemsize
                    call(place, n, kind, peer, self._stream)
        finally:
            self.nccl.groupEnd()

    def error(self) -> str:
        """An error of NCCL's own threads (a lost peer or cable), which no other call reports; or ""."""
        if not self._life.acquire(blocking=False):
            return ""  # it is being closed
        try:
            if not self._closed:
                self.comm.check_async_error()
        except Exception as error:  # NcclError; KeyError for a status of which CuPy has no name
            return "" if error.args == (_IN_PROGRESS,) else f"{type(error).__name__}: {error}"
        finally:
            self._life.release()
        return ""

    def abort(self) -> None:
        self._end(self.comm.abort)

    def close(self) -> None:
        """Destroy the communicator explicitly: NCCL's own clean-up must not run after MPI's."""
        self._end(self.comm.destroy)

    def _end(self, how: Callable[[], None]) -> None:
        for graph in list(self._graphs):
            graph.release()  # NCCL would wait forever for a graph with its calls
        with self._life:
            self._closed = True
            how()
        _open.pop(self, None)


@supervision.after_all_programs
def _close_all() -> None:
    """Close all transports before MPI ends, and before Python destroys them in another order."""
    words = f"NCCL has not destroyed its communicators in {_PATIENCE:g} s, though all programs have ended"
    with supervision.supervisor.within(_PATIENCE if _open else 0, words):
        for transport in list(_open):
            transport.close()


class NCCLCommunicator(Communicator):
    """Takes ownership of `host`, a communicator over the same ranks, used for set-up.

    Args:
        reduction: "nccl" or "tree" (see above).
        transport: makes the transport from (host, device); None: the world's transport, else NCCL.
    """

    keeps_host = False

    def __init__(
        self,
        host: Communicator,
        device: Device,
        reduction: str = "nccl",
        transport: Callable[[Communicator, Device], Transport] | None = None,
    ) -> None:
        self.reduction = reduction
        self.rank = host.rank
        self.size = host.size
        self._host = host
        self._device = device
        self._scratch = device.buffer(0, np.uint8)
        self._make_transport = transport or worlds.current().transport or NCCLTransport
        self._transport = self._make_transport(host, device)

    def _over(self, host: Communicator) -> "NCCLCommunicator":
        return NCCLCommunicator(host, self._device, self.reduction, self._make_transport)

    def split(self, color: int | None, key: int) -> "NCCLCommunicator | None":
        host = self._host.split(color, key)
        return None if host is None else self._over(host)

    def duplicate(self) -> "NCCLCommunicator":
        return self._over(self._host.duplicate())

    def allocate(self, count: int, dtype: Any, *, shared: bool) -> Array:
        return self._device.buffer(count, dtype)

    def scratch(self, call: str, nbytes: int, output: int = 0, *, allocated: bool = True) -> tuple[int, int]:
        return (nbytes if self.reduction == "tree" and call == "reduce_scatter" else 0), 0

    def reserve(self, on_device: int, on_host: int) -> None:
        if on_device > self._scratch.size:
            self._scratch = None  # not both at once
            self._scratch = self._device.buffer(on_device, np.uint8)

    def abandon(self) -> None:
        self._transport.abort()
        self._host.abandon()

    def close(self) -> None:
        """Collective."""
        self._transport.close()
        self._host.close()

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self._host._all_gather_bytes(data)

    def _all_gather(self, buffer: Array, tag: str) -> None:
        self._transport.gather(buffer)

    def _reduce_scatter(self, output: Array, buffer: Array, how: Reduction, tag: str) -> None:
        n = output.size
        own = buffer[self.rank * n : (self.rank + 1) * n]
        if self._by_tree(how.op, buffer) or (how.accumulate and address(own) == address(output)):
            received = self._space(buffer)
            self._swap(received, buffer, None, None)
            parts = [received[r * n : (r + 1) * n] for r in range(self.size)]
            combine(output, parts, *how)
            return
        # A result that needs scaling or adding goes to this rank's slice of `buffer` first, without scratch.
        total = own if how.kind or how.accumulate else output
        self._transport.reduce_scatter(total, buffer, how.op, how.kind or buffer.dtype.name)
        if total is own or how.scale != 1.0:  # not NCCL's mean: sums in the switch lack it
            combine(output, [total], *how)

    def _all_reduce(self, buffer: Array, op: str, tag: str) -> None:
        if self._by_tree(op, buffer):
            super()._all_reduce(buffer, op, tag)
        else:
            self._transport.all_reduce(buffer, op)

    def _by_tree(self, op: str, buffer: Array) -> bool:
        """Whether our kernels combine the numbers. NCCL's "max" and "min" of floats would lose nan."""
        return self.reduction == "tree" or (op in ("max", "min") and buffer.dtype.kind == "f")

    def _all_reduce_small(self, buffer: Array, op: str, tag: str) -> None:
        n = buffer.size
        everyone = self._space(buffer, self.size * n)
        self._device.copy(everyone[self.rank * n : (self.rank + 1) * n], buffer)
        self._all_gather(everyone, tag)
        combine(buffer, [everyone[r * n : (r + 1) * n] for r in range(self.size)], op=op)

    def _broadcast(self, buffer: Array, root: int, tag: str) -> None:
        self._transport.broadcast(buffer, root)

    def _all_to_all(self, output: Array, buffer: Array, received: Any, sent: Any, tag: str) -> None:
        self._swap(output, buffer, received, sent)

    def _send(self, buffer: Array, peer: int, tag: str, direct: bool) -> None:
        self._transport.send(buffer, peer)

    def _recv(self, buffer: Array, peer: int, tag: str, direct: bool) -> None:
        self._transport.recv(buffer, peer)

    def _exchange(self, output: Array, buffer: Array, to: int, source: int) -> None:
        self._transport.exchange(output, buffer, to, source)

    def _barrier(self, tag: str) -> None:
        self._transport.all_reduce(self._space(np.empty(1, np.int32)), "sum")

    def _swap(self, output: Array, buffer: Array, received: Any, sent: Any) -> None:
        """Slice r of `output` becomes slice `rank` of rank r's `buffer`. Counts by rank; None: equal."""
        parts = (
            counts.slices(given or counts.equal(array.size, self.size))
            for array, given in ((output, received), (buffer, sent))
        )
        self._transport.swap(output, buffer, *parts)

    def _space(self, like: Array, count: int | None = None) -> Array:
        """Scratch of so many elements (as many as `like`), of its type, for this stream alone."""
        count = like.size if count is None else count
        nbytes = count * like.itemsize
        if nbytes > self._scratch.size:
            self._device.wait_here()  # issued work may still use the old memory
            self.reserve(nbytes, 0)
        return self._scratch[:nbytes].view(like.dtype)


def a_gpu_for_each(host: Communicator, device: Device) -> bool:
    """Whether each rank has its own GPU. If not, the first rank of a node warns. Collective."""
    world = worlds.current()
    if world.device is not None:
        return True
    first: dict[bytes, int] = {}  # GPU -> its first rank of the run
    for each in host.all_gather_bytes(b"%d %b" % (world.rank, device.identity)):
        number, gpu = each.split(b" ", 1)
        rank = int(number)
        if not gpu:
            return False
        if first.setdefault(gpu, rank) != rank:
            if host.rank == world.local_rank == 0 and world not in _warned:
                _warned.add(world)
                warnings.warn(
                    f"ranks {first[gpu]} and {rank} share a GPU: collectives are staged through host memory, "
                    "which is slow. NCCL needs a GPU for each rank; communicator='staged' silences this",
                    stacklevel=6,
                )
            return False
    return True
