"""Gradients of HYBRID_SHARD in 8 bits between hosts (Quantisation): each host holds a copy of all shards.

The ranks of a host sum their gradients in float32. Ranks of the same number on their hosts, which hold the
same shard, then exchange quantised parts by all-to-all and add them up in float32, in the order of the hosts.
They quantise the sums and all-gather these bytes. So each number is rounded twice, and all copies are
bitwise identical.
"""

from typing import Any

import numpy as np

from shardrt import dtypes
from shardrt.device.arena import Slot
from shardrt.fsdp.buffers import PlanInputs, Spec, Specs
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.options.quantisation import Quantisation
from shardrt.fsdp.options.quantised import alike_by_how, requested
from shardrt.fsdp.whole_gradient import WholeGradient

Array = Any


def copies_config_of(group: Any) -> Quantisation | None:
    """The Quantisation of a group whose copies lie on several hosts, one on each, else None."""
    settings = group.settings
    how = requested(settings)
    if how is None or how.reduce_bits is None or group.key.dtype != dtypes.float32:
        return None
    if settings.strategy.rules.shard_over != "last axis" or group.key.partial:
        return None
    hosts = settings.mesh.ranks // how.ranks_per_host(settings.mesh)  # (copies, shards)
    apart = len(np.unique(hosts)) == len(hosts) > 1 and (hosts == hosts[:, :1]).all()
    return how if apart else None


class QuantisedCopies(WholeGradient):
    """Sums the gradients of copies on different hosts in 8 bits."""

    packs = True  # takes a slot for all of the gradients, so it is not sent in chunks

    @classmethod
    def choose(cls, group: ParameterGroup, layout: Layout, slot: int | None) -> WholeGradient | None:
        return None if copies_config_of(group) is None else cls(group, layout)

    def send(self, slot: Slot, out: Array, accumulate: bool) -> None:
        group, stream, across = self.group, self.streams.reduce, self.group.ranks.replicate
        how, kernels = copies_config_of(group), self.streams.device.kernels
        form = how.reduce_form
        summed = slot.array[slice(*group.layout.shard_range(group.ranks.rank))]
        if group.ranks.size > 1:
            group.ranks.reduce.reduce_scatter(summed, slot.array[: self.full], stream=stream, tag=group.tag)
        parts = summed.reshape(across.size, -1)  # of which each rank along `across` adds up one
        own, errors = parts[across.rank], None
        if (arena := group.arenas.get("quantisation_error")) is not None:
            errors = arena.slots[0].array[: self.kept].reshape(parts.shape)
            stream.submit(kernels.reduce.sum_into, errors.reshape(-1), [summed], 1.0, True)
            parts = errors
        nbytes = how.reduced_bytes(own.size)
        slots = group.arenas["quantised_gradients"].slots
        sent, received = (slot.array[: across.size * nbytes].reshape(across.size, nbytes) for slot in slots)
        for part, packed in zip(parts, sent, strict=True):
            self._pack(part, packed, form, errors is not None)
        across.all_to_all(received.reshape(-1), sent.reshape(-1), stream=stream, tag=group.tag)
        stream.submit(kernels.quantise.sum_rows, received, own, *form, 1.0, False)
        self._pack(own, received[across.rank], form, errors is not None)
        if errors is not None:  # this rank sends itself what the sum lost, with its next gradient
            stream.submit(kernels.reduce.sum_into, errors[across.rank], [own], 1.0, True)
        across.all_gather(received.reshape(-1), stream=stream, tag=group.tag)
        scale = 1.0 / group.choices.divide_factor
        for packed, part in zip(received, out.reshape(across.size, -1), strict=True):
            stream.submit(kernels.quantise.sum_rows, packed[None], part, *form, scale, accumulate)

    def _pack(self, numbers: Array, packed: Array, form: tuple[int, int], keep_error: bool) -> None:
        """Quantise numbers into `packed`. keep_error: leave in `numbers` what the rounding lost."""
        stream, kernels = self.streams.reduce, self.streams.device.kernels.quantise
        stream.submit(kernels.pack, numbers, packed, *form)
        if keep_error:
            stream.submit(kernels.subtract, packed, numbers, *form)


def plan_copies(
    specs: Specs, layouts: dict[ParameterGroup, Layout], groups: list[ParameterGroup], inputs: PlanInputs
) -> None:
    """Add the buffers of sums over copies in 8 bits."""
    copied = [(group, copies_config_of(group)) for group in groups if group.key.trainable]
    for members, how in alike_by_how([(group, how) for group, how in copied if how and group.trainable]):
        layout = max((layouts[group] for group in members), key=lambda each: each.shard_size)
        nbytes = layout.copies * how.reduced_bytes(layout.shard_size // layout.copies)
        shared = Spec("quantised_gradients", nbytes, "uint8", 2)  # what is sent, and what is received
        for group in members:
            specs[group]["quantised_gradients"] = shared
    for group, how in copied:
        if how and how.error_feedback:
            errors = layouts[group].shard_size
            specs[group]["quantisation_error"] = Spec("quantisation_error", errors, dtypes.float32)
