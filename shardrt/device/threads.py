"""Threads of the host choose a GPU before they work.

A new thread is at GPU 0. CUDA makes a context there, which takes hundreds of MB, when the thread first waits
for an event, frees memory, or destroys a stream or an event. Any thread does so: it may drop the last
reference, or the garbage collector may run in it.
"""

import threading
from contextlib import suppress
from typing import Any


class _Here(threading.local):
    entered = False


_here = _Here()
_gpu: tuple[Any, int] | None = None  # CUDA's runtime, and a GPU on which this process has a context


def has_gpu(runtime: Any, index: int) -> None:
    """This process has a context on GPU `index`, which this thread has chosen."""
    global _gpu
    _gpu = runtime, index
    _here.entered = True


def enter() -> None:
    """Choose this process's GPU in a thread that has chosen none.

    A thread's loop calls it at each turn: the thread may be older than the choice of the GPU. Where ranks are
    threads with a GPU each, it is the one that was chosen last: CUDA waits for and frees what is of any GPU.
    A thread that is at another GPU than 0 has chosen it by CuPy, and stays there.
    """
    if _gpu is None or _here.entered:
        return
    _here.entered, (runtime, index) = True, _gpu
    with suppress(RuntimeError):  # CUDARuntimeError: a kernel has failed, which its stream's wait says
        if runtime.getDevice() == 0:
            runtime.setDevice(index)
