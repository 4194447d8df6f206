"""The file system operations of a checkpoint, one method each, so that tests can stop at any.

Nothing is buffered here: when `write` returns, the kernel has the data; when `sync` returns, the disk has it.
"""

import errno
import fcntl
import os
import shutil
import warnings
from contextlib import suppress
from pathlib import Path

__all__ = ["Disk", "write_file"]

# Errors of a file system that can't sync directories.
_NO_DIRECTORIES = errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS


class Disk:
    """The real file system."""

    def make_directory(self, path: Path) -> None:
        """Make one directory, whose parent exists.

        Raises:
            FileExistsError: if the file exists.
        """
        os.mkdir(path)

    def create(self, path: Path, direct: bool = False) -> int:
        """Open a new file for writing; gives its descriptor.

        Args:
            direct: writes bypass the page cache, if the file system supports that.

        Raises:
            FileExistsError: if the file exists.
        """
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if direct:
            _set_direct(file, True)
        return file

    def write(self, file: int, data: memoryview) -> None:
        """Append all of `data`; from the first size that is not whole pages on, through the page cache."""
        while data:
            try:
                data = data[os.write(file, data) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not _set_direct(file, False):
                    raise

    def sync(self, file: int) -> None:
        """Wait until the written data is on the disk."""
        os.fsync(file)

    def close(self, file: int) -> None:
        """Close a descriptor."""
        os.close(file)

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in a directory are on the disk; warns where the file system can't do that."""
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(file)
        except OSError as error:
            if error.errno not in _NO_DIRECTORIES:
                raise
            warnings.warn(
                "the file system can't sync directories: if the machine stops, the newest checkpoints may go",
                stacklevel=2,
            )
        finally:
            os.close(file)

    def rename(self, old: Path, new: Path) -> None:
        """Give `old` another name, at once. `new` must not exist, or be an empty directory."""
        os.rename(old, new)

    def remove_file(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def remove(self, path: Path) -> None:
        """Remove a directory with its contents, even if another process removes it at the same time."""
        while path.exists():
            with suppress(FileNotFoundError):
                shutil.rmtree(path)


def write_file(disk: Disk, path: Path, data: bytes) -> None:
    """Make a file with these bytes, and wait until they are on the disk.

    Raises:
        FileExistsError: if the file exists.
        OSError: if the file system fails.
    """
    file = disk.create(path)
    try:
        disk.write(file, memoryview(data))
        disk.sync(file)
    finally:
        disk.close(file)


def _set_direct(file: int, wanted: bool) -> bool:
    """Whether that changed how the file is written."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    changed = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, changed)
    except OSError:  # not on this file system
        return False
    return changed != flags
