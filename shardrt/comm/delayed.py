"""Slows every collective down by a given time: for tests of overlap and of missing waits."""

import time
from collections.abc import Callable
from typing import Any

from shardrt.comm.protocol import Communicator
from shardrt.comm.wrapper import Wrapper


class DelayedCommunicator(Wrapper):
    """Calls wait(delay) in the stream before each collective (not before barriers): by default, seconds."""

    def __init__(self, inner: Communicator, delay: float, wait: Callable[[float], Any] = time.sleep) -> None:
        super().__init__(inner)
        self.delay, self.wait = delay, wait

    def _wrap(self, inner: Communicator) -> "DelayedCommunicator":
        return DelayedCommunicator(inner, self.delay, self.wait)

    def _before(self, call: str, buffer: Any, stream: Any) -> None:
        if buffer is not None:
            stream.submit(self.wait, self.delay, label=f"delay {call}")
