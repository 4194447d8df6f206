"""A safetensors file that is made piece by piece: what is kept of it outlives the process that is killed.

The folder .NAME.HOST.part next to the file holds each tensor in a file, and kept.json: how much of each is
valid, its digest, and where the maker goes on. The file appears under its name when it is whole.
"""

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.untrusted import Refused, read_regular, strict_json

__all__ = ["Unfinished"]

PERIOD = 5.0  # seconds of work that a kill may cost, about
HEADER = 4096  # bytes kept free for the header while the sizes are not known
NAMES = {"uint8": "U8", "uint16": "U16", "uint32": "U32", "int64": "I64"}
_SILENT = 600.0  # seconds without a write until the work of another host is taken over
_KEPT = "kept.json"
_CHUNK = 1 << 22  # bytes that are copied together


class Unfinished:
    """The tensors of a file, each of one dimension, in the order of its content.

    `facts` is what `keep` had last, of this process or of one that was killed; {} at the beginning.
    `digest` of the finished file is XXH3-128 of all tensors, one after the other.
    """

    def __init__(self, out: Path, made_from: str, kinds: Mapping[str, Any]) -> None:
        """Begin, or go on.

        Args:
            made_from: what decides the content; work on something else is thrown away. "" keeps nothing.
            kinds: name -> dtype of each tensor.

        Raises:
            FileExistsError: for an `out` that exists.
            Refused: if another process of this host is making it.
            OSError: if the file system fails.
        """
        from xxhash import xxh3_128

        self.out, self.facts = out, {}
        self._made_from, self._kinds = made_from, {name: np.dtype(kind) for name, kind in kinds.items()}
        self._first, self._kept_at = next(iter(kinds)), time.monotonic()
        self.folder = out.with_name(f".{out.name}.{socket.gethostname()}.part")
        self._take_over()
        self._lock = self._locked()
        if out.exists():
            self.close()
            raise FileExistsError(17, "exists already", str(out))
        self._sizes, self._hashers = {}, {name: xxh3_128() for name in kinds}
        kept = self._kept()
        self._files = {name: self._opened(name, kept) for name in kinds}
        self.facts = kept.get("facts", {})

    def append(self, name: str, values: np.ndarray) -> None:
        """Put values behind those that a tensor has."""
        values = np.ascontiguousarray(values, self._kinds[name])
        self._files[name].write(values)
        self._hashers[name].update(values)
        self._sizes[name] += values.size

    def size(self, name: str) -> int:
        """How many elements a tensor has."""
        return self._sizes[name]

    def keep(self, facts: dict[str, Any]) -> None:
        """Let what there is outlive a kill, if PERIOD is over.

        facts: values of JSON with which the maker goes on from here.
        """
        if not self._made_from or time.monotonic() - self._kept_at < PERIOD:
            return
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        digests = {name: hasher.hexdigest() for name, hasher in self._hashers.items()}
        kept = {"made_from": self._made_from, "facts": facts, "sizes": self._sizes, "digests": digests}
        temporary = self.folder / f"{_KEPT}.tmp"
        with open(temporary, "w") as file:
            json.dump(kept, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.folder / _KEPT)
        self.facts, self._kept_at = facts, time.monotonic()

    def finish(self, metadata: Callable[[str], dict[str, str]]) -> None:
        """Put the file in its place. metadata: of the header, from the digest."""
        main, hasher = self._files[self._first], self._hashers[self._first]
        *middle, last = [name for name in self._kinds if name != self._first]
        padding = 0
        for name in (*middle, last):
            if name == last:  # of 8 bytes an element, which begin at a multiple of 8
                padding = -(main.tell() - HEADER) % 8
                main.write(bytes(padding))
            self._files[name].flush()
            with open(self.folder / name, "rb") as column:
                while piece := column.read(_CHUNK):
                    hasher.update(piece)
                    main.write(piece)
        main.flush()
        main.seek(0)
        main.write(self._header(padding, metadata(hasher.hexdigest())))
        main.flush()
        os.fsync(main.fileno())
        os.rename(self.folder / self._first, self.out)
        self.remove()

    def close(self) -> None:
        """End here. What was kept stays for the next process; without it nothing does."""
        if not self.facts:
            self.remove()
            return
        self._end()

    def remove(self) -> None:
        """End here, and leave nothing."""
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self) -> None:
        for file in getattr(self, "_files", {}).values():
            with suppress(OSError):  # a full disk has no room for the rest, which was not kept
                file.close()
        self._lock.close()

    def _take_over(self) -> None:
        """Make another host's work this host's, where that host has not written for long."""
        for other in self.out.parent.glob(f".{escape(self.out.name)}.*.part"):
            with suppress(OSError):  # it is gone, or another process was first
                if other != self.folder and time.time() - (other / _KEPT).stat().st_mtime > _SILENT:
                    os.rename(other, self.folder)

    def _locked(self) -> Any:
        """The folder's lock, which the system gives back when a process ends, however it ends."""
        if not self.out.parent.is_dir():
            raise FileNotFoundError(2, "No such file or directory", str(self.out.parent))
        while True:
            self.folder.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):  # its owner ends just now
                lock = open(self.folder / "lock", "w")  # noqa: SIM115 (it lives as long as this object)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    lock.close()
                    raise Refused(f"{self.out}: another process is making it") from None
                if (self.folder / "lock").stat().st_ino == os.fstat(lock.fileno()).st_ino:
                    return lock

    def _kept(self) -> dict[str, Any]:
        """What a killed process has kept of the same work, if all of it is there."""
        try:
            kept = strict_json(read_regular(self.folder / _KEPT, 1 << 20))
            same = kept["made_from"] == self._made_from != ""
            whole = same and all(self._has(name, kept) for name in self._kinds)
            return kept if whole and isinstance(kept["facts"], dict) else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _has(self, name: str, kept: dict[str, Any]) -> bool:
        from xxhash import xxh3_128

        hasher, left = xxh3_128(), kept["sizes"][name] * self._kinds[name].itemsize
        with open(self.folder / name, "rb") as file:
            file.seek(self._begin(name))
            while piece := file.read(min(left, _CHUNK)):
                hasher.update(piece)
                left -= len(piece)
        self._hashers[name] = hasher
        return not left and hasher.hexdigest() == kept["digests"][name]

    def _opened(self, name: str, kept: dict[str, Any]) -> Any:
        """A tensor's file, cut to what was kept."""
        from xxhash import xxh3_128

        path = self.folder / name
        self._sizes[name] = kept["sizes"][name] if kept else 0
        if not kept:
            self._hashers[name] = xxh3_128()
        file = open(path, "r+b" if kept else "w+b")  # noqa: SIM115 (it lives as long as this object)
        file.truncate(self._begin(name) + self._sizes[name] * self._kinds[name].itemsize)
        file.seek(0, os.SEEK_END)
        return file

    def _begin(self, name: str) -> int:
        return HEADER if name == self._first else 0

    def _header(self, padding: int, metadata: dict[str, str]) -> bytes:
        """As safetensors wants it: tensors without holes, so the padding is a separate tensor."""
        entries: dict[str, Any] = {"__metadata__": metadata}
        end, *_, last = 0, *self._kinds
        for name, kind in self._kinds.items():
            if name == last and padding:
                entries["padding"] = {"dtype": "U8", "shape": [padding], "data_offsets": [end, end + padding]}
                end += padding
            count = self._sizes[name]
            stop = end + count * kind.itemsize
            entries[name] = {"dtype": NAMES[kind.name], "shape": [count], "data_offsets": [end, stop]}
            end = stop
        text = json.dumps(entries, separators=(",", ":")).encode()
        if len(text) > HEADER - 8:
            raise Refused(f"{self.out}: the header needs {len(text)} bytes; it has {HEADER - 8}")
        return (HEADER - 8).to_bytes(8, "little") + text.ljust(HEADER - 8)
