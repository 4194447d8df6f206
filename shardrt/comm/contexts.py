"""Communicators of MPI that come to be freed after the program has dropped them.

MPI has room for few of them (MPICH for 2,048), and to free one is collective, while garbage is collected on
each rank at another time. So a communicator that is collected here waits, and ranks compare what waits when
all of them meet anyway (`free_dropped`): what all of its ranks have dropped is freed, in one order.
"""

import gc

from mpi4py import MPI

_MANY = 256  # communicators more than at the last look, before ranks look at what was dropped

_dropped: "dict[tuple[int, ...], Droppable]" = {}
_count = 0  # of those that are not freed
_left = 0  # the largest _count of any rank after the last look


class Droppable(MPI.Intracomm):
    """A communicator, and those made from it.

    path: the path of the communicator that it was made from, and its number among those made from that. All
    of its ranks have the same, and none of them has another communicator of this path.
    """

    path: tuple[int, ...]
    _made: int

    def __new__(cls, mpi: MPI.Intracomm, path: tuple[int, ...] = ()) -> "Droppable":
        """Takes over `mpi`."""
        global _count
        self = super().__new__(cls, mpi)
        self.path, self._made = path, 0
        _count += self != MPI.COMM_NULL
        return self

    def Dup(self) -> "Droppable":
        return self._child(self._plain.Dup())

    def Split(self, color: int = 0, key: int = 0) -> "Droppable":
        return self._child(self._plain.Split(color, key))

    def Split_type(self, split_type: int, key: int = 0) -> "Droppable":
        return self._child(self._plain.Split_type(split_type, key))

    def Free(self) -> None:
        global _count
        super().Free()
        _count -= 1

    @property
    def _plain(self) -> MPI.Intracomm:
        """Itself, for MPI's own methods, which make more of the same class."""
        return MPI.Intracomm(self)

    def _child(self, mpi: MPI.Intracomm) -> "Droppable":
        self._made += 1
        return Droppable(mpi, (*self.path, self._made))

    def __del__(self, dropped: dict = _dropped) -> None:  # bound: globals may be gone at the very end
        if self:
            dropped[self.path] = self


def free_dropped(root: MPI.Intracomm) -> None:
    """Free communicators that were dropped, where there are many. Collective over `root`, all ranks."""
    global _left
    if root.allreduce(_count, MPI.MAX) <= _left + _MANY:
        return
    gc.collect()
    paths = set(_dropped)
    everyone, group = root.allgather(paths), root.Get_group()
    for path in sorted(paths):  # which is one order on all ranks
        mpi = _dropped[path]
        members = MPI.Group.Translate_ranks(mpi.Get_group(), list(range(mpi.size)), group)
        if all(path in everyone[rank] for rank in members):
            _dropped.pop(path).Free()
    _left = root.allreduce(_count, MPI.MAX)
