"""Checkpoints in a bucket behind a mount: a rename copies, or there is none, and listings come late.

So files are written where they stay, each under a name that no other save has, and the manifest last: a
directory is a checkpoint when it has one. What such a file system must do is show a file whole or not at all.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardrt.checkpoint.disk import write_file
from shardrt.checkpoint.manifest import Damaged, Manifest
from shardrt.checkpoint.store import MANIFEST, STEP, Store, is_here, read_manifest

NEWEST = "newest"  # a file with the step that was published last, in case a listing lacks it: a hint, no more
_LATE = 10.0  # seconds until what another host has written must be seen
_LOOK = 0.1


class ObjectStore(Store):
    """As Store, without a rename."""

    BEGUN = "{}"
    FILE = "rank-{:05d}-{}-{}.safetensors"

    def begin(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)

    def publish(self, temporary: Path, manifest: Manifest, part: bool = False) -> Path:
        """Write the manifest: from then on the directory is a checkpoint. Raises OSError, Damaged.

        An earlier checkpoint of the same step loses its manifest before: a job that dies in between has lost
        that step.
        """
        _until(lambda: all(is_here(temporary, file) for file in manifest.files))
        if (temporary / MANIFEST).exists():
            self.disk.remove_file(temporary / MANIFEST)
        write_file(self.disk, temporary / MANIFEST, manifest.dump())
        if self.read(temporary) != manifest:
            raise Damaged(f"{temporary / MANIFEST}: it reads back as something else than what was written")
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
        message: list[Exception] = []

        def readable() -> bool:
            try:
                read_manifest(path)
            except (OSError, Damaged) as error:
                message[:] = [error]
                return False
            return True

        if not _until(readable):
            raise message[0]
        return read_manifest(path)

    def prune(
        self, keep_last: int, keep_every: int = 0, best: int | None = None, newest: int | None = None
    ) -> list[int]:
        """And what was begun before the newest, and never finished."""
        gone = super().prune(keep_last, keep_every, best, newest)
        last = max((step for step, _ in self.checkpoints() if newest is None or step <= newest), default=0)
        for path, found in self._named(STEP):
            if int(found[1]) < last and not (path / MANIFEST).exists():
                self.disk.remove(path)
        return gone

    def give_up(self, folder: Path) -> None:
        """What was begun goes at the next `prune`: there may be an earlier checkpoint of its step."""

    def _discard(self, path: Path) -> None:
        """The manifest goes first, so that half of a checkpoint never looks whole."""
        self.disk.remove_file(path / MANIFEST)
        self.disk.remove(path)


def _until(holds: Callable[[], Any]) -> bool:
    """Wait until it holds; False where it never does."""
    deadline = time.monotonic() + _LATE
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK)
    return True
