"""Where the ranks of a communicator leave what they give to a collective: of threads, or of processes.

A post has a key, the same for all who meet, and the name of who posts. It goes when all have taken it.
"""

import itertools
import os
import pickle
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

_PATIENCE = 60.0  # seconds until all ranks have come in
_numbers = itertools.count(1)
_rooms: dict[bytes, "Room"] = {}
_made: list[str] = []  # folders
_lock = threading.Lock()
_TAKEN = "taken "


class Room:
    """Of threads. `take` may be called when all have posted."""

    def __init__(self) -> None:
        self._posts: dict[tuple, dict] = {}
        self._taken: dict[tuple, int] = {}

    def post(self, key: tuple, name: object, meets: int, given: object) -> None:
        with _lock:
            self._posts.setdefault(key, {})[name] = given

    def count(self, key: tuple) -> int:
        return len(self._posts.get(key, ()))

    def take(self, key: tuple) -> dict:
        """Name -> what it gave."""
        with _lock:
            given = self._posts[key]
            self._taken[key] = self._taken.get(key, 0) + 1
            if self._taken[key] == len(given):
                del self._posts[key], self._taken[key]
            return given

    def awaited(self) -> bool:
        return False  # whoever waits lets all threads' streams go on

    def leave(self, rank: int) -> None:
        """Nobody gives any more."""


class Folder(Room):
    """Of processes: a folder for each key, with a file for each post, and for each that has taken it."""

    def __init__(self, path: Path, size: int, rank: int) -> None:
        self._path, self._size, self._rank = path, size, str(rank)

    def post(self, key: tuple, name: object, meets: int, given: object) -> None:
        folder = self._at(key)
        folder.mkdir(exist_ok=True)
        whole = self._path / f"{folder.name}.{name}"  # complete before it is seen
        whole.write_bytes(pickle.dumps((name, given)))
        whole.rename(folder / str(name))

    def count(self, key: tuple) -> int:
        return len(_posts(self._at(key)))

    def take(self, key: tuple) -> dict:
        folder = self._at(key)
        files = _posts(folder)
        given = dict(pickle.loads((folder / name).read_bytes()) for name in files)
        os.close(tempfile.mkstemp(prefix=_TAKEN, dir=folder)[0])
        try:
            whole = len(os.listdir(folder)) == 2 * len(files)
        except FileNotFoundError:  # another one has taken it since, and was the last
            return given
        if whole:
            shutil.rmtree(folder, ignore_errors=True)
        return given

    def awaited(self) -> bool:
        return any(self._is_awaited(key.name) for key in self._path.iterdir() if key.is_dir())

    def _is_awaited(self, key: str) -> bool:
        kind, *numbers = key.split("-")
        own = [self._rank] if kind == "all" else []
        if kind == "from":
            own = [
                end for end, rank in zip(("source", "target"), numbers[:2], strict=True) if rank == self._rank
            ]
        posted = _posts(self._path / key)
        return any(name not in posted for name in own)

    def leave(self, rank: int) -> None:
        """The last one clears up."""
        with suppress(FileNotFoundError):  # at the end of a program: the rank that has made it has gone
            self.post(("left",), rank, 0, None)
        if self.count(("left",)) == self._size:
            shutil.rmtree(self._path, ignore_errors=True)

    def _at(self, key: tuple) -> Path:
        return self._path / "-".join(map(str, key))


def _posts(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if not name.startswith(_TAKEN)]
    except FileNotFoundError:
        return []


def new_key(processes: bool) -> bytes:
    """What the ranks of a new communicator know it by; of processes the folder."""
    if not processes:
        return next(_numbers).to_bytes(128, "big")  # begins as no path does
    memory = Path("/dev/shm")
    path = tempfile.mkdtemp(prefix="softgpu-", dir=memory if memory.is_dir() else None)
    _made.append(path)
    return os.fsencode(path).ljust(128, b"\0")


def clear() -> None:
    """Remove what this process has made, when no other one uses it any more."""
    for path in _made:
        shutil.rmtree(path, ignore_errors=True)


def enter(key: bytes, size: int, rank: int, given: object) -> tuple[Room, dict]:
    """The room of this key, when all ranks are in it, and what each has given."""
    if key.startswith(b"/"):
        room = Folder(Path(os.fsdecode(key.rstrip(b"\0"))), size, rank)
    else:
        with _lock:
            room = _rooms.setdefault(key, Room())
    room.post(("made",), rank, size, given)
    end = time.monotonic() + _PATIENCE
    while room.count(("made",)) < size:
        time.sleep(0.001)
        assert time.monotonic() < end, "NCCL: ranks that do not come"
    return room, room.take(("made",))
