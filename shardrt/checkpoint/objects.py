"""Checkpoints in a mounted bucket: a rename copies or is missing, and listings lag.

So files are written at their final place, each under a name that no other save uses, and the manifest last:
a directory with a manifest is a checkpoint. The file system must show a file completely or not at all.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardrt.checkpoint.manifest import Damaged, Manifest
from shardrt.checkpoint.store import MANIFEST, STEP, Store, is_here, read_manifest

NEWEST = "newest"  # a file with the latest published step, in case a listing lacks it: only a hint
_LATE = 10.0  # seconds until files of another host must be visible
_LOOK = 0.1


class ObjectStore(Store):
    """Like Store, without a rename."""

    BEGUN = "{}"
    FILE = "rank-{:05d}-{}-{}.safetensors"

    def begin(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)

    def publish(self, temporary: Path, manifest: Manifest, part: bool = False) -> Path:
        """Write the manifest: from then on the directory is a checkpoint.

        It first removes the manifest of an earlier checkpoint of the same step: a job that dies in between
        loses that step.

        Raises:
            OSError: if the file system fails.
            Damaged: if the file is damaged.
        """
        _until(lambda: all(is_here(temporary, file) for file in manifest.files))
        if (temporary / MANIFEST).exists():
            self.disk.remove_file(temporary / MANIFEST)
        self._write_manifest(temporary, manifest, part)
        with suppress(OSError):
            (self.root / NEWEST).write_text(str(manifest.step), encoding="utf-8")
        names = {MANIFEST, *(file.name for file in manifest.files)}
        for path in temporary.iterdir():  # of an earlier save of this step
            if path.name not in names:
                self.disk.remove_file(path)
        return temporary

    def checkpoints(self) -> list[tuple[int, Path]]:
        found = dict(super().checkpoints())
        with suppress(OSError, ValueError):
            step = int((self.root / NEWEST).read_text(encoding="utf-8"))
            found.setdefault(step, self.root / self.name(step))
        return sorted(
            ((step, path) for step, path in found.items() if (path / MANIFEST).is_file()), reverse=True
        )

    def read(self, path: Path, part: bool = False) -> Manifest:
        errors: list[Exception] = []

        def readable() -> bool:
            try:
                read_manifest(path)
            except (OSError, Damaged) as error:
                errors[:] = [error]
                return False
            return True

        if not _until(readable):
            raise errors[0]
        return read_manifest(path)

    def prune(
        self, keep_last: int, keep_every: int = 0, best: int | None = None, newest: int | None = None
    ) -> list[int]:
        """As in Store; also removes unfinished saves before the newest."""
        gone = super().prune(keep_last, keep_every, best, newest)
        last = max((step for step, _ in self.checkpoints() if newest is None or step <= newest), default=0)
        for path, found in self._named(STEP):
            if int(found[1]) < last and not (path / MANIFEST).exists():
                self.disk.remove(path)
        return gone

    def give_up(self, folder: Path) -> None:
        """Leave the unfinished files to the next `prune`: an earlier checkpoint of the step may exist."""

    def _discard(self, path: Path) -> None:
        """Remove the manifest first, so that half a checkpoint never looks complete."""
        self.disk.remove_file(path / MANIFEST)
        self.disk.remove(path)


def _until(holds: Callable[[], Any]) -> bool:
    """Wait until `holds()` is true; False if it stays false."""
    deadline = time.monotonic() + _LATE
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK)
    return True
