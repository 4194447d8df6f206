"""Timing of steps, and whole lines with aligned columns: a launcher passes nothing on before a newline."""

import time
from collections.abc import Callable, Mapping
from math import isnan, nan
from typing import Any

import numpy as np

from shardrt import functional as F
from shardrt.autograd import no_grad
from shardrt.comm.mesh import DeviceMesh
from shardrt.tensor import Tensor
from shardrt.train.metrics import over_ranks

__all__ = ["evaluation_line", "step_line"]

MEGABYTE = 1e6
# Of the matmul that product_flops times: its rows at first and at most, the least seconds, how often.
_SIDE, _LONGEST = 512, 8192
_ENOUGH, _TRIES = 2e-3, 20
_SHORT = {"token": "tok", "image": "img"}


class Stopwatch:
    """Wall-clock time per step over the steps since the last reading.

    Args:
        per_step: tokens, images or `unit`, over all ranks.
        ideal: seconds of a step in which only matmuls take time, and run as fast as this machine can; 0 where
            that is not known.
    """

    def __init__(self, total_steps: int, per_step: int, unit: str = "token", ideal: float = 0.0) -> None:
        self.total_steps = total_steps
        self.per_step = per_step
        self.unit = unit
        self.ideal = ideal
        self._compiles = True
        self.restart(0)

    def restart(self, step: int) -> None:
        """Time from now on, `step` steps being done: earlier work (an evaluation, say) is left out."""
        self._step, self._since = step, time.perf_counter()

    def read(self, step: int) -> dict[str, float]:
        """{"ms" per step, "tokens_per_s" or so, "mfu", "eta_s" until all steps are done}, and restart.

        The last two are NaN where all that was timed is a first step: it may have waited for the compiler.
        """
        seconds = (time.perf_counter() - self._since) / (step - self._step)
        compiles, self._compiles = self._compiles and step - self._step == 1, False
        self.restart(step)
        usual = nan if compiles else seconds
        return {
            "ms": 1e3 * seconds,
            f"{self.unit}s_per_s": self.per_step / seconds,
            **({"mfu": self.ideal / usual} if self.ideal else {}),
            "eta_s": usual * (self.total_steps - step),
        }


class Ranks:
    """Which rank takes most memory, and for which one the others wait.

    Those of the slowest rank are the fewest, since the others are there before it.

    Args:
        in_collectives: gives this rank's seconds in collectives so far.
    """

    def __init__(self, mesh: DeviceMesh, in_collectives: Callable[[], float]) -> None:
        self._mesh = mesh
        self._in_collectives = in_collectives
        self.restart(0)

    def restart(self, step: int) -> None:
        """Count from now on, `step` steps being done."""
        self._step, self._before = step, self._in_collectives()

    def read(self, step: int) -> dict[str, float]:
        """{"memory_mb" of "memory_rank", and with several ranks "slowest_rank", "lag_ms"}. Collective.

        lag_ms: per step, how much longer the rank that waited most was in collectives than the slowest.
        """
        own = (self._in_collectives() - self._before) / (step - self._step)
        mine = np.array([memory_mb(), own])  # always as many bytes: a simulated step takes one time
        everyone = self._mesh.communicator("control").all_gather_bytes(mine.tobytes())
        self.restart(step)
        memory, seconds = zip(*(np.frombuffer(each).tolist() for each in everyone), strict=True)
        found = {"memory_mb": max(memory), "memory_rank": memory.index(max(memory))}
        if len(seconds) > 1:
            lag = 1e3 * (max(seconds) - min(seconds))
            found |= {"slowest_rank": seconds.index(min(seconds)), "lag_ms": lag}
        return found


def expert_figures(mesh: DeviceMesh, loads: Mapping[str, np.ndarray]) -> dict[str, float]:
    """{"expert_load", "empty_experts"} from each router's load (nn.expert_load); {} without any. Collective.

    expert_load: the tokens of the busiest expert of a layer over those of equal shares, of the layer where
    that is highest. empty_experts: the part of all layers' experts that no token chose.
    """
    if not loads:
        return {}
    mine = np.concatenate(list(loads.values()))  # of this rank's own tokens; layers of other stages have 0
    everyone = np.array(over_ranks(mesh, "sum", *mine.tolist()))  # numbers of tokens: the sum is exact
    layers = np.split(everyone, np.cumsum([load.size for load in loads.values()])[:-1])
    return {
        "expert_load": max(float(layer.max() / max(1, layer.sum()) * layer.size) for layer in layers),
        "empty_experts": float(np.mean(everyone == 0)),
    }


