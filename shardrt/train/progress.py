"""Timing of steps, and whole lines with aligned columns: a launcher passes nothing on before a newline."""

import time

import psutil

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
