"""What this GPU can do at most, measured: copying, multiplying, and talking to the host."""

from collections.abc import Callable
from math import inf

from ..offload import copies
from . import needs
from .clock import Clock, Torch, blank, difference, filled
from .report import PEAK_TFLOPS, agreement
from .state import Run

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
    source, target = (blank(nbytes, dtype="uint8") for _ in range(2))
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
        seconds = clock.by_turns(works)
        if torch.there:
            check = agreement(difference(torch.of(out), result), inf)
    name = f"bf16 matmul {side}^3"
    rates = [flops / each / 1e12 for each in seconds]
    run.ceiling("matmul", f"{name}, cublasLt", rates[0], "TFLOP/s", check=check, **peak)
    if torch.there:
        run.ceiling("matmul of torch", f"{name}, torch", rates[1], "TFLOP/s", **peak)


def links(run: Run, clock: Clock, nbytes: int) -> None:
    """Pinned memory to the device, back, and both at once, as bench.offload copies it."""
    _, rates = copies.rows(clock.device, nbytes, [], ROUNDS)
    for direction, rate in rates.items():
        run.ceiling(direction, f"pinned, {direction}", rate / 1e9, "GB/s")
