"""ProcessGroups: the ranks that a group is sharded over, and the ranks that hold the same shard."""

from dataclasses import dataclass

from shardrt.comm.backends import for_device
from shardrt.comm.digits import Digits, number_in, size_of, union, without
from shardrt.comm.protocol import Communicator
from shardrt.comm.ranks import Mesh
from shardrt.comm.single import SingleCommunicator

Axes = Digits  # of the root mesh


@dataclass(frozen=True)
class ProcessGroups:
    """The communicators of groups that are cut alike.

    gather, reduce, control: over the ranks that together hold one whole unit; one communicator per stream. If
        modules were split before sharding, "whole" is this rank's part of the split.
    copies: over the ranks that add up sharded gradients, because they hold copies or their gradients are
        partial; None if there is only one such rank.
    holders: over the ranks that together hold the parameters as they were before modules were split.
    holding: the mesh of the holders; None if one rank holds everything.
    sharers: number of ranks that hold the same values as this rank.
    owner: whether this rank is the one of them that saves the values.
    """

    gather: Communicator
    reduce: Communicator
    control: Communicator
    copies: Communicator | None
    holders: Communicator
    holding: Mesh | None
    sharers: int
    owner: bool

    @property
    def rank(self) -> int:
        """This rank's number among the ranks that together hold a unit: the index of its shard."""
        return self.gather.rank

    @property
    def size(self) -> int:
        """Number of shards."""
        return self.gather.size

    @property
    def reducer(self) -> Communicator:
        """The communicator that reads full gradients."""
        return self.copies if self.size == 1 and self.copies is not None else self.reduce

    @classmethod
    def of(
        cls, mesh: Mesh, cut: str, cut_before: Axes = (), partial: Axes = (), across: Axes = ()
    ) -> "ProcessGroups":
        """The process groups for strategy.Rules.cut on `mesh`, the ranks of the data. Collective.

        If modules were split along other axes of the root mesh:
        cut_before: the axes along which these parameters were split.
        partial: the axes along which each rank's gradient is one term of a sum.
        across: all axes along which modules of the model were split.
        """
        held = {"none": None, "mesh": mesh, "last axis": mesh.axis(-1 % len(mesh.shape))}[cut]
        if held is None:
            alone = for_device(SingleCommunicator(), mesh.device, "auto", "gather")
            own = alone, alone, alone
            added, role = mesh, "reduce"
        else:
            own = tuple(held.communicator(role) for role in ("gather", "reduce", "control"))
            added, role = mesh.axis(0) if cut == "last axis" else None, "copies"
        if partial:  # outermost, so that the tree of a sum does not depend on how the data ranks are cut
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


def shape_of(mesh: Mesh, cut: str, partial: Axes = ()) -> tuple[int, int]:
    """(number of shards, number of ranks that add up the gradients of each shard), without communicators."""
    more = size_of(partial)
    if cut == "none":
        return 1, mesh.size * more
    return (mesh.shape[1], mesh.shape[0] * more) if cut == "last axis" else (mesh.size, more)
