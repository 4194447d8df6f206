"""CPU offload: parts of a unit that live in host memory between uses, and how gradients get there."""

from dataclasses import dataclass
from pathlib import Path

from shardrt.device.arena import Arena, Slot
from shardrt.fsdp.policy import OffloadPolicy
from shardrt.fsdp.sharded_gradient import Send, ShardedGradient, Streams
from shardrt.nn.storage import HostPlacement


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """The parts of a unit that live in host memory between uses.

    Each frees 4 bytes per element on the device, AdamW's state 8.

    parameters: the float32 shards; copied to the device before each gather.
    gradients: the sharded gradients; copied to the host after each reduction.
    optimizer_state: brought to the device piece by piece during the update, and back.
    step: "device" updates on the device and streams what is on the host through it; "host" updates with the
    host's kernels, which needs all three on the host.
    directory: host arrays are memory-mapped files there, for models larger than host memory. The files have
    no names and are gone when the program ends, however it does.

    (Rajbhandari et al., ZeRO-Infinity, 2021.) Raises ValueError for settings that do not fit together.
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
    def placement(self) -> HostPlacement:
        directory = None if self.directory is None else Path(self.directory)
        return HostPlacement(self.parameters, self.gradients, self.optimizer_state, self.step, directory)

    def sharded_gradient(self) -> ShardedGradient:
        return HostGradient() if self.gradients else ShardedGradient()


class HostGradient(ShardedGradient):
    """The sum is made on the device, in a staging slot, and copied to the host."""

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
        if accumulate:  # what was accumulated so far comes back, so that the sum is bitwise identical
            streams.upload.wait(staged.free)  # the gradient that used the slot before is on the host
            streams.upload.wait(self.ready)  # so is this group's last one
            copy, label = streams.device.copy, f"upload gradient {self.label}"
            streams.upload.submit(copy, array, on_host, label=label)
            streams.upload.record(staged.ready)
            streams.reduce.wait(staged.ready)  # the sum so far has come from the host
        else:
            streams.reduce.wait(staged.free)  # the gradient that used the slot before is on the host
        send(array, accumulate)
        streams.reduce.record(slot.free)
        streams.reduce.record(staged.ready)
        streams.download.wait(staged.ready)  # the sum is complete
        streams.download.submit(streams.device.copy, on_host, array, label=f"download {self.label}")
        streams.download.record(staged.free)
        streams.download.record(self.ready)
