"""Plan: the order in which a forward enters the units, recorded once and followed by later forwards.

Prefetch follows the plan. The plan also shows when this rank skips a unit that other ranks may use. The rank
then joins the unit's collectives without computing, so conditional layers may differ between ranks.

Before the first forward, the plan is the order in which the model declares its units. After it, the ranks
compare their recorded orders and remove the units that no rank used. A forward that does not begin with the
outermost unit follows an empty Route. The second run of a recomputed module follows a Replay of the first.
"""

import warnings
from itertools import zip_longest

from shardrt.autograd import Function, Segment
from shardrt.comm import objects
from shardrt.comm.errors import CollectiveMismatch
from shardrt.comm.protocol import Communicator
from shardrt.fsdp.unit import State, Unit


class Route:
    """The order of units that a forward follows. The base class knows no order.

    nodes: nodes that backward must run on this rank even if its loss does not depend on them: other ranks'
    backward may run them, and they issue collectives.
    gives_gradients: an output of the unit left last requires a gradient.
    """

    replay = False  # the second run of a recomputed module
    agreed = False  # all ranks have compared the order

    def __init__(self) -> None:
        self.nodes: list[Function] = []
        self.gives_gradients = False

    def skip_to(self, unit: Unit) -> int:
        """How many units this rank skips by entering `unit` now."""
        return 0

    def skip_out_of(self, inside: Unit) -> int:
        """How many units inside of `inside` this rank skips by leaving it now."""
        return 0

    def advance(self, visited: bool) -> int | None:
        """Advance by one unit and give its place in the plan. visited: this rank calls the unit."""

    def upcoming(self) -> list[Unit]:
        """The units that come next."""
        return []

    def agree(self, control: Communicator) -> set[int]:
        """At the end of a forward: the places in the plan of units that no rank used."""
        return set()


class Replay(Route):
    """The units of a recomputed module, for its second run."""

    replay = True

    def __init__(self, segment: Segment) -> None:
        super().__init__()
        self.nodes, self._units = segment.besides, segment.units

    def upcoming(self) -> list[Unit]:
        return [unit for unit in self._units if unit.state is State.SHARDED]


class Plan(Route):
    """The units in the order in which a forward enters them. A unit that is called twice appears twice."""

    def __init__(self, units: list[Unit]) -> None:
        super().__init__()
        self.units = units
        self.order = list(units)
        self.visited = [False] * len(units)  # for each place: this rank called the unit in this forward
        self.place = 0
        self.agreed = False  # the ranks have compared this order
        self.deviations = 0  # forwards that did not follow the order
        self._deviates = False
        self._warned = False

    def begin(self) -> None:
        """Start a forward of the outermost unit."""
        self.place, self.nodes, self.gives_gradients = 0, [], False
        self.visited = [False] * len(self.order)
        self._deviates = False

    def skip_to(self, unit: Unit) -> int:
        """As Route.skip_to; 0 if the forward is as planned.

        A forward that skips units counts as a deviation. If the plan does not have `unit` from here on, the
        rest of the plan is dropped, and the forward records a new rest.
        """
        for place in range(self.place, len(self.order)):
            if self.order[place] is unit:
                if place > self.place:
                    self._leave_out(place - self.place, f"{unit.label} was used")
                return place - self.place
        self._deviate(f"{unit.label} was used", " If only some ranks use it: fully_shard(..., by_rank=True).")
        del self.order[self.place :], self.visited[self.place :]
        self.order.append(unit)
        self.visited.append(False)
        self.agreed = False
        return 0

    def skip_out_of(self, inside: Unit) -> int:
        count = 0
        while self.place + count < len(self.order) and inside in self.order[self.place + count].ancestors:
            count += 1
        if count:
            self._leave_out(count, f"{inside.label} ended")
        return count

    def advance(self, visited: bool) -> int:
        self.visited[self.place] |= visited
        self.place += 1
        return self.place - 1

    def upcoming(self) -> list[Unit]:
        return self.order[self.place :]

    def agree(self, control: Communicator) -> set[int]:
        """Compare the order with the other ranks, remove the units that no rank used, give their places.

        Units with by_rank stay in the plan. Collective. Raises CollectiveMismatch, which names ranks and
        units, if the ranks have different orders.
        """
        if self.agreed:
            return set()
        _compare([self.units.index(unit) for unit in self.order], self.units, control)
        # A list from each rank.
        visited = [self.visited, *map(list, control.all_gather_bytes(bytes(self.visited)))]
        by_unit = zip(self.order, *visited, strict=True)
        used = [unit.settings.by_rank or any(on_ranks) for unit, *on_ranks in by_unit]
        self.order = [unit for unit, is_used in zip(self.order, used, strict=True) if is_used]
        self.visited = [True] * len(self.order)
        self.place = len(self.order)
        self.agreed = True
        return {place for place, is_used in enumerate(used) if not is_used}

    def _leave_out(self, count: int, instead: str) -> None:
        """Note that the next `count` units are not used: a deviation, unless all of them have by_rank."""
        if not all(unit.settings.by_rank for unit in self.order[self.place : self.place + count]):
            self._deviate(instead)

    def _deviate(self, instead: str, hint: str = "") -> None:
        """Count a forward that differs from an agreed plan, and warn the first time."""
        if self._deviates or not self.agreed:
            return
        self._deviates = True
        self.deviations += 1
        if not self._warned:
            self._warned = True
            left = self.order[self.place :]
            expected = f"unit {left[0].label} next" if left else "no further unit"
            warnings.warn(
                f"fully_shard: expected {expected}, as in the recorded forward, but {instead}. The result is "
                "right, but some units are gathered without need, or later than they could be."
                f"{hint} This warning appears once; schedule.plan.deviations counts.",
                stacklevel=2,
            )


def _compare(order: list[int], units: list[Unit], control: Communicator) -> None:
    differing = objects.differing_ranks(control, order)
    if not differing:
        return
    orders, other = objects.all_gather_object(control, order), differing[0]
    pairs = zip_longest(orders[0], orders[other], fillvalue=None)
    place, pair = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    names = ["missing" if index is None else units[index].label for index in pair]
    raise CollectiveMismatch(
        f"fully_shard: ranks use units in different orders: unit number {place + 1} is {names[0]} on rank 0, "
        f"{names[1]} on rank {other}; a rank may leave units out, but must not change their order",
        is_leader=control.rank == 0,
    )
