"""FollowsRequiresGrad: memory and traffic of gradients follow requires_grad, which may change between steps.

A change takes effect at the next forward. Ranks do not exchange it. Instead, the tag of every gather and
reduction names the set of trained parameters from then on. On a CPU, ranks compare the tags of each
collective: if they have made different changes, the first collective raises on every rank. Memory for
gradients is replaced when the next backward begins. By then, gathers or a barrier have shown that all ranks
made the same change. NCCL compares no tags: there, only the watchdog ends ranks that differ.
"""

import zlib

from shardrt.comm.protocol import Communicator
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.streams import Streams
from shardrt.fsdp.trainable import TrainableSet
from shardrt.fsdp.unit import Unit


class FollowsRequiresGrad(TrainableSet):
    """The sets of trained parameters in the groups of one schedule."""

    def __init__(self, units: list[Unit], control: Communicator) -> None:
        super().__init__(units, control)
        self._units = units
        self._control = control
        self._at_first = self._pattern()

    @property
    def groups(self) -> list[ParameterGroup]:
        """All groups of the schedule."""
        return [group for unit in self._units for group in unit.groups]

    def follow(self, streams: Streams) -> bool:
        """As TrainableSet.follow. Frees memory of gradients that is not needed any more."""
        wanted = [
            (group.to_train(bool(unit.pending)), unit.choices.find_unused)
            for unit in self._units
            for group in unit.groups
        ]
        if wanted == [(group.trained, group.finds_unused) for group in self.groups]:
            return False
        streams.reduce.synchronize()  # reductions no longer use the memory that group.train frees
        streams.download.synchronize()  # nor do copies to the host
        for group, (trained, finds_unused) in zip(self.groups, wanted, strict=True):
            group.train(trained, finds_unused)
        self.changed = True
        pattern = self._pattern()
        suffix = ""
        if pattern != self._at_first:
            trained = sum(len(group.trained) for group in self.groups)
            everything = sum(len(group.parameters) for group in self.groups)
            checksum = zlib.crc32(repr(pattern).encode())
            suffix = f", {trained} of {everything} parameters trained [{checksum:08x}]"
        for group in self.groups:
            group.tag = group.label + suffix
        self._control.register_names([group.tag for group in self.groups])
        return True

    def agree(self, streams: Streams) -> None:
        """Wait in the reduce stream for all ranks, before they replace memory together. Collective.

        The barrier's tag names the trained parameters, so it raises if ranks differ. The caller waits for the
        reduce stream.
        """
        for communicator in dict.fromkeys(group.ranks.reducer for group in self.groups):
            communicator.barrier(stream=streams.reduce, tag=self.groups[0].tag)
        self.changed = False

    def _pattern(self) -> list[tuple]:
        return [(sorted(group.trained), group.finds_unused) for group in self.groups]
