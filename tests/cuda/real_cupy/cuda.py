"""CUDA as CuPy calls it, without a GPU: memory of the host, kernels that do nothing, the rules of capture.

Methods have the names of CuPy's functions (cupy_backends.cuda.api); plug.py puts them in their place. Work is
done when it is issued, or not at all while its stream is captured.
"""

import ctypes
import itertools

import numpy as np

_ATTRIBUTES = {1: 1024, 16: 132, 75: 9, 76: 0}  # threads of a block, multiprocessors, compute capability 9.0
_VERSION = 13000


class Graph:
    """A capture. loose: its streams that hold work which no other stream of it has waited for."""

    def __init__(self, origin: int) -> None:
        self.origin, self.streams, self.loose, self.ended = origin, {origin}, set(), False


class CUDA:
    """One GPU. `log`: (what, stream, detail) of all that was issued."""

    def __init__(self) -> None:
        self.log = []
        self._numbers = itertools.count(1)
        self._memory = {}  # address -> what holds it
        self._kernels = {}  # handle -> name
        self._captured = {}  # stream -> Graph
        self._events = {}  # event -> (stream, Graph or None), where it was last recorded

    def _handle(self):
        return 16 * next(self._numbers)

    def _issue(self, what, stream, detail=None):
        """Whether it runs now."""
        graph = self._captured.get(stream)
        if graph is not None:
            graph.loose.add(stream)
        self.log.append((what, stream, detail))
        return graph is None

    # -- the device

    def getDeviceCount(self):
        return 1

    def getDevice(self):
        return 0

    def setDevice(self, index):
        assert index == 0

    def deviceGetAttribute(self, attribute, index):
        return _ATTRIBUTES.get(attribute, 65536)

    def deviceCanAccessPeer(self, index, peer):
        return 1

    def deviceSynchronize(self):
        self._refuse_in_capture(*self._captured)

    def runtimeGetVersion(self):
        return _VERSION

    def driverGetVersion(self):
        return _VERSION

    def _nothing(self, *args):
        """What has no effect here."""

    _ensure_context = _deviceEnsurePeerAccess = check_status = ctxSetCurrent = _nothing
    eventDestroy = streamDestroy = graphDestroy = graphExecDestroy = moduleUnload = _nothing

    # -- memory

    def malloc(self, size):
        memory = np.zeros(size + 512, np.uint8)
        address = memory.ctypes.data + -memory.ctypes.data % 512
        self._memory[address] = memory
        return address

    def free(self, address):
        del self._memory[address]

    def hostAlloc(self, size, flags):
        return self.malloc(size)

    freeHost = free

    def memGetInfo(self):
        return 1 << 37, 1 << 37

    def pointerGetMemoryType(self, address):
        return 0

    def memcpyAsync(self, target, source, size, kind, stream):
        if self._issue("copy", stream):
            ctypes.memmove(target, source, size)

    def memcpy(self, target, source, size, kind):
        self.memcpyAsync(target, source, size, kind, 0)

    def memsetAsync(self, target, value, size, stream):
        if self._issue("set", stream):
            ctypes.memset(target, value, size)

    # -- streams and events

    def streamCreateWithPriority(self, flags, priority):
        assert flags == 1, "a stream that waits for the null stream"
        return self._handle()

    def eventCreateWithFlags(self, flags):
        return self._handle()

    def eventRecord(self, event, stream):
        self._events[event] = stream, self._captured.get(stream)
        self.log.append(("record", stream, event))

    def streamWaitEvent(self, stream, event):
        self.log.append(("wait", stream, event))
        source, graph = self._events.get(event, (stream, None))
        if graph is None:
            if stream in self._captured:
                raise RuntimeError("cudaErrorStreamCaptureIsolation")
            return
        if graph.ended:
            raise RuntimeError("cudaErrorCapturedEvent")
        self._captured[stream] = graph
        graph.streams.add(stream)
        graph.loose.add(stream)
        if source != stream:
            graph.loose.discard(source)

    def eventQuery(self, event):
        self.eventSynchronize(event)
        return 0

    def eventSynchronize(self, event):
        if self._events.get(event, (0, None))[1] is not None:
            raise RuntimeError("cudaErrorCapturedEvent")

    def eventElapsedTime(self, start, stop):
        return 1.0

    def streamSynchronize(self, stream):
        self._refuse_in_capture(stream)

    def streamQuery(self, stream):
        self._refuse_in_capture(stream)
        return 0

    def _refuse_in_capture(self, *streams):
        if any(stream in self._captured for stream in streams):
            raise RuntimeError("cudaErrorStreamCaptureUnsupported")

    # -- graphs

    def streamBeginCapture(self, stream):
        assert stream, "the null stream can't be captured"
        if stream in self._captured:
            raise RuntimeError("cudaErrorIllegalState")
        self._captured[stream] = Graph(stream)

    def streamIsCapturing(self, stream):
        return int(stream in self._captured)

    def streamEndCapture(self, stream):
        graph = self._captured[stream]
        assert graph.origin == stream
        graph.ended = True
        for member in graph.streams:
            del self._captured[member]
        if graph.loose - {stream}:
            raise RuntimeError("cudaErrorStreamCaptureUnjoined")
        return self._handle()

    def graphInstantiate(self, graph):
        return self._handle()

    def graphLaunch(self, graph, stream):
        self._issue("graph", stream)

    # -- kernels

    def moduleLoadData(self, code):
        return self._handle()

    def moduleGetFunction(self, module, name):
        handle = self._handle()
        self._kernels[handle] = name
        return handle

    def funcGetAttribute(self, attribute, function):
        return 64

    def funcSetAttribute(self, function, attribute, value):
        assert function in self._kernels

    def occupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, shared):
        return 1

    def launchKernel(self, function, *where):
        *blocks, shared, stream, _, _ = where
        assert min(blocks) > 0 and shared <= 227 << 10
        self._issue("launch", stream, self._kernels[function])
