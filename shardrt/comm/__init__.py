"""Communicators behind one protocol, and the mesh of ranks. Nothing here knows a tensor, layer or unit."""

from shardrt.comm.backends import create
from shardrt.comm.counter import CollectiveCounter
from shardrt.comm.delay import CollectiveDelay
from shardrt.comm.errors import CollectiveMismatch, PeerFailed
from shardrt.comm.mesh import DeviceMesh, init_device_mesh
from shardrt.comm.protocol import Communicator

__all__ = [
    "CollectiveMismatch",
    "Communicator",
    "CollectiveCounter",
    "CollectiveDelay",
    "DeviceMesh",
    "PeerFailed",
    "create",
    "init_device_mesh",
]
