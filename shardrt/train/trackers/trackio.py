"""A run in Trackio's database on this machine: `trackio show --project shardrt` draws it."""

import re
import warnings
from collections.abc import Mapping

from shardrt.train.trackers.protocol import PROJECT, TrackedRun

_NAME = "trackio_name"  # in the run's directory
_LOST = "(?:trackio failed to (?:flush|write)|Could not flush)"  # how its warnings of that begin


class Trackio:
    """Figures and settings, under the run's name; a resumed run continues there."""

    def start(self, run: TrackedRun) -> None:
        """Begin or continue the run, without a dashboard and without figures of this process."""
        import trackio

        self._failures: list[str] = []
        warnings.filterwarnings("always", message=_LOST)
        warnings.showwarning = self._note
        kept = run.folder / _NAME
        continued = run.resumed and kept.exists()
        self._trackio = trackio
        trackio.init(
            project=PROJECT,
            name=run.name,
            config=dict(run.settings),
            resume="allow" if continued else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        kept.write_text(f"{run.name}\n", encoding="utf-8")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Hand the values to the library's thread. Raises RuntimeError once the thread lost some."""
        self._trackio.log(dict(values), step=step)
        self._check()

    def finish(self, status: str) -> None:
        """Wait until all is in the database. Raises as `log`."""
        self._trackio.finish()
        self._check()

    def _note(self, message: Warning | str, *details: object) -> None:
        """Keep the library's warnings: with them alone it reports what it could not write."""
        if re.match(_LOST, str(message)):
            self._failures.append(str(message))

    def _check(self) -> None:
        if self._failures:
            raise RuntimeError(self._failures[0])
