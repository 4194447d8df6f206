"""Batches made in a thread, ahead of the step that takes them."""

import threading
from collections.abc import Callable
from queue import Queue
from typing import Any

from shardrt.device import threads


class Prefetched:
    """`make(step)` for steps from `first` on, made by a daemon thread up to `depth` steps ahead. An iterator.

    `next` raises the thread's exception at the step it belongs to. `close` ends the thread.
    """

    def __init__(self, make: Callable[[int], Any], first: int, stop: int, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"Prefetched: depth must be at least 1, got {depth}")
        self._ready: Queue = Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(make, first, stop), name="shardrt-batches", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> "Prefetched":
        return self

    def __next__(self) -> Any:
        if self._closed.is_set():
            raise StopIteration
        batch, error = self._ready.get()
        if error is not None:
            self._closed.set()
            raise error
        return batch

    def close(self) -> None:
        """No more batches are made; returns when the thread has ended."""
        self._closed.set()
        while self._thread.is_alive():
            while not self._ready.empty():  # it may wait for room
                self._ready.get_nowait()
            self._thread.join(0.01)

    def _run(self, make: Callable[[int], Any], first: int, stop: int) -> None:
        for step in range(first, stop):
            threads.enter()
            try:
                entry = make(step), None
            except BaseException as error:  # passed to the caller that waits for the batch
                entry = None, error
            if self._closed.is_set():
                return
            self._ready.put(entry)
            if entry[1] is not None:
                return
        self._ready.put((None, StopIteration()))
