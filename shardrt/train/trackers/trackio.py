"""A run in Trackio's database on this machine: `trackio show --project shardrt` draws it."""

from collections.abc import Mapping

from shardrt.train.trackers.protocol import PROJECT, TrackedRun

_NAME = "trackio_name"  # in the run's directory


class Trackio:
    """Figures and settings, under the run's name; a resumed run continues there."""

    def start(self, run: TrackedRun) -> None:
        """Begin or continue the run, without a dashboard and without figures of this process."""
        import trackio

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
        """Hand the values to the library's thread."""
        self._trackio.log(dict(values), step=step)

    def finish(self, status: str) -> None:
        """Wait until all is in the database."""
        self._trackio.finish()
