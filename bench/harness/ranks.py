"""The ranks of a run: they start together, and bring their figures together."""

from typing import Any

from shardrt.comm import Communicator, create
from shardrt.comm.objects import all_gather_object


class Ranks:
    """All ranks of this run; one without mpirun. Collective to make, without `control`.

    `shardrt.train.errors.one_line` takes it for a mesh.
    """

    def __init__(self, control: Communicator | None = None) -> None:
        self._control = control or create("auto")
        self.rank, self.size = self._control.rank, self._control.size

    def communicator(self, role: str) -> Communicator:
        """The same communicator for every role."""
        return self._control

    def start(self) -> None:
        """Return when all ranks have called this."""
        if self.size > 1:
            self._control.all_gather_bytes(b"")

    def gathered(self, value: Any) -> list[Any]:
        """The `value` of each rank, in order, after a round trip through JSON. Collective."""
        return all_gather_object(self._control, value)

    def gathered_bytes(self, data: bytes) -> list[bytes]:
        """The `data` of each rank, in order. Collective."""
        return self._control.all_gather_bytes(data)
