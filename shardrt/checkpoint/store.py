"""A folder of checkpoints: one directory per step, which exists under its name only when it is complete.

No file points to the newest: it is the highest step whose manifest verifies. The name of a directory that is
being written begins with ".tmp-", that of one being deleted with ".trash-"; the next start removes both. A
directory ".replaced-..." makes way for another checkpoint of its step; the next start restores it if need be.
Other contents of the folder are left alone.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from shardrt.checkpoint.disk import Disk, write_file
from shardrt.checkpoint.manifest import LARGEST, SMALL, Damaged, Manifest, SavedFile
from shardrt.checkpoint.rankfile import Reader

__all__ = ["MANIFEST"]

MANIFEST = "manifest.json"
STEP = re.compile(r"step-(\d{8,18})")
_REPLACED = ".replaced-"
_MADE_WAY = re.compile(rf"\.replaced-({STEP.pattern})")
_LEFT = re.compile(rf"\.tmp-{STEP.pattern}-[0-9a-f]{{8}}|\.trash-{STEP.pattern}")


class Store:
    """`root`: the folder; made with the first checkpoint."""

    BEGUN = ".tmp-{}-{}"  # the directory of an unfinished save, by its name and this run's tag
    FILE = "rank-{:05d}.safetensors"  # by rank, tag, and number of the save

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = Path(root)
        self.disk = disk or Disk()

    def begin(self) -> None:
        """Make the folder and its parents if missing.

        Raises:
            OSError: if the file system fails.
        """
        missing = [path for path in (self.root, *self.root.parents) if not path.exists()]
        for path in reversed(missing):
            try:
                self.disk.make_directory(path)
            except FileExistsError:  # another rank was first
                if not path.is_dir():
                    raise
            self.disk.sync_directory(path.parent)

    def publish(self, temporary: Path, manifest: Manifest, part: bool = False) -> Path:
        """Write the manifest and give the directory its name: from then on it is a checkpoint.

        Publishes only a checkpoint that `read_manifest` accepts. An existing checkpoint of the same step is
        renamed; `prune` removes it.

        Args:
            part: files of other hosts are not here.

        Raises:
            OSError: if the file system fails.
            Damaged: if the checkpoint can't be read back.
        """
        target = self.root / self.name(manifest.step)
        replaced = self.root / f"{_REPLACED}{target.name}"
        self._write_manifest(temporary, manifest, part)
        self.disk.sync_directory(temporary)
        if _ours(target):
            self._remove_replaced()
            with suppress(FileNotFoundError):  # `shardrt ckpt prune` has just removed it
                self.disk.rename(target, replaced)  # one rename can't exchange directories
        elif target.is_symlink() or target.exists():
            raise FileExistsError(17, "A file or folder that is no checkpoint has this name", str(target))
        try:
            self.disk.rename(temporary, target)
        except OSError:
            if replaced.exists():
                self.disk.rename(replaced, target)
            raise
        self.disk.sync_directory(self.root)
        return target

    def _write_manifest(self, path: Path, manifest: Manifest, part: bool) -> None:
        """Write the manifest into the directory `path`, and read it back. Raises OSError, Damaged."""
        write_file(self.disk, path / MANIFEST, manifest.dump())
        if self.read(path, part) != manifest:
            raise Damaged(f"{path / MANIFEST}: reading it back gives other bytes than were written")

    def read(self, path: Path, part: bool = False) -> Manifest:
        """Call `read_manifest`."""
        return read_manifest(path, part)

    def give_up(self, folder: Path) -> None:
        """Remove the files of a save that will not be published.

        Raises:
            OSError: if the file system fails.
        """
        self.disk.remove(folder)

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(step, directory) of all published checkpoints, newest first."""
        return sorted(((int(found[1]), path) for path, found in self._named(STEP)), reverse=True)

    def clean(self) -> list[OSError]:
        """Remove half-written or half-deleted checkpoints of ended processes; undo half a replacement.

        Returns:
            An error for each path that keeps such a name.

        Raises:
            OSError: if the folder can't be read.
        """
        errors = self._remove_replaced()
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            if any(kind.fullmatch(path.name) for kind in (STEP, _MADE_WAY, _LEFT)) and not _ours(path):
                errors.append(NotADirectoryError(20, "No folder, so none of ours", str(path)))
        for path, found in self._named(_MADE_WAY):
            if not (self.root / found[1]).exists():
                errors += _tried(self.disk.rename, path, self.root / found[1])
        for path, _ in self._named(_LEFT):
            errors += _tried(self.disk.remove, path)
        return errors

    def prune(
        self, keep_last: int, keep_every: int = 0, best: int | None = None, newest: int | None = None
    ) -> list[int]:
        """Remove all but the `keep_last` newest, every `keep_every`-th and step `best`; returns the removed.

        Also removes checkpoints that another of their step replaced. Tries all, then raises the first
        OSError.

        Args:
            newest: checkpoints above that step stay and do not count: a run that could not use them restarted
                before them.
        """
        errors, gone = self._remove_replaced(), []
        chosen = [(step, path) for step, path in self.checkpoints() if newest is None or step <= newest]
        for step, path in chosen[keep_last:]:
            if step != best and not (keep_every and step % keep_every == 0):
                failed = _tried(self._discard, path)
                gone += [] if failed else [step]
                errors += failed
        if errors:
            raise errors[0]
        return gone

    def _named(self, pattern: re.Pattern) -> Iterator[tuple[Path, re.Match]]:
        """The directories whose names match, in order, with the match; skips links and files."""
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            if (found := pattern.fullmatch(path.name)) and _ours(path):
                yield path, found

    def _remove_replaced(self) -> list[OSError]:
        """Remove checkpoints whose replacement exists; returns the errors."""
        errors = []
        for path, found in self._named(_MADE_WAY):
            if (self.root / found[1]).exists():
                errors += _tried(self.disk.remove, path)
        return errors

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint; rename it first, so that half a checkpoint never looks complete."""
        trash = self.root / f".trash-{path.name}"
        if trash.exists():
            self.disk.remove(trash)
        with suppress(FileNotFoundError):  # `shardrt ckpt prune` or the run itself was first
            self.disk.rename(path, trash)
            self.disk.remove(trash)

    @staticmethod
    def name(step: int) -> str:
        """The name of a step's directory."""
        return f"step-{step:08d}"


