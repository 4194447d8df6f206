"""Times on the GPU, by events; and arrays to time with."""

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from shardrt import device as devices

Array = Any
PLUG = 1 << 30  # bytes that are copied before what is timed
PLUGS = 6  # such copies: about 3 ms in which the calls to be timed are queued


class Events:
    """A clock of the GPU, of which each reading is an event in the current stream."""

    def __init__(self) -> None:
        import cupy

        self._cuda = cupy.cuda

    def now(self) -> Any:
        """A reading."""
        event = self._cuda.Event()
        event.record()
        return event

    __call__ = now

    def seconds(self, stop: Any, start: Any) -> float:
        """Between two readings; waits for the later."""
        stop.synchronize()
        return self._cuda.get_elapsed_time(start, stop) / 1e3


class Clock:
    """Times calls in the compute stream of the current CUDA device.

    Before each round the stream is busy for a few milliseconds with copies, so that the calls are all queued
    when the first of them begins: what is measured is the GPU, not the launching.
    """

    def __init__(self, plug: int = PLUG) -> None:
        import cupy

        self._cupy = cupy
        self.device = devices.get("cuda")
        devices.set_current(self.device)
        self._plug = [cupy.empty((plug,), np.uint8) for _ in range(2)]

    def round(self, work: Callable[[], Any], calls: int) -> float:
        """Seconds of one of so many calls, one after the other."""
        start, stop = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        stream = self._cupy.cuda.get_current_stream()
        for _ in range(PLUGS):
            self.device.copy(*self._plug)
        start.record(stream)
        for _ in range(calls):
            work()
        stop.record(stream)
        stop.synchronize()
        return self._cupy.cuda.get_elapsed_time(start, stop) / 1e3 / calls

    def seconds(self, work: Callable[[], Any], *, calls: int = 10, rounds: int = 5) -> float:
        """As `by_turns`, of one."""
        return self.by_turns([work], calls=calls, rounds=rounds)[0]

    def by_turns(self, works: list[Callable[[], Any]], *, calls: int = 10, rounds: int = 5) -> list[float]:
        """The median over rounds of each; once before, untimed."""
        for work in works:
            work()
        times = [[self.round(work, calls) for work in works] for _ in range(rounds)]
        return [statistics.median(each) for each in zip(*times, strict=True)]

    def on_host(self, work: Callable[[], Any], calls: int, wait: bool = True) -> float:
        """Seconds of one of so many calls by the host's clock, from an idle GPU; wait: to an idle GPU."""
        self.finish()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        if wait:
            self.finish()
        return (time.perf_counter() - start) / calls

    def free(self) -> int:
        """Free bytes of the GPU."""
        return self._cupy.cuda.runtime.memGetInfo()[0]

    def finish(self) -> None:
        """Wait for everything on the GPU."""
        self._cupy.cuda.Device().synchronize()


class Torch:
    """PyTorch on the arrays and in the stream of a Clock; `there` is False where it is missing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        try:
            import torch

            self.torch = torch if torch.cuda.is_available() else None
        except ImportError:
            self.torch = None

    @property
    def there(self) -> bool:
        """Whether there is a PyTorch that can use the GPU."""
        return self.torch is not None

    def stream(self) -> Any:
        """A context in which PyTorch launches into the clock's stream."""
        if not self.there:
            return nullcontext()
        stream = self.torch.cuda.ExternalStream(self._clock.device.stream_here())
        return self.torch.cuda.stream(stream)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Of a call, roughly: to choose among ways."""
        return self._clock.seconds(work, calls=3, rounds=2)

    def of(self, array: Array) -> Any:
        """The same memory as a tensor; 16 bits as the integers that DLPack surely knows."""
        if array.dtype.name == "bfloat16":
            return self.torch.from_dlpack(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_dlpack(array)


def filled(*shape: int, dtype: Any = "bfloat16", seed: int = 0, scale: float = 1.0) -> Array:
    """Random normal numbers on the current device: a few of them, again and again."""
    device = devices.current()
    count = int(np.prod(shape))
    some = scale * np.random.default_rng(seed).normal(size=min(count, 1 << 20))
    return device.asarray(np.resize(some.astype(element(dtype)), count)).reshape(shape)


def blank(*shape: int, dtype: Any = "bfloat16") -> Array:
    """An uninitialised array on the current device."""
    return devices.current().empty(shape, element(dtype))


def element(dtype: Any) -> np.dtype:
    """A NumPy type, also of the name "bfloat16"."""
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


def difference(found: Any, expected: Any) -> float:
    """Relative difference of two tensors in the norm."""
    found, expected = found.detach().float(), expected.detach().float()
    return float((found - expected).norm() / expected.norm())
