"""A GPU that does nothing but count what it is asked for: what a step asks, and what that costs the host.

`start()` in the place of start.py's. Memory is there and never touched, so a model's real sizes cost nothing.
"""

import json
from collections import Counter

import numpy as np

from tests.softgpu.compiler import NVRTC
from tests.softgpu.cuda import CUDA
from tests.softgpu.start import put_below_cupy, show_for_good


class Memory:
    """Bytes that have an address."""

    def __init__(self, size: int) -> None:
        self.bytes, self.size, self.pinned = np.empty(size + 512, np.uint8), size, False
        self.address = self.bytes.ctypes.data + -self.bytes.ctypes.data % 512


class Idle(CUDA):
    """One GPU. `counts`: by (what it is, a kernel's name or "")."""

    # Asked thousands of times in a step, and answered at once by a driver.
    zeros = ("getDevice", "setDevice", "check_status", "ctxSetCurrent", "_ensure_context", "ctxGetCurrent")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()
        self._memory: dict[int, Memory] = {}
        self._names: dict[int, str] = {}

    def issue(self, what, stream, work, detail=None):
        self.counts[what, ""] += 1

    def launchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        self.counts["launch", self._names[function]] += 1

    def eventRecord(self, event, stream):
        self.counts["record", ""] += 1

    def streamWaitEvent(self, stream, event):
        self.counts["wait", ""] += 1

    def memcpyAsync(self, target, source, size, kind, stream):
        self.counts["copy", ""] += 1

    def memsetAsync(self, target, value, size, stream):
        self.counts["set", ""] += 1

    def streamSynchronize(self, stream):
        self.counts["synchronize", ""] += 1

    def eventSynchronize(self, event):
        self.counts["synchronize", ""] += 1

    def deviceSynchronize(self):
        self.counts["synchronize", ""] += 1

    def eventQuery(self, event):
        return 0

    def eventElapsedTime(self, start, stop):
        return 1.0

    def streamIsCapturing(self, stream):
        return 0

    def malloc(self, size):
        made = Memory(size)
        self._memory[made.address] = made
        return made.address

    def block(self, address, nbytes):
        at = max((begin for begin in self._memory if begin <= address), default=None)
        found = self._memory.get(at)
        return found if found is not None and address + nbytes <= at + found.size else None

    def hostAlloc(self, size, flags):
        return self.malloc(size)

    def free(self, address):
        del self._memory[address]

    freeHost = free

    def moduleGetFunction(self, module, name):
        handle = self.handle()
        self._names[handle] = name.decode() if isinstance(name, bytes) else name
        return handle

    def funcSetAttribute(self, function, attribute, value):
        """Any size is fine."""


class Uncompiled(NVRTC):
    """Machine code of nothing."""

    def compileProgram(self, program, options):
        self._codes[program] = b"\x7fELF" + json.dumps({"names": []}).encode()


def start() -> Idle:
    """The GPU that CuPy sees from now on, and shardrt. Before cupy is imported, in a process of its own."""
    cuda = Idle()
    put_below_cupy(cuda, "idle")
    show_for_good(cuda, Uncompiled, "idle")
    return cuda
