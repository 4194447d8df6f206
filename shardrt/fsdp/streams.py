"""Streams: the streams of one schedule."""

from dataclasses import dataclass

from shardrt.device import Device, Stream


@dataclass
class Streams:
    """upload copies from host to device, download from device to host.

    Without offload, upload is the gather stream and download is the reduce stream. compute is the stream of
    the thread that built the units; forward and backward must run in that thread on a GPU.
    """

    device: Device
    compute: Stream
    gather: Stream
    reduce: Stream
    upload: Stream
    download: Stream
