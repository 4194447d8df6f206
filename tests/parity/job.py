"""A training job that shardrt and PyTorch both run, as arrays in one .npz file; knows neither of them.

In:  `tokens`, `targets` (steps, batch of all ranks, time), `weight/NAME`, and the numbers of `Job`.
Out: `losses` (steps,), the mean over ranks, and `gradient/NAME`, `parameter/NAME` (steps, *shape): gradients
of a step, parameters after it. A job that is not `detailed` gives losses alone.
"""

import threading
from dataclasses import asdict, dataclass

import numpy as np

# CPython before 3.11.5 may raise SystemError where threads read headers of arrays (ast.literal_eval) at once.
_reading = threading.Lock()


@dataclass(frozen=True)
class Job:
    """A GPT, and whether more than losses is noted."""

    layers: int = 2
    heads: int = 2
    width: int = 32
    time: int = 16
    vocab: int = 61
    detailed: bool = True

    def save(self, path, weights: dict, tokens: np.ndarray, targets: np.ndarray) -> None:
        """Write the job's file."""
        named = {f"weight/{name}": values for name, values in weights.items()}
        np.savez(path, tokens=tokens, targets=targets, **named, **asdict(self))


def load(path) -> tuple[Job, dict, np.ndarray, np.ndarray]:
    """(job, weights, tokens, targets) of a file that Job.save wrote."""
    with _reading, np.load(path) as file:
        job = Job(**{name: file[name].item() for name in Job.__dataclass_fields__})
        return job, part(file, "weight"), file["tokens"], file["targets"]


def part(arrays, kind: str) -> dict[str, np.ndarray]:
    """The entries KIND/NAME by name."""
    return {name.removeprefix(f"{kind}/"): arrays[name] for name in arrays if name.startswith(f"{kind}/")}


class Notes:
    """What a run leaves: losses, and by step the gradients and parameters."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.arrays: dict[str, list[np.ndarray]] = {}

    def add(self, kind: str, values: dict[str, np.ndarray]) -> None:
        """Append this step's arrays."""
        for name, array in values.items():
            self.arrays.setdefault(f"{kind}/{name}", []).append(np.array(array))

    def result(self) -> dict[str, np.ndarray]:
        """The arrays of an output file."""
        return {"losses": np.array(self.losses), **{key: np.stack(v) for key, v in self.arrays.items()}}


def piece(batch: np.ndarray, rank: int, size: int) -> np.ndarray:
    """A rank's rows of a batch of all ranks."""
    rows = len(batch) // size
    return np.ascontiguousarray(batch[rank * rows : (rank + 1) * rows])
