"""Delays every collective by a given time, for tests of overlap and of missing waits."""

import time
from collections.abc import Callable
from typing import Any

from shardrt.comm.interceptors import Call, Interceptor


class CollectiveDelay(Interceptor):
    """Calls wait(delay) in the stream before each collective but barriers. Default: sleep so many seconds."""

    def __init__(self, communicator: Any, delay: float, wait: Callable[[float], Any] = time.sleep) -> None:
        super().__init__(communicator)
        self.delay, self.wait = delay, wait

    def intercept(self, call: Call, run: Callable[..., Any]) -> Callable[..., Any]:
        if call.array is not None:
            call.stream.submit(self.wait, self.delay, label=f"delay {call.name}")
        return run
