"""ProcessGroups: the ranks that a group is sharded over, and the ranks that hold the same shard."""

from dataclasses import dataclass

from shardrt.comm.backends import for_device
from shardrt.comm.protocol import Communicator
from shardrt.comm.ranks import Mesh
from shardrt.comm.single import SingleCommunicator


@dataclass(frozen=True)
class ProcessGroups:
    """The communicators of groups that are sharded alike.

    gather, reduce, control: over the ranks that together hold one whole unit; one communicator per stream,
        or one for all if a rank holds the whole unit. If modules were split before sharding, "whole" is this
        rank's part of the split.
    replicate: over the ranks that add up sharded gradients, because they hold copies or their gradients are
        partial; None if there is only one such rank.
    whole_communicator: over the ranks that together hold the parameters as they were before the split.
    whole_mesh: the mesh of these ranks; None if one rank holds everything.
    replicas: number of ranks that hold the same values as this rank.
    owner: whether this rank saves the values; one of the replicas does.
    """

    gather: Communicator
    reduce: Communicator
    control: Communicator
    replicate: Communicator | None
    whole_communicator: Communicator
    whole_mesh: Mesh | None
    replicas: int
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
        return self.replicate if self.size == 1 and self.replicate is not None else self.reduce

    @classmethod
    def of(cls, mesh: Mesh, shard_over: str) -> "ProcessGroups":
        """The process groups for strategy.Rules.shard_over on `mesh`, the ranks of the data. Collective."""
        communicators, shard_mesh, added, role = communicators_of(mesh, shard_over)
        replicate = added.communicator(role) if added is not None and added.size > 1 else None
        replicas, owner = (1, True) if replicate is None else (replicate.size, replicate.rank == 0)
        return cls(*communicators, replicate, communicators[2], shard_mesh, replicas, owner)


def communicators_of(
    mesh: Mesh, shard_over: str
) -> tuple[tuple[Communicator, Communicator, Communicator], Mesh | None, Mesh | None, str]:
    """The communicators and meshes of strategy.Rules.shard_over. Collective.

    Gives (gather, reduce, control), the mesh of the shards, the mesh of their copies, and the role of the
    communicator of the copies. A mesh is None where it would have one rank.
    """
    if shard_over == "none":
        alone = for_device(SingleCommunicator(), mesh.device, "auto", "gather")
        return (alone, alone, alone), None, mesh, "reduce"
    shards = mesh if shard_over == "mesh" else mesh.axis(len(mesh.shape) - 1)
    over_shards = shards.communicator
    communicators = over_shards("gather"), over_shards("reduce"), over_shards("control")
    return communicators, shards, mesh.axis(0) if shard_over == "last axis" else None, "copies"


def shape_of(mesh: Mesh, shard_over: str, terms: int = 1) -> tuple[int, int]:
    """(number of shards, number of ranks that add up the gradients of each shard), without communicators.

    terms: number of ranks that each have one term of a gradient.
    """
    if shard_over == "none":
        return 1, mesh.size * terms
    return (mesh.shape[1], mesh.shape[0] * terms) if shard_over == "last axis" else (mesh.size, terms)
