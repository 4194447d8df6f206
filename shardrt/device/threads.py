"""Host threads choose a GPU before they work.

A new thread uses GPU 0. When the thread first waits for an event, frees memory, or destroys a stream or an
event, CUDA makes a context there, of hundreds of MB. This can happen in any thread: it may drop the last
reference, or the garbage collector may run in it.
"""

import threading
from contextlib import suppress
from typing import Any

__all__ = ["enter"]


class _Here(threading.local):
    entered = False


_here = _Here()
_gpu: tuple[Any, int] | None = None  # CUDA's runtime, and a GPU on which this process has a context


def choose(runtime: Any, index: int) -> None:
    """Make GPU `index` the current one of this thread, and the one that `enter` chooses in later threads.

    The thread counts as entered before the call: the garbage collector may run just after it and free pinned
    memory, and `enter` would then replace GPU 0 by the last chosen GPU.
    """
    global _gpu
    _here.entered = True
    runtime.setDevice(index)
    _gpu = runtime, index


def enter() -> None:
    """Choose this process's GPU in a thread that has chosen none.

    A stream's thread calls this before each item: the thread may be older than the choice of the GPU. If
    ranks are threads with a GPU each, it takes the last chosen GPU: from it CUDA can wait for and free
    objects of any GPU. A thread that uses another GPU than 0 has chosen it by CuPy and stays there.
    """
    if _gpu is None or _here.entered:
        return
    _here.entered, (runtime, index) = True, _gpu
    with suppress(RuntimeError):  # CUDARuntimeError: a kernel has failed; a wait for its stream reports it
        if runtime.getDevice() == 0:
            runtime.setDevice(index)
