"""What this GPU can do at most, measured: copying, multiplying, and talking to the host."""

import statistics
from collections.abc import Callable
from functools import partial
from math import inf

import numpy as np

from bench.gpu import needs
from bench.gpu.clock import Clock, Torch, blank, difference, filled
from bench.gpu.report import PEAK_TFLOPS, agreement
from bench.gpu.state import Run

COPIED = 1 << 30  # bytes of a copy on the device
LINKED = 256 << 20  # bytes of a copy to or from the host
SIDE = 8192  # of the square product
ROUNDS = 5


def measure(run: Run, *, copied: int = COPIED, linked: int = LINKED, side: int = SIDE) -> None:
    """Rows of ceilings, which later sections use."""
    clock = Clock()
    with run.guarded("health"):
        run.add("GPU memory free", clock.free() / 1e9, "GB", check=needs.health())
    with run.guarded("device copy"):
        device_copy(run, clock, copied)
    with run.guarded("bf16 matmul"):
        products(run, clock, side)
    with run.guarded("pinned copies"):
        links(run, clock, linked)


def device_copy(run: Run, clock: Clock, nbytes: int) -> None:
    """Read and written bytes counted."""
    source, target = (blank(nbytes, dtype=np.uint8) for _ in range(2))
    source.fill(1)
    seconds = clock.seconds(lambda: clock.device.copy(target, source))
    run.ceiling("copy", "device copy, read + written", 2 * nbytes / seconds / 1e9, "GB/s")


def products(run: Run, clock: Clock, side: int) -> None:
    """The same square product by cublasLt and by PyTorch, alternating."""
    kernels, torch = clock.device.kernels, Torch(clock)
    a, b, out = filled(side, side), filled(side, side, seed=1), blank(side, side)
    works: list[Callable] = [lambda: kernels.matmul.matmul(a, b, out)]
    flops = 2.0 * side**3
    peak = {"beside": "data sheet", "theirs": PEAK_TFLOPS}
    check = ""
    with torch.stream():
        if torch.there:
            left, right = torch.of(a), torch.of(b)
            result = torch.torch.empty_like(left)
            works.append(lambda: torch.torch.mm(left, right, out=result))
        seconds, _ = clock.by_turns(works)
        if torch.there:
            check = agreement(difference(torch.of(out), result), inf)
    name = f"bf16 matmul {side}^3"
    rates = [flops / each / 1e12 for each in seconds]
    run.ceiling("matmul", f"{name}, cublasLt", rates[0], "TFLOP/s", check=check, **peak)
    if torch.there:
        run.ceiling("matmul of torch", f"{name}, torch", rates[1], "TFLOP/s", **peak)


def links(run: Run, clock: Clock, nbytes: int) -> None:
    """Pinned memory to the device, back, and both at once, in streams of their own."""
    device = clock.device
    up, down = device.new_stream("up"), device.new_stream("down")
    host = [device.pinned(nbytes, np.uint8) for _ in range(2)]
    there = [device.buffer(nbytes, np.uint8) for _ in range(2)]

    def to_device() -> None:
        up.submit(device.copy, there[0], host[0])

    def to_host() -> None:
        down.submit(device.copy, host[1], there[1])

    works = {"host to device": [to_device], "device to host": [to_host], "both": [to_device, to_host]}
    for key, works_of in works.items():
        at_once = partial(_all, works_of)
        times = [clock.on_host(at_once, 4) for _ in range(ROUNDS + 1)]  # the first is a warm-up
        rate = len(works_of) * nbytes / statistics.median(times[1:]) / 1e9
        run.ceiling(key, f"pinned, {key}{' at once' if key == 'both' else ''}", rate, "GB/s")


def _all(works: list[Callable[[], None]]) -> None:
    for work in works:
        work()
