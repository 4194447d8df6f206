"""A piece of work captured in a CUDA graph, to be launched again as a whole (docs/explanation/gpu.md).

While a graph is captured nothing runs. All streams of the thread take part: they fork from the compute stream
at the beginning and join it at the end, so that work in each of them is in the graph. Inside the graph a
stream can wait only for points of the graph. Earlier points are reached, because the host waits for all
streams first. A replay begins after all work that is then in the thread's streams.

Never run on a GPU yet (docs/reference/limits.md); tests run it on the real CuPy over a GPU emulator.
"""

import atexit
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

WHY = "nothing runs while a CUDA graph is captured; see docs/explanation/gpu.md"


_graphs: "weakref.WeakSet[Graph]" = weakref.WeakSet()


@atexit.register
def _release_all() -> None:
    """Before Python's end destroys communicators in an order of its own."""
    for graph in list(_graphs):
        graph.release()


class Graph:
    """Captured work. Made by CUDADevice.capture.

    result: the function's result. Each replay writes its arrays; before a replay they are undefined.
    """

    def __init__(
        self, cupy: ModuleType, compute: Any, sides: Iterable[Any], new_event: Callable[[], Any]
    ) -> None:
        """compute, sides: the CUDAStreams of this thread, also later ones."""
        self.result: Any = None
        self._cupy = cupy
        self._compute = compute
        self._sides = sides
        self._new_event = new_event
        self._ended = new_event()  # end of the latest replay
        # A pool of its own: no other array may use memory that replays write.
        self._pool = cupy.cuda.MemoryPool()
        self._function: Callable[[], Any] | None = None  # keeps the objects that the graph reads
        self._launchable: Any = None
        self._before: list[Callable[[], None]] = []
        self._after: list[Callable[[], None]] = []
        self.kept: dict[str, Any] = {}  # objects that ops leave for later ops of the same graph
        _graphs.add(self)

    def replay(self) -> None:
        """Run the graph after all present work, and before all later work, of this thread's streams."""
        if self._cupy.cuda.get_current_stream().ptr != self._compute.handle.ptr:
            raise RuntimeError("replay: call it in the thread that captured the graph, on its compute stream")
        if self._compute.graph is not None:
            raise RuntimeError(f"replay: {WHY}")
        if self._launchable is None:
            raise RuntimeError("replay: a communicator that this graph calls has been closed; capture again")
        self._gather_sides()
        for function in self._before:
            function()
        self._launchable.launch(self._compute.handle)
        self._compute.record(self._ended)
        for side in list(self._sides):
            side.wait(self._ended)  # the work of side streams in the graph comes before their next

    def release(self) -> None:
        """Destroy the CUDA graph. It can't be replayed any more.

        NCCL waits in ncclCommDestroy until all graphs with calls of the communicator are destroyed.
        """
        self._launchable = None

    __del__ = release  # before objects of the function die, such as communicators

    def capture(self, function: Callable[[], Any]) -> None:
        """Call `function` once and capture the work that it launches."""
        streams = [self._compute, *self._sides]
        for stream in streams:
            stream.synchronize()  # so earlier events need no wait in the graph
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
            raise RuntimeError(
                f"capture: the function does something that a CUDA graph can't capture: {error}"
            ) from error
        finally:
            for stream in streams:
                stream.graph = None
            for undo in self._after:
                undo()
            self._finish(whole)

    def before_replay(self, function: Callable[[], None]) -> None:
        """Call `function()` before each replay, after earlier ones. Its copies precede the graph."""
        self._before.append(function)

    def after_capture(self, function: Callable[[], None]) -> None:
        """Call `function()` after the capture, to undo what the host has counted as if the work had run."""
        self._after.append(function)

    def ended(self, by_host: bool = False) -> Any:
        """An event at the end of the latest replay; never recorded before the first replay.

        Args:
            by_host: the host is about to wait for it. Then raises RuntimeError during the capture.
        """
        if by_host and self._compute.graph is self:
            raise RuntimeError(f"the host can't wait for an event: {WHY}")
        return self._ended

    def _gather_sides(self) -> None:
        """Make the compute stream wait for the present work of the other streams."""
        for side in list(self._sides):
            reached = self._new_event()
            side.record(reached)
            self._compute.wait(reached)

    def _finish(self, whole: bool) -> None:
        """End the capture, also after an error."""
        try:
            self._launchable = self._compute.handle.end_capture()
        except Exception as error:
            if whole:
                raise RuntimeError(
                    f"capture: the function does something that a CUDA graph can't capture: {error}"
                ) from error
