"""A run in Weights & Biases: offline in RUN/wandb, until `wandb sync`; WANDB_MODE=online sends it at once."""

import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from shardrt.train.trackers.protocol import PROJECT, TrackedRun

_ID = "wandb_id"  # in the run's directory
_LOG = "logs/debug-internal.log"  # of the library's service, in its own directory of the run
_LOST = re.compile(rb'"level":"ERROR","msg":"(writer: [^"]*)')


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
        self._log, self._read, self._error = Path(self._run.dir).parent / _LOG, 0, ""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Hand the values to the library's service. Raises RuntimeError once the service lost a record."""
        self._run.log(dict(values), step=step)
        self._check()

    def finish(self, status: str) -> None:
        """Wait until all is written, and end the service. Raises as `log`."""
        self._run.finish(exit_code=int(status == "failed"))
        self._wandb.teardown()
        self._check()

    def _check(self) -> None:
        """Read on in the service's log: it reports there alone what it could not write, as on a full disk."""
        if not self._error:
            with suppress(OSError), self._log.open("rb") as log:
                log.seek(self._read)
                lines = log.read()
                self._read += lines.rfind(b"\n") + 1  # a last line without its end is read again
                if found := _LOST.search(lines):
                    self._error = found[1].decode(errors="replace")
        if self._error:
            raise RuntimeError(self._error)
