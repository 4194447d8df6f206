"""Plan: the order in which a forward enters the units, recorded once and followed from then on.

Prefetch follows it. It also shows when this rank skips a unit that others may be using. The schedule then has
the rank join that unit's collectives all the same, so conditional layers may differ from rank to rank.
Before the first forward the plan is the order in which the model declares its units. After it the ranks
compare the recorded order and strike out the units that none of them used. A forward that does not begin with
the outermost unit has a Route without a plan; a recomputation is a Replay of what ran the first time.
"""

import warnings
from itertools import zip_longest

from shardrt.autograd import Function, Segment
from shardrt.comm import talk
from shardrt.comm.errors import CollectiveMismatch
from shardrt.comm.protocol import Communicator
from shardrt.fsdp.unit import State, Unit


class Route:
    """What a forward follows: the base of the two below, and by itself one of which nothing is known.

    nodes: what backward must come to on this rank, whatever its loss uses: on others it does.
    gives_gradients: the unit left last has given what requires a gradient.
    """

    replay = agreed = False  # a recomputation; a plan that all ranks have compared

    def __init__(self) -> None:
        self.nodes: list[Function] = []
        self.gives_gradients = False

    def skip_to(self, unit: Unit) -> int:
        """How many units this rank skips by entering `unit` now."""
        return 0

    def skip_out_of(self, inside: Unit) -> int:
        """How many units this rank skips by leaving `inside` now: those that lie in it."""
        return 0

    def advance(self, visited: bool) -> int | None:
        """Advance by one unit, which this rank calls or not; gives its place in the plan."""

    def upcoming(self) -> list[Unit]:
        """The units that come next."""
        return []

    def agree(self, control: Communicator) -> set[int]:
        """At the end: the places in the plan of units that no rank has used."""
        return set()


class Replay(Route):
    """What the second run of a recomputed module follows."""

    replay = True

    def __init__(self, segment: Segment) -> None:
        super().__init__()
        self.nodes, self._units = segment.besides, segment.units

    def upcoming(self) -> list[Unit]:
        return [unit for unit in self._units if unit.state is State.SHARDED]


class Plan(Route):
    """The units in the order in which they are entered; a unit that is called twice appears twice."""

    def __init__(self, units: list[Unit]) -> None:
        super().__init__()
        self.units = units
        self.order = list(units)
        self.visited = [False] * len(units)  # at each place, by this rank in this forward
        self.place = 0
        self.agreed = False  # the ranks have compared this order
        self.deviations = 0  # forwards that did not follow the order
        self._deviates = False
        self._told = False

    def begin(self) -> None:
        """A forward of the outermost unit starts."""
        self.place, self.nodes, self.gives_gradients = 0, [], False
        self.visited = [False] * len(self.order)
        self._deviates = False

    def skip_to(self, unit: Unit) -> int:
        """0 where all is as planned.

        If this rank skips any, the forward counts as one that deviates. If the plan has no place for `unit`
        from here on, the rest is forgotten and recorded anew.
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
        """Compare with the other ranks and strike out the units that no rank used; gives their places.

        Units that are marked as used by_rank stay.

        Collective. Raises CollectiveMismatch that names ranks and units if ranks have different orders.
        """
        if self.agreed:
            return set()
        _compare([self.units.index(unit) for unit in self.order], self.units, control)
        told = [self.visited, *map(list, control.talk(bytes(self.visited)))]
        used = [unit.settings.by_rank or any(own) for unit, *own in zip(self.order, *told, strict=True)]
        self.order = [unit for unit, anybody in zip(self.order, used, strict=True) if anybody]
        self.visited = [True] * len(self.order)
        self.place = len(self.order)
        self.agreed = True
        return {place for place, anybody in enumerate(used) if not anybody}

    def _leave_out(self, count: int, instead: str) -> None:
        """The next `count` units are not used: a deviation, unless they may be left out at any time."""
        if not all(unit.settings.by_rank for unit in self.order[self.place : self.place + count]):
            self._deviate(instead)

    def _deviate(self, instead: str, hint: str = "") -> None:
        """Count a forward that differs from the plan, and say so once, when the plan had been agreed."""
        if self._deviates or not self.agreed:
            return
        self._deviates = True
        self.deviations += 1
        if not self._told:
            self._told = True
            left = self.order[self.place :]
            expected = f"unit {left[0].label} next" if left else "no unit any more"
            warnings.warn(
                f"fully_shard: expected {expected}, as in the forward that was recorded, but {instead}. The "
                "result is right, but parameters are gathered that nobody asked for, or later than they "
                f"could be.{hint} Said once; schedule.plan.deviations counts.",
                stacklevel=2,
            )


def _compare(order: list[int], units: list[Unit], control: Communicator) -> None:
    """Raise CollectiveMismatch on every rank unless all ranks have the same order."""
    differing = talk.agree(control, order)
    if not differing:
        return
    orders, other = talk.from_all(control, order), differing[0]
    pairs = zip_longest(orders[0], orders[other], fillvalue=None)
    place, pair = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    names = ["no more" if index is None else units[index].label for index in pair]
    raise CollectiveMismatch(
        f"fully_shard: ranks use units in different orders: unit number {place + 1} is {names[0]} on rank 0, "
        f"{names[1]} on rank {other}; a unit may be left out on some ranks, but not used out of order",
        speaks=control.rank == 0,
    )
