"""A folder of checkpoints: one directory per step, which exists under its name only when it is complete.

No file points to the newest: it is the highest step whose manifest verifies. The name of a directory that is
being written begins with ".tmp-", that of one being deleted with ".trash-"; the next start removes both. A
directory ".replaced-..." makes way for another checkpoint of its step; the next start restores it if need be.
"""

import re
from contextlib import closing
from pathlib import Path

from shardrt.checkpoint.disk import Disk
from shardrt.checkpoint.manifest import LARGEST, Damaged, Manifest
from shardrt.checkpoint.rankfile import Reader

MANIFEST = "manifest.json"
_REPLACED = ".replaced-"
_STEP = re.compile(r"step-(\d{8,})")


class Store:
    """`root`: the folder; made when the first checkpoint is."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = Path(root)
        self.disk = disk or Disk()

    def begin(self) -> None:
        """Make the folder, if it is not there. Raises OSError."""
        if not self.root.exists():
            self.disk.make_directory(self.root)
            self.disk.sync_directory(self.root.parent)

    def publish(self, temporary: Path, manifest: Manifest) -> Path:
        """Write the manifest and give the directory its name: from then on it is a checkpoint.

        A checkpoint of the same step that is there already makes way; `prune` removes it. Raises OSError.
        """
        data, target = manifest.dump(), self.root / self.name(manifest.step)
        replaced = self.root / f"{_REPLACED}{target.name}"
        file = self.disk.create(temporary / MANIFEST)
        try:
            self.disk.write(file, memoryview(data))
            self.disk.sync(file)
        finally:
            self.disk.close(file)
        self.disk.sync_directory(temporary)
        if target.exists():
            self._remove_replaced()
            self.disk.rename(target, replaced)  # one rename can't exchange directories
        try:
            self.disk.rename(temporary, target)
        except OSError:
            if replaced.exists():
                self.disk.rename(replaced, target)
            raise
        self.disk.sync_directory(self.root)
        return target

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(step, directory) of all that were published, the newest first."""
        found = []
        for path in self.root.iterdir() if self.root.is_dir() else ():
            match = _STEP.fullmatch(path.name)
            if match and path.is_dir() and not path.is_symlink():
                found.append((int(match.group(1)), path))
        return sorted(found, reverse=True)

    def clean(self) -> None:
        """Remove what a process that is gone has left half written or half deleted; undo half a replacement.

        Raises OSError.
        """
        self._remove_replaced()
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            if path.name.startswith(_REPLACED):
                self.disk.rename(path, self.root / path.name.removeprefix(_REPLACED))
            elif path.name.startswith((".tmp-", ".trash-")):
                self.disk.remove(path)

    def prune(self, keep_last: int, keep_every: int = 0, best: int | None = None) -> list[int]:
        """Remove all but the `keep_last` newest, every `keep_every`-th and step `best`; gives what went.

        Also removes what was replaced by another checkpoint of its step. Raises OSError.
        """
        self._remove_replaced()
        gone = []
        for place, (step, path) in enumerate(self.checkpoints()):
            if place >= keep_last and step != best and not (keep_every and step % keep_every == 0):
                self._discard(path)
                gone.append(step)
        return gone

    def _remove_replaced(self) -> None:
        """Remove checkpoints that made way for one that is there."""
        for path in sorted(self.root.glob(f"{_REPLACED}*")):
            if (self.root / path.name.removeprefix(_REPLACED)).exists():
                self.disk.remove(path)

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint; renamed first, so that half of one never looks whole."""
        trash = self.root / f".trash-{path.name}"
        if trash.exists():
            self.disk.remove(trash)
        self.disk.rename(path, trash)
        self.disk.remove(trash)

    @staticmethod
    def name(step: int) -> str:
        """The name of a step's directory."""
        return f"step-{step:08d}"


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in directory `path`, checked against the sizes of its files.

    Raises Damaged, naming file and fault; FileNotFoundError where there is no checkpoint.
    """
    file = path / MANIFEST
    if file.is_symlink() or not file.is_file():
        raise FileNotFoundError(2, "No checkpoint here", str(file))
    if file.stat().st_size > LARGEST:
        raise Damaged(f"{file}: it has {file.stat().st_size} bytes, more than any manifest")
    manifest = Manifest.parse(file.read_bytes(), file)
    for saved in manifest.files:
        place = path / saved.name
        if place.is_symlink() or not place.is_file():
            raise Damaged(f"{place}: it is missing")
        if place.stat().st_size != saved.bytes:
            raise Damaged(f"{place}: it has {place.stat().st_size} bytes, and {saved.bytes} were saved")
    return manifest


def verify(path: Path) -> Manifest:
    """Read the whole checkpoint in `path`. Raises Damaged, naming the first file and bytes that are wrong."""
    manifest = read_manifest(path)
    for saved in manifest.files:
        with closing(Reader(path, saved)) as reader:
            reader.verify()
    return manifest
