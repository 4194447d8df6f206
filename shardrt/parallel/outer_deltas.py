"""Outer gradients in 4 bits: a sign and three exponent bits (E3M0), with a float32 scale for each block.

A code c is sign * 8 + e: 0 for e = 0, else 2^(e - 7) times the block's largest magnitude. Values are rounded
to the nearest of these. (Douillard et al., Streaming DiLoCo with overlapping communication, 2025.)

A message has the scales, the codes in pairs, and the number of hosts that it speaks for, as float32.
"""

from typing import Any

import numpy as np

from shardrt import device

Array = Any
BLOCK = 128  # elements that share a scale
_LEVELS = np.array([0.0, *(2.0 ** (e - 7) for e in range(1, 8))], np.float32)
_EDGES = (_LEVELS[1:] + _LEVELS[:-1]) / 2  # between neighbouring levels
_VALUES = np.concatenate([_LEVELS, -_LEVELS])  # by code


def encoded_bytes(count: int) -> int:
    """Bytes of a message of `count` elements: 4.25 bits for each element of whole blocks, and 4 bytes."""
    blocks = -(-count // BLOCK)
    return 4 * blocks + blocks * BLOCK // 2 + 4


def encode(values: Array, out: Array) -> None:
    """Write `values`, float32 (count + 1,), of which the last is the number of hosts, to uint8 `out`."""
    host = device.of(values).to_numpy(values)
    blocks = -(-(host.size - 1) // BLOCK)
    padded = np.zeros((blocks, BLOCK), np.float32)
    padded.reshape(-1)[: host.size - 1] = host[:-1]
    scales = np.abs(padded).max(axis=1)
    relative = np.abs(padded) / np.where(scales > 0, scales, 1)[:, None]
    codes = np.searchsorted(_EDGES, relative, side="right").astype(np.uint8)
    codes |= (np.signbit(padded) << 3).astype(np.uint8)
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    message = np.concatenate([scales.view(np.uint8), pairs.reshape(-1), host[-1:].view(np.uint8)])
    device.of(out).copy(out, message)


def decode_add(messages: Array, out: Array) -> None:
    """The sum of `messages`, uint8 (hosts, encoded_bytes), in the order of the hosts, to float32 `out`."""
    total = np.zeros(out.size, np.float32)
    count = out.size - 1
    blocks = -(-count // BLOCK)
    for message in device.of(messages).to_numpy(messages):
        scales = message[: 4 * blocks].view(np.float32)
        pairs = message[4 * blocks : -4].reshape(blocks, BLOCK // 2)
        values = np.empty((blocks, BLOCK), np.float32)
        values[:, ::2] = _VALUES[pairs & 15]
        values[:, 1::2] = _VALUES[pairs >> 4]
        values *= scales[:, None]
        total[:-1] += values.reshape(-1)[:count]
        total[-1:] += message[-4:].view(np.float32)
    device.of(out).copy(out, total)
