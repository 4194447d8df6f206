"""A run in Weights & Biases: offline in RUN/wandb, until `wandb sync`; WANDB_MODE=online sends it at once."""

import os
import secrets
from collections.abc import Mapping

from shardrt.train.trackers.protocol import PROJECT, TrackedRun

_ID = "wandb_id"  # in the run's directory


class Wandb:
    """Figures and settings; a resumed run has the same id."""

    def start(self, run: TrackedRun) -> None:
        """Begin or continue the run, without figures of this process."""
        import wandb

        kept = run.folder / _ID
        name = kept.read_text(encoding="utf-8").strip() if run.resumed and kept.exists() else ""
        if not name:
            name = secrets.token_hex(8)
            kept.write_text(f"{name}\n", encoding="utf-8")
        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=name,
            resume="allow",
            config=dict(run.settings),
            dir=str(run.folder),
            settings=wandb.Settings(
                x_disable_stats=True, x_disable_meta=True, disable_code=True, disable_git=True
            ),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Hand the values to the library's service."""
        self._run.log(dict(values), step=step)

    def finish(self, status: str) -> None:
        """Wait until all is written, and end the service."""
        self._run.finish(exit_code=int(status == "failed"))
        self._wandb.teardown()
