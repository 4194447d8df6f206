"""ProcessGroups: the ranks that a group is sharded over, and the ranks that hold the same shard."""

from dataclasses import dataclass

from shardrt.comm.backends import for_device
from shardrt.comm.protocol import Communicator
from shardrt.comm.ranks import Mesh
from shardrt.comm.single import SingleCommunicator

Axes = tuple[tuple[int, int], ...]  # of the root mesh, as comm/mesh_layout.py writes them


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
    def of(cls, mesh: Mesh, cut: str) -> "ProcessGroups":
        """The process groups for strategy.Rules.cut on `mesh`, the ranks of the data. Collective."""
        own, held, added, role = ranks_of_cut(mesh, cut)
        copies = added.communicator(role) if added is not None and added.size > 1 else None
        sharers, owner = (1, True) if copies is None else (copies.size, copies.rank == 0)
        return cls(*own, copies, own[2], held, sharers, owner)


def ranks_of_cut(
    mesh: Mesh, cut: str
) -> tuple[tuple[Communicator, Communicator, Communicator], Mesh | None, Mesh | None, str]:
    """The communicators and meshes of strategy.Rules.cut. Collective.

    Gives (gather, reduce, control), the mesh of the shards, the mesh of the copies, and the role of the
    communicator of the copies. A mesh is None where it would have one rank.
    """
    if cut == "none":
        alone = for_device(SingleCommunicator(), mesh.device, "auto", "gather")
        return (alone, alone, alone), None, mesh, "reduce"
    held = mesh if cut == "mesh" else mesh.axis(-1 % len(mesh.shape))
    own = held.communicator("gather"), held.communicator("reduce"), held.communicator("control")
    return own, held, mesh.axis(0) if cut == "last axis" else None, "copies"


def shape_of(mesh: Mesh, cut: str, terms: int = 1) -> tuple[int, int]:
    """(number of shards, number of ranks that add up the gradients of each shard), without communicators.

    terms: number of ranks that each have one term of a gradient.
    """
    if cut == "none":
        return 1, mesh.size * terms
    return (mesh.shape[1], mesh.shape[0] * terms) if cut == "last axis" else (mesh.size, terms)
