"""Frees MPI communicators that the program has dropped.

MPI has room for few communicators (MPICH for 2,048). Freeing one is collective, but ranks collect garbage at
different times. So a dropped communicator waits here. When all ranks meet anyway (`free_dropped`), they free
the communicators that all of their ranks have dropped, in one order.
"""

import gc

from mpi4py import MPI

_MANY = 256  # new communicators since the last `free_dropped` before ranks free again

_dropped: "dict[tuple[int, ...], Droppable]" = {}
_count = 0  # communicators that are not freed
_left = 0  # the largest _count of any rank after the last `free_dropped`


class Droppable(MPI.Intracomm):
    """A communicator that waits to be freed when it is dropped.

    Communicators made from it do so, too.

    Attributes:
        path: the path of its parent communicator, and its number among the parent's children. It is the same
            on all its ranks, and unique on each rank.
    """

    path: tuple[int, ...]
    _made: int

    def __new__(cls, mpi: MPI.Intracomm, path: tuple[int, ...] = ()) -> "Droppable":
        """Takes ownership of `mpi`."""
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
        """This communicator as MPI.Intracomm, whose methods return that class."""
        return MPI.Intracomm(self)

    def _child(self, mpi: MPI.Intracomm) -> "Droppable":
        self._made += 1
        return Droppable(mpi, (*self.path, self._made))

    def __del__(self, dropped: dict = _dropped) -> None:  # bound: globals may be gone at the very end
        if self:
            dropped[self.path] = self


def free_dropped(root: MPI.Intracomm) -> None:
    """Free dropped communicators, if there are many. Collective over `root`, all ranks."""
    global _left
    if root.allreduce(_count, MPI.MAX) <= _left + _MANY:
        return
    gc.collect()
    paths = set(_dropped)
    everyone, group = root.allgather(paths), root.Get_group()
    for path in sorted(paths):  # the same order on all ranks
        mpi = _dropped[path]
        members = MPI.Group.Translate_ranks(mpi.Get_group(), list(range(mpi.size)), group)
        if all(path in everyone[rank] for rank in members):
            _dropped.pop(path).Free()
    _left = root.allreduce(_count, MPI.MAX)
