"""Ends the job after an asynchronous error of NCCL, such as a lost peer or cable.

Nothing else reports such an error: the kernel of a collective spins, and the host waits for the kernel. As in
PyTorch's ProcessGroupNCCL, a thread of each process asks all communicators for their asynchronous errors
(ncclCommGetAsyncError, which never waits).
"""

import threading
import weakref
from typing import Any

from shardrt.comm import supervision
from shardrt.device import threads

EXIT_CODE = 83
_PERIOD = 0.5  # seconds
_watched: "weakref.WeakSet[Any]" = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None
_over = threading.Event()  # set when peers may end without an error
supervision.after_all_programs(_over.set)


def watch(transport: Any) -> None:
    """Watch this NCCLTransport from now on, while it is alive."""
    global _thread
    with _lock:
        _watched.add(transport)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="nccl watchdog", daemon=True)
            _thread.start()


def _run() -> None:
    while not _over.wait(_PERIOD):
        threads.enter()
        with _lock:
            watched = list(_watched)
        for transport in watched:
            error = transport.error()
            if error:
                where = f"rank {transport.world_rank}, communicator {transport.role!r}"
                report = f"NCCL failed on {where}: {error}; NCCL_DEBUG=WARN says more\n"
                supervision.supervisor.end_job(report, EXIT_CODE)
        watched = transport = None  # else this thread would keep them alive
