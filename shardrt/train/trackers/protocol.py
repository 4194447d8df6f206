"""What a tracker is: three methods. And which trackers there are, by the names that a recipe uses."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

__all__ = ["TRACKERS", "TrackedRun", "Tracker", "check", "tracker_of"]

TRACKERS = {
    "trackio": "shardrt.train.trackers.trackio:Trackio",
    "wandb": "shardrt.train.trackers.wandb:Wandb",
    "mlflow": "shardrt.train.trackers.mlflow:MLflow",
    "tensorboard": "shardrt.train.trackers.tensorboard:TensorBoard",
}
PROJECT = "shardrt"  # of the runs, where a tracker wants one and the user names none


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker gets to know of a run when it starts."""

    name: str  # of its folder in runs/
    folder: Path  # absolute; a tracker may keep files here, as the id of its run
    settings: Mapping[str, Any]  # the recipe, in types of JSON: {"steps": 100, "optimizer": {"lr": 0.001}}
    resumed: bool  # whether the folder may be that of a run which now goes on after `step`
    step: int  # updates of the weights so far


class Tracker(Protocol):
    """Shows a run's figures. It lives in a process of its own, and may raise, wait and print there.

    The process calls `start` first, `log` in the order of the records, and `finish` last.
    """

    def start(self, run: TrackedRun) -> None:
        """Begin a run, or continue it."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add figures of a step, as {"train/loss": 2.5}. One step may have several calls."""

    def finish(self, status: str) -> None:
        """Write everything. status: "finished", "stopped" (it can be resumed) or "failed"."""


def check(trackers: Iterable[str]) -> None:
    """Import nothing; raise ValueError for a tracker whose package is not installed."""
    for name in trackers:
        package = name.partition(":")[0].partition(".")[0]
        if find_spec(package) is None:
            install = f": pip install 'shardrt[{name}]'" if name in TRACKERS else ""
            raise ValueError(f"report.trackers: the package {package} is missing{install}")


def tracker_of(name: str) -> Tracker:
    """The tracker that a recipe names: one of TRACKERS, or package.module:Class, made without arguments.

    Raises whatever its module and its constructor raise.
    """
    module, _, made = TRACKERS.get(name, name).partition(":")
    return getattr(import_module(module), made)()


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings without nesting: {"optimizer.lr": 0.001}."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inner = flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        found |= inner
    return found
