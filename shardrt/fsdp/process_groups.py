"""ProcessGroups: the ranks among which a unit is cut, and the ranks that hold the same shard of it."""

from dataclasses import dataclass

from shardrt.comm.backends import for_device
from shardrt.comm.digits import Digits, number_in, size_of, union, without
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.protocol import Communicator
from shardrt.comm.single import SingleCommunicator

Axes = Digits  # of the root mesh


@dataclass(frozen=True)
class ProcessGroups:
    """Communicators of one kind of cut.

    gather, reduce, control: over the ranks that together hold one whole unit (where modules are cut: what was
    this rank's part of them before sharding), one communicator per stream. copies: over the ranks that add
    up sharded gradients, since they hold copies or since their gradients are partial; None if there is one.
    holders: over the ranks that together hold what the parameters were before modules were cut; holding: the
    mesh of these ranks, None where one rank holds all. sharers: how many ranks hold what this one does;
    owner: whether it is the one that saves it.
    """

    gather: Communicator
    reduce: Communicator
    control: Communicator
    copies: Communicator | None
    holders: Communicator
    holding: DeviceMesh | None
    sharers: int
    owner: bool

    @property
    def rank(self) -> int:
        """This rank's place among those that together hold a unit."""
        return self.gather.rank

    @property
    def size(self) -> int:
        """How many shards a unit is cut into."""
        return self.gather.size

    @property
    def reducer(self) -> Communicator:
        """The communicator that reads full gradients."""
        return self.copies if self.size == 1 and self.copies is not None else self.reduce

    @classmethod
    def of(
        cls, mesh: DeviceMesh, cut: str, cut_before: Axes = (), partial: Axes = (), across: Axes = ()
    ) -> "ProcessGroups":
        """Those for strategy.Row.cut, on a mesh of all ranks that have parts of the data. Collective.

        Where modules are cut along other axes: cut_before: those along which these parameters are; partial:
        those along which each rank's gradient is a part of a sum; across: those of the whole model.
        """
        held = {"none": None, "mesh": mesh, "last axis": mesh.axis(-1 % len(mesh.shape))}[cut]
        if held is None:
            alone = for_device(SingleCommunicator(), mesh.device, "auto", "gather")
            own = alone, alone, alone
            added, role = mesh, "reduce"
        else:
            own = tuple(held.communicator(role) for role in ("gather", "reduce", "control"))
            added, role = mesh.axis(0) if cut == "last axis" else None, "copies"
        if partial:  # outermost, so that the tree of a sum is the same however the data ranks are cut
            added = mesh.along(partial, () if added is None else added.axes)
        copies = added.communicator(role) if added is not None and added.size > 1 else None
        if not across:
            sharers, first = (1, True) if copies is None else (copies.size, copies.rank == 0)
            return cls(*own, copies, own[2], held, sharers, first)
        axes = union(cut_before, () if held is None else held.axes)
        holding = mesh.along(axes) if axes else None
        holders = own[2] if holding is None else holding.communicator("control")
        everyone = mesh.widened(across)
        first = not number_in(without(everyone.axes, axes), mesh.root.rank)
        return cls(*own, copies, holders, holding, everyone.size // holders.size, first)


def shape_of(mesh: DeviceMesh, cut: str, partial: Axes = ()) -> tuple[int, int]:
    """(shards, ranks that add up gradients of each) of a unit's shard groups, without making them."""
    more = size_of(partial)
    if cut == "none":
        return 1, mesh.size * more
    return (mesh.shape[1], mesh.shape[0] * more) if cut == "last axis" else (mesh.size, more)
