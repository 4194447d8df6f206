"""Slows every collective down by a given time: for tests of overlap and of missing waits."""

import time
from typing import Any

from shardrt.comm.protocol import Communicator
from shardrt.comm.wrapper import Wrapper


class DelayedCommunicator(Wrapper):
    """Sleeps `delay` seconds in the stream before each collective (not before barriers)."""

    def __init__(self, inner: Communicator, delay: float) -> None:
        super().__init__(inner)
        self.delay = delay

    def _wrap(self, inner: Communicator) -> "DelayedCommunicator":
        return DelayedCommunicator(inner, self.delay)

    def _before(self, call: str, buffer: Any, stream: Any) -> None:
        if buffer is not None:
            stream.submit(time.sleep, self.delay, label=f"delay {call}")
