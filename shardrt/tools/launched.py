"""A command line of mpirun, MPICH's or Open MPI's: its hosts and ranks, and the same without some hosts."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shardrt.untrusted import Refused

_HOSTS = ("-hosts", "--hosts", "-host", "--host", "-H")
_FILES = ("-f", "-hostfile", "--hostfile", "-machinefile", "--machinefile")
_RANKS = ("-n", "-np", "--np", "--n", "-c")


class Command:
    """The words of a command; `hosts` are those it names, each with its slots, none where it names none."""

    def __init__(self, words: Sequence[str]) -> None:
        """Raises Refused for an empty command, or for ranks that are no number; OSError for its host file."""
        if not words:
            raise Refused("run: no command; it comes behind --")
        self.words = list(words)
        self._list, self._file, self._ranks = (self._place(names) for names in (_HOSTS, _FILES, _RANKS))
        self._lines: dict[str, str] = {}
        self.hosts: dict[str, int] = {}
        if self._list is not None:
            self._lines = {part.partition(":")[0]: part for part in self.words[self._list].split(",")}
        elif self._file is not None:
            text = Path(self.words[self._file]).read_text(encoding="utf-8")
            lines = (line.partition("#")[0].strip() for line in text.splitlines())
            self._lines = {line.split()[0].partition(":")[0]: line for line in lines if line}
        for host, line in self._lines.items():
            slots = line.replace(":", " ").replace("slots=", " ").split()[1:2]
            self.hosts[host] = int(slots[0]) if slots and slots[0].isdigit() else 1
        ranks = "1" if self._ranks is None else self.words[self._ranks]
        if not ranks.isdigit():
            raise Refused(f"run: {ranks!r} is no number of ranks")

    def _place(self, names: tuple[str, ...]) -> int | None:
        """Where the value of the launcher's option is, which comes before the program."""
        for index, word in enumerate(self.words[:-1]):
            if index and Path(word).name.startswith("python"):
                break
            if index and word in names:
                return index + 1
        return None

    def without(self, lost: Sequence[str]) -> tuple[list[str], int | None]:
        """(the words on the other hosts, ranks); None for ranks that the command does not say."""
        words = list(self.words)
        ranks = None if self._ranks is None else int(words[self._ranks])
        if not lost or not self._lines:
            return words, ranks
        left = {host: line for host, line in self._lines.items() if host not in lost}
        room = sum(self.hosts[host] for host in left)
        ranks = room if ranks is None else min(ranks, room)
        if self._ranks is not None:
            words[self._ranks] = str(ranks)
        if self._list is not None:
            words[self._list] = ",".join(left.values())
        elif self._file is not None:
            file, path = tempfile.mkstemp(prefix="shardrt-hosts-")
            with os.fdopen(file, "w", encoding="utf-8") as out:
                out.write("".join(f"{line}\n" for line in left.values()))
            words[self._file] = path
        return words, ranks
