"""A run's figures as TensorBoard's event files, by that package itself, without TensorFlow or PyTorch."""

import time
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"  # in the run's directory
_NO_CURVES = ("kind", "step", "eta_s", "slowest_rank", "memory_rank")


def check() -> None:
    """Raise ValueError where the package is missing."""
    try:
        import tensorboard.summary.writer.event_file_writer  # noqa: F401
    except ImportError:
        raise ValueError("tensorboard: the package is missing: pip install tensorboard") from None


class Events:
    """Scalars of the records of metrics.jsonl: train/loss, train/lr, evaluation/held_out_loss and so on."""

    def __init__(self, directory: Path) -> None:
        """Begin another file in `directory`."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(directory))

    def write(self, kind: str, record: dict[str, Any]) -> None:
        """The numbers of a "step" or an "evaluation", at once; of other records nothing."""
        group = {"step": "train", "evaluation": "evaluation"}.get(kind)
        if group is None:
            return
        values = [
            self._summary.Summary.Value(tag=f"{group}/{name}", simple_value=number)
            for name, number in record.items()
            if isinstance(number, (int, float)) and name not in _NO_CURVES
        ]
        self._add(record["step"], summary=self._summary.Summary(value=values))

    def rewind(self, step: int) -> None:
        """Mark events of later steps as obsolete: the run goes on from there."""
        log = self._event.SessionLog
        self._add(step + 1, session_log=log(status=log.START))

    def close(self) -> None:
        """Write nothing more."""
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **what))
        self._writer.flush()