def product_flops() -> float:
    """Operations per second of a matmul of square float32 matrices here and now; the best of several.

    Large enough that starting it does not count. With ranks that share a machine, all measure at once.
    """
    side, seconds = _SIDE // 2, 0.0
    with no_grad():
        while seconds < _ENOUGH and side < _LONGEST:
            side *= 2
            a = Tensor(np.ones((side, side), np.float32))
            seconds = min(_seconds_of(a) for _ in range(4))
        tries = [_seconds_of(a) for _ in range(_TRIES)]  # something else may run now and then
        seconds = min(seconds, *tries)
    return 2.0 * side**3 / seconds


def _seconds_of(a: Tensor) -> float:
    begin = time.perf_counter()
    F.matmul(a, a)[0, 0].item()  # the number is there when the matmul is done, on every device
    return time.perf_counter() - begin


def memory_mb() -> float:
    """Resident memory of this process in 10^6 bytes; pages that it shares with other ranks are included."""
    import psutil  # `make gpu` does without it

    return psutil.Process().memory_info().rss / MEGABYTE


def step_line(record: dict[str, Any], total_steps: int, unit: str = "token", width: int = 80) -> str:
    """One line of at most `width` columns for a record of metrics.jsonl about training steps.

    Figures that do not fit are left out, the least important first; metrics.jsonl has them all. mfu,
    model FLOPs utilisation: as a part of this machine's matmul rate when nothing else runs;
    not shown above 1, where something else did run as that was measured.
    """
    mixed = "expert_load" in record
    fields = [  # in the order in which they are read, and how important they are
        (0, f"step {record['step']:{len(str(total_steps))}}/{total_steps}"),
        (0, f"loss {record['loss']:7.4f}"),
        (2, f"norm {record['norm']:7.3f}"),
        (3, f"load {record['expert_load']:4.1f}x" if mixed else ""),  # of the busiest expert
        (4, f"{100 * record['empty_experts']:2.0f}% empty" if mixed else ""),
        (9, f"lr {record['lr']:.1e}"),
        (7, f"{record['ms']:7.1f} ms"),
        (1, f"{_short(record[f'{unit}s_per_s']):>6} {_SHORT[unit]}/s"),
        (6, f"mfu {_percent(record['mfu'])}" if "mfu" in record else ""),
        (8, f"{record['memory_mb']:5.0f} MB"),
        (5, f"left {clock(record['eta_s']):>7}"),
        (10, f"rank {record['slowest_rank']} {record['lag_ms']:5.1f} ms late" if "lag_ms" in record else ""),
    ]
    kept = [field for field in fields if field[1]]
    while len(kept) > 2 and len(_joined(kept)) > width:
        kept.remove(max(kept))
    return _joined(kept)


def _joined(fields: list[tuple[int, str]]) -> str:
    return "  ".join(text for _, text in fields)


def _short(number: float) -> str:
    """At most six characters up to 10^12: 812.5, 20.2k."""
    for unit in ("", "k", "M"):
        if not abs(number) >= 999.95:  # NaN as it is
            return f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}G"


def _percent(part: float) -> str:
    return f"{100 * part:2.0f}%" if part <= 1 else " --"


def evaluation_line(record: dict[str, Any], total_steps: int) -> str:
    """One line for a record of metrics.jsonl about held-out data."""
    width, parts = len(str(total_steps)), [f"held-out loss {record['held_out_loss']:.4f}"]
    if "held_out_bits_per_byte" in record:
        parts.append(f"{record['held_out_bits_per_byte']:.4f} bits per byte")
    if "held_out_accuracy" in record:
        parts.append(f"{100 * record['held_out_accuracy']:.2f} % right")
    return f"step {record['step']:{width}}/{total_steps}  {', '.join(parts)}"


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss; -- for NaN."""
    if isnan(seconds):
        return "--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
