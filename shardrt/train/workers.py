"""Work on many things at once, by workers that are processes and have a thread each to wait for them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

__all__ = ["in_order"]

Given, Done, Worker = TypeVar("Given"), TypeVar("Done"), TypeVar("Worker")


def in_order(
    work: Callable[[Worker, Given], Done],
    things: Iterable[Given],
    first: Worker,
    another: Callable[[], Worker],
    most: int,
) -> Iterator[Done]:
    """work(a worker, each thing), in the order of the things; at most `most` are under way.

    The caller's thread takes the things, one for each worker ahead. An exception is raised where its result
    would have been.

    Args:
        first: a worker.
        another: makes one more, when all that there are have something to do.
    """
    free: SimpleQueue[Worker] = SimpleQueue()

    def run(thing: Given) -> Done:
        taken = free.get()
        try:
            return work(taken, thing)
        finally:
            free.put(taken)

    free.put(first)
    pool, under_way, made = ThreadPoolExecutor(most, "shardrt-work"), deque[Future[Done]](), 1
    try:
        for thing in things:
            if len(under_way) == most:
                yield under_way.popleft().result()
            if made < most and made <= sum(not each.done() for each in under_way):
                free.put(another())
                made += 1
            under_way.append(pool.submit(run, thing))
        while under_way:
            yield under_way.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
