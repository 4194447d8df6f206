"""What is measured: the shape of a GPT, its batches and the figures of a run; the same for every contestant.

Knows neither shardrt nor PyTorch, and a contestant imports nothing else of bench.
"""

import argparse
import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np


@dataclass(frozen=True)
class Workload:
    """One training job: a GPT and a batch per rank, on tokens drawn at random."""

    layers: int = 6
    dim: int = 384
    heads: int = 6
    seq: int = 256
    batch: int = 8
    vocab: int = 256

    def batch_of(self, step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets (batch, seq) of a rank at a step: a function of the two alone."""
        generator = np.random.default_rng((step, rank))
        text = generator.integers(0, self.vocab, (self.batch, self.seq + 1))
        return np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])

    def arguments(self) -> list[str]:
        """The command-line arguments that `add_arguments` reads this workload from."""
        return [word for name, value in asdict(self).items() for word in (f"--{name}", str(value))]


LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.1

SIZES = {
    "small": Workload(),
    "gpt2": Workload(layers=12, dim=768, heads=12, seq=256, batch=2, vocab=50304),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that all contestants share: the workload, how often, and from which weights."""
    for field in fields(Workload):
        parser.add_argument(f"--{field.name}", type=positive, default=field.default, metavar="N")
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="timed steps (20)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="steps before the timed ones (2)")
    parser.add_argument("--clip", type=float, metavar="NORM", help="clip the global gradient norm to this")
    parser.add_argument("--weights", metavar="DIR", help="start from DIR/model.safetensors")
    parser.add_argument("--json", action="store_true", help="print only the last line, one JSON object")


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def workload_of(options: argparse.Namespace) -> Workload:
    """The workload that the options describe."""
    return Workload(**{field.name: getattr(options, field.name) for field in fields(Workload)})


def figures(
    workload: Workload,
    *,
    contestant: str,
    step_seconds: Sequence[Sequence[float]],
    losses: Sequence[Sequence[float]],
    peak_rss_mb: Sequence[float],
    parameters: int,
    settings: dict,
    versions: dict,
) -> dict:
    """The JSON object of a run. `step_seconds`, `losses` and `peak_rss_mb` hold one entry per rank.

    Each rank times its steps without a barrier; what counts is the median of the slowest rank. `losses` are
    the mean over ranks, of the warm-up steps too.
    """
    slowest = max(step_seconds, key=statistics.median)
    median = statistics.median(slowest)
    mean_losses = [statistics.fmean(step) for step in zip(*losses, strict=True)]
    return {
        "contestant": contestant,
        "step_ms_median": round(1e3 * median, 3),
        "tokens_per_s": round(len(step_seconds) * workload.batch * workload.seq / median, 1),
        "peak_rss_mb": round(max(peak_rss_mb), 1),
        "world_size": len(step_seconds),
        "parameters": parameters,
        "loss": mean_losses[-1],
        "losses": mean_losses,
        "step_ms": [round(1e3 * seconds, 3) for seconds in slowest],
        "workload": asdict(workload),
        "settings": settings,
        "versions": {"python": platform.python_version(), "numpy": np.__version__, **versions},
    }


def show(result: dict, options: argparse.Namespace) -> None:
    """Print the figures for a reader, unless --json, and then, as the last line, the JSON object."""
    if not options.json:
        print(
            f"{result['contestant']}: {result['world_size']} ranks, "
            f"{result['step_ms_median']:.1f} ms per step, "
            f"{result['tokens_per_s']:.0f} tokens/s, {result['peak_rss_mb']:.0f} MB per rank, "
            f"loss {result['loss']:.6f}"
        )
    print(json.dumps(result), flush=True)


def process_peak_mb() -> float:
    """Peak resident memory of this process so far, in 10^6 bytes, pages shared with other ranks included.

    From /proc: getrusage's figure survives exec and can be the parent's.
    """
    with open("/proc/self/status", encoding="ascii") as file:
        kilobytes = next(line.split()[1] for line in file if line.startswith("VmHWM:"))
    return int(kilobytes) * 1024 / 1e6
