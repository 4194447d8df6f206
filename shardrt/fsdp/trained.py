"""Which parameters have gradients now: requires_grad may change between steps; memory and traffic follow.

A change counts from the next forward on. Ranks do not exchange it. From then on every gather and reduction
goes by a name that says what is trained, and ranks compare the names of each call anyway: if they have not
made the same change, the first call says so on every rank. Memory for gradients is made anew when the next
backward begins: by then gathers have shown that all ranks do that, or a barrier shows it.
"""

import zlib

from shardrt.comm.protocol import Communicator
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.sharded_gradient import Streams
from shardrt.fsdp.unit import Unit


class Trained:
    """What is trained of the groups of one schedule."""

    def __init__(self, units: list[Unit], control: Communicator) -> None:
        self._units = units
        self.changed = False  # memory does not fit yet
        self._control = control
        self._at_first = self._pattern()
        control.register_names([group.called for group in self.groups])

    @property
    def groups(self) -> list[ParameterGroup]:
        """All of them."""
        return [group for unit in self._units for group in unit.groups]

    def follow(self, streams: Streams) -> bool:
        """A forward begins: take over what the user has frozen or unfrozen, if anything; gives whether.

        Frees the memory that is not needed now.
        """
        wanted = [
            (group.to_train(bool(unit.pending)), unit.choices.find_unused)
            for unit in self._units
            for group in unit.groups
        ]
        if wanted == [(group.trained, group.finds_unused) for group in self.groups]:
            return False
        streams.reduce.synchronize()  # nothing reads or writes the memory that goes
        streams.download.synchronize()
        for group, (trained, finds_unused) in zip(self.groups, wanted, strict=True):
            group.train(trained, finds_unused)
        self.changed = True
        pattern = self._pattern()
        told = ""
        if pattern != self._at_first:
            trained = sum(len(group.trained) for group in self.groups)
            everything = sum(len(group.parameters) for group in self.groups)
            told = (
                f", {trained} of {everything} parameters trained [{zlib.crc32(repr(pattern).encode()):08x}]"
            )
        for group in self.groups:
            group.called = group.label + told
        self._control.register_names([group.called for group in self.groups])
        return True

    def agree(self, streams: Streams) -> None:
        """Before memory is made anew, which ranks do together: find that all have come to it. Collective.

        In the reduce stream, for which the caller waits.
        """
        for communicator in dict.fromkeys(group.ranks.reducer for group in self.groups):
            communicator.barrier(stream=streams.reduce, what=self.groups[0].called)
        self.changed = False

    def _pattern(self) -> list[tuple]:
        return [(sorted(group.trained), group.finds_unused) for group in self.groups]
