"""One line: both contestants checked against PyTorch in float64, then the correct ones timed, alternating."""

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardrt import device as devices

from ..gpu.clock import Clock, Torch, blank, filled
from . import report
from .case import Case, Ceilings

TOLERANCE = {"float64": 1e-10, "float32": 5e-5, "float16": 5e-3, "bfloat16": 2e-2}  # of the largest number
LEAST = 5e-3  # seconds of a round, of calls in a row
_MOST = 200  # such calls


class HostClock:
    """Times calls on the CPU, as bench.gpu.clock.Clock does on a GPU.

    Each contestant is one thread, this one: its processor time is what it would take by the clock if nobody
    else had the core meanwhile.
    """

    def round(self, work: Callable[[], Any], calls: int) -> float:
        """Seconds of one of so many calls, one after the other."""
        start = time.thread_time()
        for _ in range(calls):
            work()
        return (time.thread_time() - start) / calls


class Judge:
    """Measures cases on the current device, beside the module `torch`."""

    def __init__(self, dtype: str, rounds: int, torch: Any) -> None:
        self._dtype, self._rounds = dtype, rounds
        self._device = devices.current()
        self.clock = HostClock() if self._device.name == "cpu" else Clock()
        self._torch = torch
        self._tensor = torch.from_numpy if self._device.name == "cpu" else Torch(self.clock).of

    def ceilings(self, elements: int, side: int) -> Ceilings:
        """By a copy of so many elements and a square product; the best of all rounds counts."""
        source, target = filled(elements, dtype=self._dtype), blank(elements, dtype=self._dtype)
        a, b, out = (filled(side, side, dtype=self._dtype, seed=seed) for seed in range(3))
        product = self._device.kernels.matmul
        works = [lambda: self._device.copy(target, source), lambda: product.matmul(a, b, out)]
        for work in works:
            work()
        rounds = [[self.clock.round(work, 1) for work in works] for _ in range(2 * self._rounds)]
        copied, multiplied = map(min, zip(*rounds, strict=True))
        return Ceilings(2 * source.nbytes / copied, 2.0 * side**3 / multiplied)

    def line(self, case: Case, ceilings: Ceilings) -> dict:
        """Check and time one case; see report.record."""
        dtype = case.dtype or self._dtype
        allowed, contestants = TOLERANCE[dtype], self._contestants(case)
        errors = self._errors(case, contestants)
        right = {who: call for who, call in contestants.items() if errors[who] <= allowed}
        calls = {
            who: max(1, min(_MOST, int(LEAST / max(self.clock.round(call, 1), 1e-6))))
            for who, call in right.items()
        }
        seconds: dict[str, list[float]] = {who: [] for who in right}
        for _ in range(self._rounds):
            for who, call in right.items():
                seconds[who].append(self.clock.round(call, calls[who]))
        return report.record(case, dtype, ceilings, allowed, errors, seconds)

    def _errors(self, case: Case, contestants: dict[str, Callable[[], Sequence]]) -> dict[str, float]:
        """How far each is from the truth."""
        host = tuple(map(self._exact, case.inputs))
        truth = None if case.judge else self._truth(case, host)
        errors = {}
        for who, call in contestants.items():
            results = tuple(map(self._exact, call()))
            errors[who] = case.judge(host, results) if case.judge else apart(results, truth)
        return errors

    def _contestants(self, case: Case) -> dict[str, Callable[[], Sequence]]:
        """Calls that give their results. PyTorch's inputs are copies: ours may be written to."""

        def ours() -> Sequence:
            made = case.ours()
            return case.results or made

        tensors = [self._tensor(array).clone() for array in case.inputs]
        return {"ours": ours, "torch": case.peer(self._torch, *tensors)}

    def _truth(self, case: Case, host: tuple) -> tuple:
        """What PyTorch makes of these arrays on the host, in float64."""
        call = case.peer(self._torch, *(self._torch.from_numpy(array.copy()) for array in host))
        return tuple(map(self._exact, call()))

    def _exact(self, array: Any) -> np.ndarray:
        """Any contestant's array on the host: floats as float64, integers as they are."""
        if isinstance(array, self._torch.Tensor):
            floats = array.is_floating_point()
            return (array.detach().double() if floats else array.detach()).cpu().numpy()
        array = self._device.to_numpy(array)
        return array if array.dtype.kind in "iu" else array.astype(np.float64)


def apart(found: Sequence[np.ndarray], truth: Sequence[np.ndarray]) -> float:
    """The largest difference of all arrays, each over the largest number of its truth; nan if one is nan."""
    worst = 0.0
    for one, other in zip(found, truth, strict=True):
        if one.shape != other.shape:
            return np.inf
        difference = np.abs(one - np.asarray(other, np.float64)).max(initial=0.0)
        worst = np.maximum(
            worst, difference / (np.abs(other).max(initial=0.0) or 1.0)
        )  # unlike max, keeps nan
    return float(worst)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed; elsewhere nothing happens.

    Otherwise PyTorch faults in every page of every result again, and that is what would be measured.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim, mapped = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX
        mallopt(trim, 2**31 - 1)
        mallopt(mapped, 0)
