"""ScheduleObserver watches a schedule.

An observer does not influence the schedule. Append it to `Schedule.observers`. An observer that must see the
first forward is made by a function in `Unit.observers`, which gets the schedule. `OBSERVERS` makes those that
every schedule has.
"""

from collections.abc import Callable
from typing import Any

from shardrt.fsdp.unit import Unit


class ScheduleObserver:
    """Override the events to watch. The rank's own thread makes the calls, in the order of the program."""

    def forward_begins(self, root: Unit) -> None:
        """A forward of the outermost unit begins."""

    def recording_begins(self) -> None:
        """A forward of any unit begins, and backward may follow."""

    def backward_begins(self) -> None:
        """A backward, or the deferred half of one, begins."""

    def backward_ends(self) -> None:
        """A backward has ended, or was discarded after it raised."""

    def enter(self, unit: Unit) -> None:
        """A call of a module of the unit begins."""

    def leave(self, unit: Unit) -> None:
        """A call of a module of the unit ends."""

    def raised(self, unit: Unit) -> None:
        """A call of a module of the unit has raised."""

    def before_backward(self, unit: Unit) -> None:
        """The backward of a call of the unit begins."""

    def after_backward(self, unit: Unit) -> None:
        """Backward has used the parameters of the unit for the last time."""

    def gather(self, unit: Unit) -> None:
        """The gather of the unit was issued."""

    def release(self, unit: Unit) -> None:
        """The unit's gathered parameters were released."""

    def reduce(self, unit: Unit) -> None:
        """The reduction of a group of the unit was issued."""


# Of options: a schedule calls these functions with itself when it is built, and has what they give.
OBSERVERS: list[Callable[[Any], ScheduleObserver]] = []
