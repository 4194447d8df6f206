"""ProcessGroups: the ranks among which a unit is cut, and the ranks that hold the same shard of it."""

from dataclasses import dataclass

from shardrt.comm.backends import for_device
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.protocol import Communicator
from shardrt.comm.single import SingleCommunicator


@dataclass(frozen=True)
class ProcessGroups:
    """Communicators of one kind of cut.

    gather, reduce, control: over the ranks that together hold one whole unit, one communicator per stream.
    replicate: over the ranks that hold the same shard as this one; None if no other does.
    """

    gather: Communicator
    reduce: Communicator
    control: Communicator
    replicate: Communicator | None

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
        return self.replicate if self.size == 1 and self.replicate is not None else self.reduce

    @property
    def replicas(self) -> int:
        """How many ranks hold each shard."""
        return self.replicate.size if self.replicate is not None else 1

    @classmethod
    def of(cls, mesh: DeviceMesh, cut: str) -> "ProcessGroups":
        """Those for strategy.Row.cut, on a mesh of all ranks that train the model. Collective over it."""
        if cut == "none":
            alone = for_device(SingleCommunicator(), mesh.device, "auto", "gather")
            return cls(alone, alone, alone, mesh.communicator("reduce") if mesh.size > 1 else None)
        dim = 1 if cut == "last axis" else None
        copies = mesh.communicator("copies", 0) if cut == "last axis" and mesh.shape[0] > 1 else None
        return cls(*(mesh.communicator(role, dim) for role in ("gather", "reduce", "control")), copies)


def shape_of(mesh: DeviceMesh, cut: str) -> tuple[int, int]:
    """(shards, copies of each) of a unit's shard groups, without making them."""
    if cut == "none":
        return 1, mesh.size
    return (mesh.shape[1], mesh.shape[0]) if cut == "last axis" else (mesh.size, 1)
