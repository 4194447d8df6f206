"""A run in MLflow: where MLFLOW_TRACKING_URI says, or in MLflow's own default, which is ./mlflow.db."""

import os
import time
from collections.abc import Mapping

from shardrt.train.trackers.protocol import PROJECT, TrackedRun, flat

_ID = "mlflow_run_id"  # in the run's directory
_AT_ONCE = 100  # parameters that a server takes in one request
_LONGEST = 500  # characters of a parameter that every server takes
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow:
    """Metrics, and settings as parameters; a resumed run has the same id."""

    def start(self, run: TrackedRun) -> None:
        """Begin or continue the run in the experiment MLFLOW_EXPERIMENT_NAME, or "shardrt"."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._client = Metric, MlflowClient()
        kept = run.folder / _ID
        if run.resumed and kept.exists():
            self._id = kept.read_text(encoding="utf-8").strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(experiment)
        place = found.experiment_id if found else self._client.create_experiment(experiment)
        self._id = self._client.create_run(place, run_name=run.name).info.run_id
        kept.write_text(f"{self._id}\n", encoding="utf-8")
        given = [Param(name, str(value)[:_LONGEST]) for name, value in flat(run.settings).items()]
        for first in range(0, len(given), _AT_ONCE):
            self._client.log_batch(self._id, params=given[first : first + _AT_ONCE])

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send the values and wait for the server's answer."""
        now = round(1000 * time.time())
        self._client.log_batch(
            self._id, metrics=[self._metric(name, value, now, step) for name, value in values.items()]
        )

    def finish(self, status: str) -> None:
        """Set the run's status."""
        self._client.set_terminated(self._id, _STATUS[status])
