"""Streams: the streams of one schedule."""

from dataclasses import dataclass

from shardrt.device import Device, Stream


@dataclass
class Streams:
    """upload copies from host to device, download from device to host. Without offload both are others."""

    device: Device
    compute: Stream
    gather: Stream
    reduce: Stream
    upload: Stream
    download: Stream
