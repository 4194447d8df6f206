"""CPU offload: parts of a unit live in host memory between uses."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrt import dtypes
from shardrt.device import Device, Event, host
from shardrt.device.arena import Arena, Slot
from shardrt.fsdp.buffers import PlanInputs, Specs, alike, share
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.policy import OffloadPolicy
from shardrt.fsdp.sharded_gradient import Send, ShardedGradient
from shardrt.fsdp.streams import Streams
from shardrt.fsdp.transfer import Transfer
from shardrt.nn.storage import Offloaded

Array = Any

STAGING_SLOTS = 2  # one slot is copied while the other is used


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """The parts of a unit that live in host memory between uses.

    Parameters and gradients each free 4 bytes per element on the device, AdamW's state 8.
    (Rajbhandari et al., ZeRO-Infinity, 2021.)

    Args:
        parameters: keep the float32 shards on the host. They are copied to the device before each gather.
        gradients: keep the sharded gradients on the host. They are copied there after each reduction.
        optimizer_state: keep it on the host. The optimizer step copies it to the device and back, in parts.
        step: "device": the optimizer updates on the device. "host": it updates with the host's kernels, which
            needs all three parts on the host.
        directory: folder for memory-mapped files that back the host arrays, for models larger than host
            memory. The files have no names and disappear when the program ends for any reason.

    Raises:
        ValueError: for an unknown step, and for step="host" unless all three parts are on the host.

    Example:
        >>> from shardrt import nn
        >>> from shardrt.fsdp import CPUOffloadPolicy, fully_shard
        >>> model = fully_shard(nn.Linear(8, 8), offload_policy=CPUOffloadPolicy(step="host"))
    """

    parameters: bool = True
    gradients: bool = True
    optimizer_state: bool = True
    step: str = "device"
    directory: Path | str | None = None

    def __post_init__(self) -> None:
        if self.step not in ("device", "host"):
            raise ValueError(f"CPUOffloadPolicy: step must be 'device' or 'host', got {self.step!r}")
        everything = self.parameters and self.gradients and self.optimizer_state
        if self.step == "host" and not everything:
            raise ValueError(
                "CPUOffloadPolicy: step='host' needs parameters, gradients and optimizer_state on the host"
            )

    @property
    def offloaded(self) -> Offloaded:
        directory = None if self.directory is None else Path(self.directory)
        return Offloaded(self.parameters, self.gradients, self.optimizer_state, self.step, directory)

    def sharded_gradient(self) -> ShardedGradient:
        return HostGradient() if self.gradients else ShardedGradient()

    def host_buffer(self, device: Device, count: int, dtype: Any) -> Array:
        return host.buffer(device, count, dtype, self.offloaded.directory)

    def filled(self, shard: Array) -> None:
        host.drop(shard)


class UploadedTransfer(Transfer):
    """Copies a shard from the host to its place in the slot."""

    def __init__(self, group: ParameterGroup, arrived: Event) -> None:
        super().__init__(group)
        self.arrived = arrived  # recorded when the shard has arrived from the host

    @classmethod
    def choose(cls, group: ParameterGroup, own_slot: bool) -> Transfer | None:
        return cls(group, group.memory.device.new_event()) if group.offloaded.parameters else None

    @classmethod
    def needs_separate_shard(cls, group: ParameterGroup) -> bool:
        return group.offloaded.parameters

    def fill(self, slot: Slot, output: Array, streams: Streams) -> None:
        streams.upload.wait(slot.free)  # compute has finished with the unit that had the slot
        label = f"upload {self.group.label}"
        streams.upload.submit(upload, streams.device, output, self.group.shard, label=label)
        streams.upload.record(self.arrived)
        streams.gather.wait(self.arrived)  # this rank's shard has arrived from the host


def upload(device: Device, target: Array, shard: Array) -> None:
    """Copy the shard. Free the pages of a memory-mapped one: they are not needed before the update."""
    device.copy(target, shard)
    host.drop(shard)


def plan_staging(
    specs: Specs, layouts: dict[ParameterGroup, Layout], groups: list[ParameterGroup], inputs: PlanInputs
) -> None:
    """Add the slots through which shards come from the host to be rounded, and gradients go there."""
    rounded = alike(g for g in groups if g.offloaded.parameters and g.key.param in dtypes.LOW)
    reduced = alike(g for g in groups if g.offloaded.gradients and g.trainable)
    for role, lists in (("upload", rounded), ("download", reduced)):
        for members in lists:
            count = max(layouts[g].shard_size for g in members)
            share(specs, members, role, count, members[0].key.dtype, STAGING_SLOTS)


class HostGradient(ShardedGradient):
    """A sharded gradient on the host. Each reduction adds to it in a staging slot on the device."""

    def receive(
        self,
        slot: Slot,
        streams: Streams,
        send: Send,
        part: tuple[int, int] | None = None,
        staging: Arena | None = None,
    ) -> None:
        staged = staging.acquire()
        try:
            self._through(staged, slot, streams, send)
        finally:
            staging.release(staged)

    def _through(self, staged: Slot, slot: Slot, streams: Streams, send: Send) -> None:
        on_host, accumulate = self.arrays[0], self.reductions > 0
        array = staged.array[: on_host.size]
        if accumulate:  # upload the sum so far and add on the device: bitwise identical to no offload
            streams.upload.wait(staged.free)  # the last gradient in the staging slot is on the host
            streams.upload.wait(self.ready)  # this group's last sum is on the host
            copy, label = streams.device.copy, f"upload gradient {self.label}"
            streams.upload.submit(copy, array, on_host, label=label)
            streams.upload.record(staged.ready)
            streams.reduce.wait(staged.ready)  # the sum so far has arrived from the host
        else:
            streams.reduce.wait(staged.free)  # the last gradient in the staging slot is on the host
        send(array, accumulate)
        streams.reduce.record(slot.free)  # the full gradients have been read
        streams.reduce.record(staged.ready)
        streams.download.wait(staged.ready)  # the sum is complete
        streams.download.submit(streams.device.copy, on_host, array, label=f"download {self.label}")
        streams.download.record(staged.free)
        streams.download.record(self.ready)
