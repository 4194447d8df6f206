"""Collectives in 8 and 4 bits between hosts (Quantisation): the transfer, the gradient path, their buffers.

A gather quantises each shard, all-gathers the bytes, and dequantises all of them. A secondary copy within the
host serves later gathers of the same values. A reduction has two levels:
the ranks of a host sum their gradients, then counterparts (ranks of the same number on their hosts) exchange
quantised sums by all-to-all and add them up in float32, in the order of the hosts.
"""

from dataclasses import replace
from typing import Any

from shardrt import dtypes
from shardrt.device.arena import Slot
from shardrt.fsdp.buffers import PlanInputs, Spec, Specs, alike, share
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.options.mixed_precision import MixedPrecisionPolicy
from shardrt.fsdp.options.quantisation import Quantisation
from shardrt.fsdp.policy import Settings
from shardrt.fsdp.process_groups import ProcessGroups, shape_of
from shardrt.fsdp.streams import Streams
from shardrt.fsdp.transfer import Transfer
from shardrt.fsdp.whole_gradient import WholeGradient

Array = Any


def requested(settings: Settings) -> Quantisation | None:
    """The Quantisation that a unit's settings ask for, else None."""
    policy = settings.precision
    return policy.quantised if isinstance(policy, MixedPrecisionPolicy) else None


def config_of(group: Any) -> Quantisation | None:
    """The Quantisation of a group of float32 shards that lie on several hosts, else None."""
    how = requested(group.settings)
    if how is None or group.key.dtype != dtypes.float32 or group.offloaded.parameters:
        return None
    hosts, _ = hosts_of(group, how)
    return how if hosts > 1 else None


def reduce_config_of(group: Any) -> Quantisation | None:
    """The Quantisation of a group whose gradients are quantised and have no replicas."""
    how = config_of(group)
    if how is None or how.reduce_bits is None or group.key.partial:
        return None
    return how if shape_of(*group.settings.shard_spec)[1] == 1 else None


