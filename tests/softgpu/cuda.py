"""CUDA as CuPy calls it: memory of the host, streams that run late, events, captures, kernels that compute.

Methods have the names of CuPy's functions (cupy_backends.cuda.api); plug.py puts them in their place. From
the bottom up: scheduler.py (who goes on when), streams.py with graph.py, memory.py, kernels.py.
"""

from tests.softgpu.errors import INVALID_DEVICE, failed
from tests.softgpu.kernels import Kernels
from tests.softgpu.scheduler import MODES, Deadlock, Work  # what others here look for

__all__ = ["CUDA", "MODES", "Deadlock", "Work"]

# Threads of a block, multiprocessors, compute capability 9.0, shared memory of a block
_ATTRIBUTES = {1: 1024, 16: 132, 75: 9, 76: 0, 97: 227 << 10}
_PAGEABLE_ACCESS = 88
_VERSION = 13000


class CUDA(Kernels):
    """The GPUs that this process sees.

    visible: their numbers on this machine, as CUDA_VISIBLE_DEVICES has them.
    """

    visible: tuple[int, ...] = (0,)

    def getDeviceCount(self):
        return len(self.visible)

    def getDevice(self):
        return self.device

    def setDevice(self, index):
        """As CUDA does since version 12, this makes the device's context."""
        self._physical(index)
        self._here.device = index
        self.enter_context()

    def getDeviceProperties(self, index):
        """uuid: by CuPy up to the first zero byte, which may be the first one of all."""
        self._physical(index)
        return {
            "name": b"software",
            "warpSize": 32,
            "multiProcessorCount": _ATTRIBUTES[16],
            "uuid": b"",
        }

    def deviceGetPCIBusId(self, index):
        return f"0000:{16 + self._physical(index):02X}:00.0"

    def _physical(self, index):
        if not 0 <= index < len(self.visible):
            raise failed(INVALID_DEVICE)
        return self.visible[index]

    def deviceGetAttribute(self, attribute, index):
        if attribute == _PAGEABLE_ACCESS:
            return int(self.reads_pageable)
        return _ATTRIBUTES.get(attribute, 65536)

    def deviceCanAccessPeer(self, index, peer):
        return 1

    def runtimeGetVersion(self):
        return _VERSION

    def driverGetVersion(self):
        return _VERSION

    def _nothing(self, *args):
        """What has no effect here."""

    _ensure_context = _deviceEnsurePeerAccess = check_status = ctxSetCurrent = _nothing
