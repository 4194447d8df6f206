"""Which gradients no rank has written anything of: they are None, and optimizers leave those units alone.

A rank that has written a gradient knows that there is one. Only a rank that has not needs the others' word,
and it waits for that no sooner than it is asked. So ranks do not meet where backward ends: they tell each
other by one small message in a stream of the hosts.
"""

from functools import partial

import numpy as np

from shardrt import device
from shardrt.comm.mesh import DeviceMesh
from shardrt.device import Event
from shardrt.fsdp.group import Group


class Used:
    """What the ranks tell each other of the gradients of one schedule."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._alone = mesh.size == 1
        if not self._alone:
            self._communicator, self._stream = mesh.communicator("used"), mesh.stream("used")
        self._wrote: dict[Group, bool] = {}  # of those that had no gradient before the present backward

    def reduced(self, group: Group, wrote: bool) -> None:
        """A reduction of `group` was issued, into which this rank has put something, or just zeros."""
        if group in self._wrote or not group.used:
            self._wrote[group] = wrote or self._wrote.get(group, False)
            group.used = self._wrote[group]

    def end_backward(self) -> list[Group]:
        """Tell the other ranks; gives the groups that wait for their word. Collective, and does not wait."""
        wrote, self._wrote = self._wrote, {}
        if self._alone or not wrote:
            return []
        anybody, told = np.array(list(wrote.values()), np.int64), device.get("cpu").new_event()
        self._communicator.all_reduce(anybody, op="max", stream=self._stream)
        self._stream.record(told)
        for place, group in enumerate(wrote):
            group.told_used = partial(_told, anybody, told, place)
        return [group for group, own in wrote.items() if not own]

    def forget(self) -> None:
        """The backward raised."""
        self._wrote = {}


def _told(anybody: np.ndarray, told: Event, place: int) -> bool:
    told.synchronize()
    return bool(anybody[place])
