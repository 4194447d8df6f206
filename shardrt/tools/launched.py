"""A command line of mpirun (MPICH or Open MPI): its hosts and ranks, and the command without some hosts."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from shardrt.untrusted import Refused

_HOSTS = ("-hosts", "--hosts", "-host", "--host", "-H")
_FILES = ("-f", "-hostfile", "--hostfile", "-machinefile", "--machinefile")
_RANKS = ("-n", "-np", "--np", "--n", "--ntasks")
_PER_HOST = ("-ppn", "--ppn", "-perhost", "-npernode", "--npernode", "-N")
_MAPS = ("-map-by", "--map-by")
_FOLDERS = ("-wdir", "--wdir", "-wd", "--wd", "--chdir", "-D")
_UNREAD = ("-configfile", "-app", "--app", "-rankmap", "-rf", "-rankfile", "--rankfile")
_HOST = re.compile(r"((?:[^\s@]+@)?([\w.-]+))(?::(\d+))?(?:\s.*)?")
_SLOTS = re.compile(r"\sslots\s*=\s*(\d+)")


class Host(NamedTuple):
    """A host of a list or file. login: the name, with its user if given (me@node1). ranks: 1 if not given."""

    login: str
    name: str
    ranks: int


def host_lines(path: Path) -> list[str]:
    """The lines of a host file (MPICH's `node1:8` or Open MPI's `node1 slots=8`), without comments.

    Raises OSError.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def host_of(line: str) -> Host:
    """Parse a line. Raises Refused, also for a range of hosts or an IPv6 address."""
    found, slots = _HOST.fullmatch(line), _SLOTS.search(line)
    if found is None:
        raise Refused(f"{line!r} is not a host; write HOST or HOST:RANKS")
    return Host(found[1], found[2], int(found[3] or (slots[1] if slots else 1)))


class _Place(NamedTuple):
    """The position of an option's value; `name=` precedes the value if both are one word."""

    index: int
    before: str
    value: str


class Command:
    """The words of a command.

    ranks: how many ranks it starts, None if it does not say. hosts: the hosts that it names, each with its
    ranks (the most, if all hosts are up); empty if it names none. With srun, Slurm chooses the hosts.
    """

    def __init__(self, words: Sequence[str]) -> None:
        """Read the words of a command.

        Raises:
            Refused: for an empty command, or one whose hosts or ranks can't be read.
            OSError: for its host file.
        """
        if not words:
            raise Refused("run: no command; write it after --")
        self.words = list(words)
        self._options = self._launcher()
        folder = self._place(_FOLDERS)
        if folder is not None:
            raise Refused(
                f"run: start it in the folder {folder.value}, which has runs/NAME, and without that option"
            )
        self._ranks = self._place(_RANKS)
        self.ranks = None if self._ranks is None else _number(self._ranks.value, "ranks")
        self._list = self._file = None
        self._lines: list[tuple[str, str]] = []  # name of each host, and its text in the command
        self.hosts: dict[str, int] = {}
        if "srun" not in (Path(word).name for word in self.words[: self._options]):
            self._list, self._file = self._place(_HOSTS), self._place(_FILES)
            self._read_hosts()

    def _launcher(self) -> int:
        """The number of words before the program."""
        names = (Path(word).name for word in self.words)
        programs = (
            i for i, name in enumerate(names) if i and (name == "shardrt" or name.startswith("python"))
        )
        return next(programs, len(self.words))

    def _place(self, names: tuple[str, ...]) -> _Place | None:
        """The place of the first of these launcher options."""
        for index, word in enumerate(self.words[: self._options]):
            name, equals, value = word.partition("=")
            if index and name in names and equals:
                return _Place(index, f"{name}=", value)
            if index and name in names:
                if index + 1 == len(self.words):
                    raise Refused(f"run: {name} has no value")
                return _Place(index + 1, "", self.words[index + 1])
        return None

    def _read_hosts(self) -> None:
        if self._list is None and self._file is None:
            return
        unread = self._place(_UNREAD)
        given = [word for word in self.words[1 : self._options] if word.partition("=")[0] in _HOSTS + _FILES]
        if unread is not None or ":" in self.words or len(given) > 1:
            raise Refused(
                "run: the command may have one list or file of hosts and one program, but no map of ranks"
            )
        if self.ranks is None:
            raise Refused("run: a command that names hosts needs -n, the number of ranks")
        if self._list is not None:
            lines = [part for part in map(str.strip, self._list.value.split(",")) if part]
        else:
            lines = host_lines(Path(self._file.value))
        slots: Counter[str] = Counter()
        for line in lines:
            host = host_of(line)
            self._lines.append((host.name, line))
            slots[host.name] += host.ranks
        each = self._per_host()
        if each:
            slots = Counter(dict.fromkeys(slots, each))
        total = slots.total()
        if not total:
            raise Refused("run: none of the hosts that the command names has a rank")
        # More ranks than slots wrap around the hosts, as with MPICH if no slots are given.
        rounds = max(self.ranks, total)
        self.hosts = {host: -(-rounds * count // total) for host, count in slots.items()}

    def _per_host(self) -> int:
        """Ranks of each host if an option gives them; else 0."""
        each, by = self._place(_PER_HOST), self._place(_MAPS)
        if each is not None:
            return _number(each.value, "ranks per host")
        found = by and re.match(r"ppr:(\d+):node", by.value)
        return int(found[1]) if found else 0

    def most(self, lost: Collection[str], refused: Collection[int] = ()) -> int | None:
        """The most ranks for the remaining hosts, not in `refused`; 0: none, None: unknown.

        The first choice is all available room. Smaller numbers are divisors of the command's own number, so
        that batches and groups of ranks divide equally.
        """
        if self.ranks is None:
            return None
        room = sum(count for host, count in self.hosts.items() if host not in lost)
        most = min(self.ranks, room) if self.hosts else self.ranks
        fewer = (n for n in range(most - 1, 0, -1) if self.ranks % n == 0)
        return next((n for n in (most, *fewer) if n not in refused), 0)

    def on(self, lost: Collection[str], ranks: int | None, file: Path) -> list[str]:
        """The words for `ranks` ranks on the other hosts. Writes a host file if the launcher takes one."""
        words = list(self.words)
        if self._ranks is not None:
            words[self._ranks.index] = f"{self._ranks.before}{ranks}"
        left = [line for host, line in self._lines if host not in lost]
        if len(left) == len(self._lines):
            return words
        if self._list is not None:
            words[self._list.index] = self._list.before + ",".join(left)
        elif self._file is not None:
            file.write_text("".join(f"{line}\n" for line in left), encoding="utf-8")
            words[self._file.index] = f"{self._file.before}{file}"
        return words


def _number(text: str, what: str) -> int:
    if not text.isdecimal() or not int(text):
        raise Refused(f"run: expected a number of {what}, got {text!r}")
    return int(text)