def hosts_of(group: Any, how: Quantisation) -> tuple[int, int]:
    """(number of hosts, ranks per host) of the ranks that shard a group; (1, all) if hosts differ."""
    settings = group.settings
    shards, _ = shape_of(settings.mesh, settings.strategy.rules.shard_over)
    here = settings.shards_on_node(how.ranks_per_host(settings.mesh)) if shards > 1 else 1
    return (1, shards) if shards % here else (shards // here, here)


class QuantisedTransfer(Transfer):
    """Quantises the shard, all-gathers bytes, and dequantises them into the slot.

    All groups that are alike share one buffer for the bytes. Only the gather stream uses it, in order, so it
    needs no events. A 16-bit slot is filled shard by shard, through one float32 buffer.

    With `secondary`, the ranks of a host keep these bytes between them, one part each. Until the shards
    change, a gather collects the parts within the host.

    is_fresh: the secondary copy has the shards' current values.
    """

    def __init__(self, group: ParameterGroup) -> None:
        super().__init__(group)
        self.is_fresh = False
        self._graph: Any = None  # that captures the calls that use the copy

    @classmethod
    def choose(cls, group: ParameterGroup, own_slot: bool) -> Transfer | None:
        return cls(group) if cls.needs_separate_shard(group) else None

    @classmethod
    def needs_separate_shard(cls, group: ParameterGroup) -> bool:
        how = config_of(group)
        return how is not None and how.gather_bits is not None

    def shard_written(self, copy_too: bool) -> None:
        self.is_fresh = False

    def issue(self, slot: Slot, streams: Streams) -> None:
        group, how = self.group, config_of(self.group)
        nbytes = how.gathered_bytes(group.layout.shard_size)
        packed = group.arenas["quantised"].slots[0].array[: group.ranks.size * nbytes]
        if how.secondary:
            self._gather_with_copy(packed, how, streams)
        else:
            self._gather(packed, how, streams)
        streams.gather.wait(slot.free)  # compute has finished with the unit that had the slot
        self._dequantise(packed.reshape(group.ranks.size, nbytes), slot, how, streams)
        streams.gather.record(slot.ready)

    def _gather(self, packed: Array, how: Quantisation, streams: Streams) -> None:
        """Fill `packed` from the shards of all ranks."""
        group, ranks, stream = self.group, self.group.ranks, streams.gather
        own = packed.reshape(ranks.size, -1)[ranks.rank]
        kernel = streams.device.kernels.quantise.pack
        stream.submit(kernel, group.shard, own, *how.gather_form)
        ranks.gather.all_gather(packed, stream=stream, tag=group.tag)

    def _gather_with_copy(self, packed: Array, how: Quantisation, streams: Streams) -> None:
        """Fill `packed` from the copy on this host if it is fresh, else from all ranks, and make the copy."""
        group, stream, copy = self.group, streams.gather, streams.device.copy
        if streams.device.capturing is not self._graph:  # a captured graph starts with a stale copy
            self._graph, self.is_fresh = streams.device.capturing, False
        within = mesh_of_hosts(group, how).communicator("gather", "host")
        part = packed.reshape(within.size, -1)[within.rank]
        kept = group.arenas["secondary"].slots[0].array
        if self.is_fresh:
            stream.submit(copy, part, kept)
            if within.size > 1:
                within.all_gather(packed, stream=stream, tag=group.tag)
        else:
            self._gather(packed, how, streams)
            stream.submit(copy, kept, part)
            self.is_fresh = True

    def _dequantise(self, rows: Array, slot: Slot, how: Quantisation, streams: Streams) -> None:
        """Fill the slot from the quantised shards, one row each."""
        group, stream, kernels = self.group, streams.gather, streams.device.kernels
        full, kind, form = slot.array[: group.layout.total], group.key.param, how.gather_form
        if full.itemsize == 4:
            stream.submit(kernels.quantise.unpack, rows, full, *form)
            if kind in dtypes.LOW:
                stream.submit(kernels.cast.round_to, full, full, kind)
            return
        numbers = group.arenas["dequantised"].slots[0].array[: group.layout.shard_size]
        parts = full.view(dtypes.storage(kind)).reshape(len(rows), -1)
        for row, part in zip(rows, parts, strict=True):
            stream.submit(kernels.quantise.unpack, row[None], numbers, *form)
            stream.submit(kernels.cast.pack, numbers, part, kind)


class QuantisedGradient(WholeGradient):
    """Sends gradients between hosts in 8 bits. Each hop rounds once; all sums are float32."""

    packs = True  # takes a slot for all of the gradients, so it is not sent in chunks

    @classmethod
    def choose(cls, group: ParameterGroup, layout: Layout, slot: int | None) -> WholeGradient | None:
        return None if reduce_config_of(group) is None else cls(group, layout)

    def send(self, slot: Slot, out: Array, accumulate: bool) -> None:
        group, how = self.group, config_of(self.group)
        hosts, size = hosts_of(group, how)
        mesh = mesh_of_hosts(group, how)
        full = slot.array[: self.full].reshape(hosts, size, self.kept)
        for rows in full:
            self._sum_within(rows, mesh.communicator("reduce", "host"), how)
        own = full[:, mesh.rank_of("host")]
        self._sum_across(own, out, accumulate, mesh.communicator("reduce", "hosts"), how)

    def _sum_within(self, rows: Array, within: Any, how: Quantisation) -> None:
        """Write the sum over this host to this rank's row; only this row is valid then."""
        if within.size == 1:
            return
        own, stream = rows[within.rank], self.streams.reduce
        if not how.within_hosts:
            within.reduce_scatter(own, rows.reshape(-1), stream=stream, tag=self.group.tag)
        else:
            received = self._exchange(rows, within, how)
            stream.submit(self._kernels.sum_rows, received, own, *how.reduce_form, 1.0, False)

    def _sum_across(self, rows: Array, out: Array, accumulate: bool, across: Any, how: Quantisation) -> None:
        """Set out = (out if `accumulate`) + scale * the sum over hosts. rows: this host's sums, by host."""
        stream, errors = self.streams.reduce, None
        if (arena := self.group.arenas.get("quantisation_error")) is not None:
            errors = arena.slots[0].array[: rows.size].reshape(rows.shape)
            add = self.streams.device.kernels.reduce.sum_into
            for row, error in zip(rows, errors, strict=True):
                stream.submit(add, error, [row], 1.0, True)
        received = self._exchange(rows if errors is None else errors, across, how, errors is not None)
        scale = 1.0 / self.group.choices.divide_factor
        stream.submit(self._kernels.sum_rows, received, out, *how.reduce_form, scale, accumulate)

    def _exchange(self, rows: Array, ranks: Any, how: Quantisation, keep_error: bool = False) -> Array:
        """Send row r, quantised, to rank r. Returns what all ranks sent here, quantised, one row each.

        keep_error: leave in `rows` what the rounding lost.
        """
        stream, form, nbytes = self.streams.reduce, how.reduce_form, how.reduced_bytes(self.kept)
        slots = self.group.arenas["quantised_gradients"].slots
        sent, received = (slot.array[: ranks.size * nbytes] for slot in slots)
        for row, packed in zip(rows, sent.reshape(ranks.size, nbytes), strict=True):
            stream.submit(self._kernels.pack, row, packed, *form)
            if keep_error:
                stream.submit(self._kernels.subtract, packed, row, *form)
        ranks.all_to_all(received, sent, stream=stream, tag=self.group.tag)
        return received.reshape(ranks.size, nbytes)

    @property
    def _kernels(self) -> Any:
        return self.streams.device.kernels.quantise


def mesh_of_hosts(group: Any, how: Quantisation) -> Any:
    """The mesh ("hosts", "host") of the ranks that shard a group. The first call for them is collective."""
    mesh, over = group.settings.shard_spec
    shards = mesh.axis(len(mesh.shape) - 1) if over == "last axis" else mesh.flat()
    return shards.fold("host", hosts_of(group, how)[1], rest="hosts")


def connect_hosts(
    layouts: dict[ParameterGroup, Layout], ranks_of: dict[ParameterGroup, ProcessGroups], inputs: PlanInputs
) -> None:
    """Make the communicators of hosts and across hosts. Collective."""
    for group in layouts:
        how = config_of(group)
        if how is None:
            continue
        mesh = mesh_of_hosts(group, how)
        if how.secondary:
            mesh.communicator("gather", "host")
        if reduce_config_of(group) is not None:
            for axis in ("host", "hosts"):
                mesh.communicator("reduce", axis)


def plan_quantised(
    specs: Specs, layouts: dict[ParameterGroup, Layout], groups: list[ParameterGroup], inputs: PlanInputs
) -> None:
    """Add the buffers of quantised collectives. Ranks do not share the slots that they dequantise into."""
    quantised = [(group, config_of(group)) for group in groups]
    own: dict[Spec, Spec] = {}
    for members, how in alike_by_how([(g, how) for g, how in quantised if how and how.gather_bits]):
        count = max(layouts[g].shard_size for g in members)
        shards = layouts[members[0]].shards
        share(specs, members, "quantised", shards * how.gathered_bytes(count), "uint8", 1)
        for group in members:
            slot = specs[group]["gathered"]
            specs[group]["gathered"] = own.setdefault(slot, replace(slot, shared_by=1))
            if how.secondary:
                hosts, _ = hosts_of(group, how)
                part = hosts * how.gathered_bytes(layouts[group].shard_size)
                specs[group]["secondary"] = Spec("secondary", part, "uint8")
        if specs[members[0]]["gathered"].dtype.itemsize == 2:
            share(specs, members, "dequantised", count, dtypes.float32, 1)
    reduced = [(group, reduce_config_of(group)) for group in groups]
    sent = [(g, replace(how, gather_bits=None, secondary=False)) for g, how in reduced if how and g.trainable]
    for members, how in alike_by_how(sent):
        count = max(layouts[g].shard_size for g in members)
        hosts, size = hosts_of(members[0], how)
        name, nbytes = "quantised_gradients", max(hosts, size) * how.reduced_bytes(count)
        shared = Spec(name, nbytes, "uint8", 2)  # what is sent, and what is received
        for group in members:
            specs[group][name] = shared
    for group, how in reduced:
        if how and how.error_feedback and group.key.trainable:  # kept also while the group is frozen
            errors = hosts_of(group, how)[0] * layouts[group].shard_size
            specs[group]["quantisation_error"] = Spec("quantisation_error", errors, dtypes.float32)


def alike_by_how(groups: list[tuple[ParameterGroup, Quantisation]]) -> list[tuple[list, Quantisation]]:
    """buffers.alike, apart by Quantisation."""
    kinds = dict.fromkeys(how for _, how in groups)
    return [(members, how) for how in kinds for members in alike(g for g, each in groups if each == how)]