def _ours(path: Path) -> bool:
    """Whether the path is a directory, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def _tried(operation: Callable, *paths: Path) -> list[OSError]:
    """Call `operation`; returns its OSError in a list, [] if it succeeds."""
    try:
        operation(*paths)
    except OSError as error:
        return [error]
    return []


def is_here(path: Path, file: SavedFile) -> bool:
    """Whether a file of a checkpoint is in this directory, with its full length."""
    place = path / file.name
    return not place.is_symlink() and place.is_file() and place.stat().st_size == file.bytes


def read_manifest(path: Path, part: bool = False) -> Manifest:
    """The manifest of the checkpoint in directory `path`, checked against the sizes of its files.

    Args:
        part: some files may be on other hosts.

    Raises:
        Damaged: naming file and fault.
        FileNotFoundError: if there is no checkpoint.
    """
    file = path / MANIFEST
    if file.is_symlink() or not file.is_file():
        raise FileNotFoundError(2, "No checkpoint here", str(file))
    described = sum(other.stat().st_size for other in path.glob("rank-*") if other.is_file())
    size, most = file.stat().st_size, min(LARGEST, SMALL + described // 100)
    if size > most:
        raise Damaged(f"{file}: it has {size} bytes, more than a manifest of {described} bytes allows")
    manifest = Manifest.parse(file.read_bytes(), file)
    for saved in manifest.files:
        place = path / saved.name
        if part and not place.exists():
            continue
        if place.is_symlink() or not place.is_file():
            raise Damaged(f"{place}: the file is missing")
        if place.stat().st_size != saved.bytes:
            raise Damaged(f"{place}: the file has {place.stat().st_size} bytes, but {saved.bytes} were saved")
    return manifest


def verify(path: Path, part: bool = False) -> Manifest:
    """Read the whole checkpoint in `path`.

    Args:
        part: some files may be on other hosts; reads the files that are here.

    Raises:
        Damaged: naming the first wrong file and bytes.
    """
    manifest = read_manifest(path, part)
    for saved in manifest.files:
        if part and not is_here(path, saved):
            continue
        with closing(Reader(path, saved)) as reader:
            reader.verify()
    return manifest
