"""How calls are recorded: by which names, and what a recorder must do."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

MESSAGES = ("send", "recv", "exchange")  # calls of two ranks, not of all


class Recorder(Protocol):
    """Records calls, such as faults' flight recorder."""

    meshes: int  # whose communicators are recorded

    def facts(self, communicator: str, number: int, operation: str, unit: str, array: Any) -> tuple:
        """What is recorded of a collective: the `number`-th call of a communicator, for `unit`."""

    def around(self, facts: tuple, function: Callable[..., Any], args: tuple) -> Any:
        """Run a collective between a record that it was entered and one that it is done; gives its result."""

    def part(self, phase: str, action: str = "") -> None:
        """A part of a step begins; action: of a pipeline, what of it."""


def group_name(role: str, ranks: Sequence[int], world: int) -> str:
    """What a communicator is called: its role, and its ranks where they are not all: gather[0:8:2].

    So that two groups of one axis are not taken for one, and whoever reads it knows who belongs to it.
    """
    if list(ranks) == list(range(world)):
        return role
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    run = range(ranks[0], ranks[-1] + 1, step) if step > 0 else range(0)
    if list(run) != list(ranks):
        return f"{role}[{','.join(map(str, ranks))}]"
    return f"{role}[{run.start}:{run.stop}{f':{step}' * (step > 1)}]"


def message_to(peer: int, what: str) -> str:
    """What is recorded of a message to a rank of its communicator."""
    return f"{what} to rank {peer}".lstrip()


def message_from(peer: int, what: str) -> str:
    """What is recorded of a message from a rank of its communicator."""
    return f"{what} from rank {peer}".lstrip()
