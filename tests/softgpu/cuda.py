"""CUDA as CuPy calls it: memory of the host, streams that run late, events, captures, kernels that compute.

Methods have the names of CuPy's functions (cupy_backends.cuda.api); plug.py puts them in their place. From
the bottom up: scheduler.py (who goes on when), streams.py with graph.py, memory.py, kernels.py.
"""

import threading

from tests.softgpu.errors import INVALID_VALUE, failed
from tests.softgpu.kernels import Kernels
from tests.softgpu.scheduler import MODES, Deadlock, Work  # what others here look for

__all__ = ["CUDA", "MODES", "Deadlock", "Work"]

_ATTRIBUTES = {1: 1024, 16: 132, 75: 9, 76: 0}  # threads of a block, multiprocessors, compute capability 9.0
_VERSION = 13000


class CUDA(Kernels):
    """All GPUs of this process: one for each rank."""

    devices = 1
    zeros: tuple[str, ...] = ()  # functions that give 0, and are not asked (plug.py)
    _current = threading.local()

    def getDeviceCount(self):
        return self.devices

    def getDevice(self):
        return getattr(self._current, "index", 0)

    def setDevice(self, index):
        if not 0 <= index < self.devices:
            raise failed(INVALID_VALUE)
        self._current.index = index

    def getDeviceProperties(self, index):
        return {"name": b"software", "warpSize": 32, "multiProcessorCount": _ATTRIBUTES[16]}

    def deviceGetAttribute(self, attribute, index):
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
