"""What sees the calls of a communicator on their way: recording, and by which names; counting; delays."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

MESSAGES = ("send", "recv", "exchange")  # calls of two ranks, not of all


class Call(NamedTuple):
    """A call of a communicator, as it was made. A barrier has no array."""

    name: str  # "all_gather"
    tag: str  # it is made for
    array: Any  # that is full: of an all_gather what is gathered, of a reduce_scatter what is reduced
    args: tuple  # of the backend's method
    stream: Any


class Interceptor:
    """Sees the calls of `communicator` from now on, not those of its duplicates and splits."""

    def __init__(self, communicator: Any) -> None:
        self.communicator = communicator
        communicator.interceptors = (*communicator.interceptors, self)

    def intercept(self, call: Call, run: Callable[..., Any]) -> Callable[..., Any]:
        """What is to run in the stream in place of run(*call.args). In the caller, before it is submitted."""
        return run

    def intercept_talk(self, run: Callable[[bytes], list[bytes]]) -> Callable[[bytes], list[bytes]]:
        """The same for `all_gather_bytes`, which has no stream."""
        return run


class Recorder(Protocol):
    """Records calls, such as faults' flight recorder."""

    meshes: int  # whose communicators are recorded

    def facts(self, communicator: str, number: int, operation: str, unit: str, array: Any) -> tuple:
        """What is recorded of a collective: the `number`-th call of a communicator, for `unit`."""

    def around(self, facts: tuple, function: Callable[..., Any], args: tuple) -> Any:
        """Run a collective between a record that it was entered and one that it is done; gives its result."""

    def part(self, phase: str, action: str = "") -> None:
        """A part of a step begins; action: of a pipeline, what of it."""


class Recorded(Interceptor):
    """Has a recorder note every call. name: the name of the communicator, unique in this run."""

    def __init__(self, communicator: Any, recorder: Recorder, name: str) -> None:
        super().__init__(communicator)
        self.name = name
        self._recorder = recorder
        self._number = 0  # of the latest collective, the same on all ranks: so messages do not count

    def intercept(self, call: Call, run: Callable[..., Any]) -> Callable[..., Any]:
        return self._recorded(call.name, call.tag, call.array, run)

    def intercept_talk(self, run: Callable[[bytes], list[bytes]]) -> Callable[[bytes], list[bytes]]:
        return self._recorded("all_gather_bytes", "", None, run)

    def _recorded(self, name: str, tag: str, array: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        self._number += name not in MESSAGES
        facts = self._recorder.facts(self.name, self._number, name, tag, array)
        return lambda *args: self._recorder.around(facts, run, args)


def group_name(role: str, ranks: Sequence[int], world: int) -> str:
    """What a communicator is called: its role, and its ranks where they are not all: gather[0:8:2].

    So two groups of one axis have two names, and the name says which ranks belong to it.
    """
    if list(ranks) == list(range(world)):
        return role
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    run = range(ranks[0], ranks[-1] + 1, step) if step > 0 else range(0)
    if list(run) != list(ranks):
        return f"{role}[{','.join(map(str, ranks))}]"
    return f"{role}[{run.start}:{run.stop}{f':{step}' * (step > 1)}]"


def message_to(peer: int, tag: str) -> str:
    """What is recorded of a message to a rank of its communicator."""
    return f"{tag} to rank {peer}".lstrip()


def message_from(peer: int, tag: str) -> str:
    """What is recorded of a message from a rank of its communicator."""
    return f"{tag} from rank {peer}".lstrip()
