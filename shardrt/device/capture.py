"""A piece of work captured in a CUDA graph, to be launched again as a whole (docs/gpu.md).

While work is captured nothing runs. All streams of the thread take part: they are forked from the compute
stream at the beginning and joined to it at the end, so that work in any of them is in the graph. Only points
inside the graph can be waited for in it; what was recorded before has been reached, because the streams were
waited for first, and a replay begins after what is then in any of them.

Never run on a GPU yet (docs/status.md); tests run it on the real CuPy over a GPU in software.
"""

import atexit
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

WHY = "nothing runs while a CUDA graph is captured; see docs/gpu.md"


_graphs: "weakref.WeakSet[Graph]" = weakref.WeakSet()


@atexit.register
def _release_all() -> None:
    """Before Python's end destroys communicators in an order of its own."""
    for graph in list(_graphs):
        graph.release()


class Graph:
    """Captured work. Made by CUDADevice.capture.

    result: what the function gave. Its arrays are written anew by each replay, and hold nothing before one.
    """

    def __init__(
        self, cupy: ModuleType, compute: Any, sides: Iterable[Any], new_event: Callable[[], Any]
    ) -> None:
        """compute, sides: the CUDAStreams of this thread, also those that are made later."""
        self.result: Any = None
        self._cupy = cupy
        self._compute = compute
        self._sides = sides
        self._new_event = new_event
        self._ended = new_event()  # of the latest replay
        # Its own, so that what the graph writes again and again is lent to nobody else.
        self._pool = cupy.cuda.MemoryPool()
        self._function: Callable[[], Any] | None = None  # refers to what the graph reads
        self._launchable: Any = None
        self._before: list[Callable[[], None]] = []
        self._after: list[Callable[[], None]] = []
        self.kept: dict[str, Any] = {}  # what ops leave for later ones of the same graph
        _graphs.add(self)

    def replay(self) -> None:
        """Run it after all that is in this thread's streams, and before what comes to them from now on."""
        if self._cupy.cuda.get_current_stream().ptr != self._compute.handle.ptr:
            raise RuntimeError("replay: the current stream must be the compute stream of who captured it")
        if self._compute.graph is not None:
            raise RuntimeError(f"replay: {WHY}")
        if self._launchable is None:
            raise RuntimeError("replay: a communicator that this graph calls has been closed")
        self._gather_sides()
        for function in self._before:
            function()
        self._launchable.launch(self._compute.handle)
        self._compute.record(self._ended)
        for side in list(self._sides):
            side.wait(self._ended)  # the work of side streams in the graph comes before their next

    def release(self) -> None:
        """Destroy the CUDA graph, which can't be replayed any more.

        NCCL destroys no communicator before the graphs that have its calls: ncclCommDestroy waits for them.
        """
        self._launchable = None

    __del__ = release  # before what the function refers to, communicators among it

    def capture(self, function: Callable[[], Any]) -> None:
        """Call `function` once, and keep what it launches."""
        streams = [self._compute, *self._sides]
        for stream in streams:
            stream.synchronize()  # events of before are reached, and need no wait in the graph
        self._function = function
        self._compute.handle.begin_capture()
        for stream in streams:
            stream.graph = self
        whole = False
        try:
            begun = self._new_event()
            self._compute.record(begun)
            for side in streams[1:]:
                side.wait(begun)  # from here on its work goes into the graph
            with self._cupy.cuda.using_allocator(self._pool.malloc):
                self.result = function()
            self._gather_sides()
            whole = True
        except Exception as error:
            raise RuntimeError(f"capture: this can't be captured in a CUDA graph: {error}") from error
        finally:
            for stream in streams:
                stream.graph = None
            for undo in self._after:
                undo()
            self._finish(whole)

    def before_replay(self, function: Callable[[], None]) -> None:
        """Call `function()` before each replay, after those given earlier. Its copies go before the graph."""
        self._before.append(function)

    def after_capture(self, function: Callable[[], None]) -> None:
        """Call `function()` when this is captured: to undo what the host has counted as if it had run."""
        self._after.append(function)

    def ended(self, by_host: bool = False) -> Any:
        """An event at the end of the latest replay, never recorded if there was none.

        by_host: it is waited for by the host, which raises RuntimeError during capture.
        """
        if by_host and self._compute.graph is self:
            raise RuntimeError(f"an event can't be waited for by the host: {WHY}")
        return self._ended

    def _gather_sides(self) -> None:
        """The compute stream waits for what is in the others."""
        for side in list(self._sides):
            reached = self._new_event()
            side.record(reached)
            self._compute.wait(reached)

    def _finish(self, whole: bool) -> None:
        """Leave the mode of capturing; it must be left also where that is an error."""
        try:
            self._launchable = self._compute.handle.end_capture()
        except Exception as error:
            if whole:
                raise RuntimeError(f"capture: this can't be captured in a CUDA graph: {error}") from error
