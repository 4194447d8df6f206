"""Timing of steps, and whole lines with aligned columns: a launcher passes nothing on before a newline."""

import time
from collections.abc import Callable

import psutil

from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.talk import from_all

MEGABYTE = 1e6
_SHORT = {"token": "tok", "image": "img"}


class Stopwatch:
    """Wall-clock time per step over the steps since the last reading.

    per_step: tokens, images or what `unit` says, over all ranks.
    """

    def __init__(self, total_steps: int, per_step: int, unit: str = "token") -> None:
        self.total_steps = total_steps
        self.per_step = per_step
        self.unit = unit
        self.restart(0)

    def restart(self, step: int) -> None:
        """Time from now on, `step` steps being done: what ran before (an evaluation, say) is left out."""
        self._step, self._since = step, time.perf_counter()

    def read(self, step: int) -> dict[str, float]:
        """{"ms" per step, "tokens_per_s" or so, "eta_s" until all steps are done}, and restart."""
        seconds = (time.perf_counter() - self._since) / (step - self._step)
        self.restart(step)
        left = seconds * (self.total_steps - step)
        return {"ms": 1e3 * seconds, f"{self.unit}s_per_s": self.per_step / seconds, "eta_s": left}


class Ranks:
    """Which rank takes most memory, and for which one the others wait.

    in_collectives: gives this rank's seconds in collectives so far. Those of the slowest rank are the fewest,
    since the others are there before it.
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
        everyone = from_all(self._mesh.communicator("control"), [memory_mb(), own])
        self.restart(step)
        memory, seconds = zip(*everyone, strict=True)
        found = {"memory_mb": max(memory), "memory_rank": memory.index(max(memory))}
        if len(seconds) > 1:
            lag = 1e3 * (max(seconds) - min(seconds))
            found |= {"slowest_rank": seconds.index(min(seconds)), "lag_ms": lag}
        return found


def memory_mb() -> float:
    """Resident memory of this process in 10^6 bytes; pages that it shares with other ranks are included."""
    return psutil.Process().memory_info().rss / MEGABYTE


def step_line(record: dict, total_steps: int, unit: str = "token") -> str:
    """One line for a record of metrics.jsonl about training steps."""
    width = len(str(total_steps))
    return (
        f"step {record['step']:{width}}/{total_steps}  loss {record['loss']:7.4f}  "
        f"norm {record['norm']:7.3f}  lr {record['lr']:.2e}  "
        f"{record['ms']:8.1f} ms  {record[f'{unit}s_per_s']:8.0f} {_SHORT[unit]}/s  "
        f"{record['memory_mb']:6.0f} MB  ETA {clock(record['eta_s']):>7}"
    )


def evaluation_line(record: dict, total_steps: int) -> str:
    """One line for a record of metrics.jsonl about held-out data."""
    width, told = len(str(total_steps)), [f"held-out loss {record['held_out_loss']:.4f}"]
    if "held_out_bits_per_byte" in record:
        told.append(f"{record['held_out_bits_per_byte']:.4f} bits per byte")
    if "held_out_accuracy" in record:
        told.append(f"{100 * record['held_out_accuracy']:.2f} % right")
    return f"step {record['step']:{width}}/{total_steps}  {', '.join(told)}"


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
