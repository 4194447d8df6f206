"""Keys and values of the tokens that a model has read: each new token then costs one row, not all again."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardrt import Tensor, device
from shardrt import functional as F
from shardrt.autograd import is_grad_enabled
from shardrt.functional.attention import split_heads

from .inputs import check_positions, check_tokens

Array = Any


class KVCache:
    """One LayerCache per layer, for `room` tokens of each sequence of a batch.

    Costs 2 * batch * kv_heads * room * head_dim elements a layer, on every rank, taken at the first use. A
    layer with a window keeps the tokens in it alone: with fewer of them, that number stands for room.
    """

    def __init__(self, layers: int, room: int) -> None:
        self.room = room
        self.length = 0  # tokens read
        self.layers = [LayerCache(room) for _ in range(layers)]

    def extend(self, tokens: np.ndarray) -> tuple[int, list["LayerCache"]]:
        """(position of the first of `tokens`, the layers' caches); from now on they count as read.

        Raises ValueError where there is no room, for more than one token after the first call, and where
        gradients are recorded: none would flow into what was read before.
        """
        first, count = self.length, tokens.shape[1]
        if is_grad_enabled():
            raise ValueError("cache: call the model inside `with no_grad()`")
        if first + count > self.room:
            raise ValueError(
                f"cache: room = {self.room} is too small for {first + count} tokens; make the cache with "
                "more room"
            )
        if first and count > 1:
            raise ValueError(f"cache: pass one token at a time after the first call, got {count}")
        self.length += count
        return first, self.layers


def extended(
    tokens: np.ndarray,
    positions: Any,
    cache: "KVCache | None",
    layers: int,
    block_size: int,
    *,
    of_rows: bool = False,
) -> tuple[range | np.ndarray, list]:
    """(the positions of `tokens`, each layer's cache or None).

    positions: integers (time,) of the host below block_size, or None: those that follow what was read.
    of_rows: or (batch, time).

    Raises ValueError for more positions than the model has or what is not (batch, time), TypeError for what
    is no array, and as KVCache.extend.
    """
    check_tokens(tokens)
    if positions is not None:
        if cache is not None:
            raise ValueError("positions: a cache sets them itself; leave positions out")
        return check_positions(positions, tokens.shape, block_size, of_rows=of_rows), [None] * layers
    first, caches = (0, [None] * layers) if cache is None else cache.extend(tokens)
    last = first + tokens.shape[1]
    if last > block_size:
        raise ValueError(f"tokens: at most block_size = {block_size} at a time, got {last}")
    return range(first, last), caches


def layer_of(batch: Mapping[str, Any], number: int) -> "LayerCache | None":
    """The cache of a layer, where a model's arguments by name have one.

    Of a pipeline, the rank with the first stage counts tokens in KVCache, and each layer in its own cache.
    """
    cache = batch.get("cache")
    return None if cache is None else cache.layers[number]


class LayerCache:
    """The cache of one layer: two arrays (batch, kv_heads, room, head_dim), filled up to `length`.

    With a window that is less than room they have as many rows as the window. A new token takes the row of
    the oldest, which it does not see. The order of rows is of no account: one query sees them all.
    """

    def __init__(self, room: int) -> None:
        self.room, self.length = room, 0
        self.row = 0  # that the next token takes
        self.keys: Array = None
        self.values: Array = None

    def attend(self, qkv: Tensor, heads: int, kv_heads: int, window: int | None = None) -> Tensor:
        """As self_attention of `qkv`, whose queries see what was read before as well."""
        q, k, v = split_heads(qkv.data, (heads, kv_heads, kv_heads))
        batch, time = qkv.shape[:2]
        rows = self.room if window is None else min(window, self.room)
        if self.keys is None:
            shape = (batch, kv_heads, rows, q.shape[3])
            self.keys, self.values = (device.current().empty(shape, qkv.dtype) for _ in range(2))
        kept = min(time, rows)
        self.keys[:, :, self.row : self.row + kept] = k[:, :, time - kept :]
        self.values[:, :, self.row : self.row + kept] = v[:, :, time - kept :]
        first, self.length = self.length, self.length + time
        self.row = (self.row + kept) % rows
        if first == 0:
            return F.self_attention(qkv, heads, kv_heads=kv_heads, window=window)
        keys, values = (Tensor(a[:, :, : min(self.length, rows)]) for a in (self.keys, self.values))
        y = F.scaled_dot_product_attention(Tensor(q), keys, values)
        return y.transpose(1, 2).reshape(batch, time, heads * q.shape[3])
