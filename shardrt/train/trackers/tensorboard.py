"""A run's figures as TensorBoard's event files, by that package itself, without TensorFlow or PyTorch."""

import time
from collections.abc import Mapping
from typing import Any

from shardrt.train.trackers.protocol import TrackedRun

FOLDER = "tensorboard"  # in the run's directory
_NO_CURVES = ("train/eta_s", "train/slowest_rank", "train/memory_rank")


class TensorBoard:
    """Scalars: train/loss, train/lr, evaluation/held_out_loss and so on."""

    def start(self, run: TrackedRun) -> None:
        """Begin another file; of a resumed run, mark events of later steps as obsolete."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(run.folder / FOLDER))
        if run.resumed:
            log = event_pb2.SessionLog
            self._add(run.step + 1, session_log=log(status=log.START))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write the values at once."""
        found = [
            self._summary.Summary.Value(tag=name, simple_value=number)
            for name, number in values.items()
            if name not in _NO_CURVES
        ]
        self._add(step, summary=self._summary.Summary(value=found))

    def finish(self, status: str) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **what))
        self._writer.flush()
