"""A whole array on one rank, put together from the chunks of all ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm.protocol import Communicator
from shardrt.nn.extents import Extents, size_of
from shardrt.nn.overlaps import put


def collected(
    control: Communicator, own: np.ndarray, shape: tuple[int, ...], parts: Sequence[Extents]
) -> Any:
    """A host array of `shape` on rank 0, put together from the ranks' chunks; None elsewhere.

    Collective.

    Args:
        own: this rank's chunk, a host array.
        parts: by rank, the elements that each rank has.
    """
    here = device.current()
    if control.rank > 0:
        if own.size:
            control.send(np.ascontiguousarray(own).reshape(-1), peer=0, stream=here.current_stream)
            here.wait_here()  # it has been read
        return None
    whole = np.empty(shape, own.dtype)
    put(parts[0], whole, own.reshape(-1))
    for rank, part in enumerate(parts[1:], start=1):
        piece = np.empty(size_of(part), own.dtype)
        if piece.size:
            control.recv(piece, peer=rank, stream=here.current_stream)
            here.wait_here()
            put(part, whole, piece)
    return whole
