"""Causal self-attention of sequences that lie on several ranks, each with two chunks of every one.

Of 2 n chunks, rank r of n has r and 2n - 1 - r, one after the other: so all ranks have as many pairs of a
query and a key. A rank has queries of its own; keys and values it gathers, of one of their heads after the
other, the next under way in a stream of its own while this one computes. Backward gathers them again, and
their gradients go back likewise, as sums (as llama3_flash_attn_varlen of ring-flash-attention does). There is
no ring, so a query meets all its keys at once, as on one rank.

Kind of the values along the axis, as in collective.py: qkv V -> V.
"""

import numpy as np

from shardrt import device, dtypes
from shardrt.autograd import Function
from shardrt.comm.mesh import DeviceMesh
from shardrt.device import Event
from shardrt.functional._arrays import asarray, empty, empty_exact, empty_like, flat, kernels, tensor
from shardrt.functional._types import Array, Tensor
from shardrt.functional.attention import check_packed, check_window, split_heads
from shardrt.functional.collective import bits, named

__all__ = ["context_attention", "own_chunks", "positions_of"]

ROLE = "context"  # of the communicator, and of the stream in which it works


def own_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """The numbers of the chunks, of 2 * ranks, that a rank has."""
    return rank, 2 * ranks - 1 - rank


def positions_of(time: int, rank: int, ranks: int) -> np.ndarray:
    """The places in a sequence of `time` of what a rank has of it, int64. ValueError if it can't be cut."""
    if time % (2 * ranks):
        raise ValueError(
            f"context parallelism: {time} positions can't be split into 2 equal chunks for each of {ranks} "
            f"ranks; take a multiple of {2 * ranks}"
        )
    each = time // (2 * ranks)
    return np.concatenate([np.arange(each) + number * each for number in own_chunks(rank, ranks)])


class ContextAttention(Function):
    expensive = True

    def forward(self, qkv: Array, heads: tuple, mesh: DeviceMesh, how: dict) -> Array:
        """how: what the kernels take by keyword."""
        batch, time, width = qkv.shape
        y = empty((batch, time, width // sum(heads) * heads[0]), qkv.dtype)
        group = heads[0] // heads[1]
        lse = empty_exact((heads[1], batch, group, time), qkv)
        (y_heads,) = split_heads(y, heads[:1])
        q, k, v = split_heads(qkv, heads)
        lane = _Lane(mesh, k, v, named("context"))
        for head in range(heads[1]):
            keys, values = lane.whole(head)
            own = slice(head * group, (head + 1) * group)
            kernels().attention.forward(q[:, own], keys, values, y_heads[:, own], lse[head], **how)
            del keys, values  # before the next
        self.saved = (qkv, y, lse, heads, mesh, how)
        return y

    def keep(self, y: Array) -> tuple:
        return y, self.saved[2]  # and lse

    def resume(self, kept: tuple, qkv: Array, heads: tuple, mesh: DeviceMesh, how: dict) -> Array:
        y, lse = kept
        self.saved = (qkv, y, lse, heads, mesh, how)
        return y

    def backward(self, dy: Array) -> tuple:
        qkv, y, lse, heads, mesh, how = self.saved
        dqkv = empty_like(qkv)
        (dy_heads,), (y_heads,) = split_heads(dy, heads[:1]), split_heads(y, heads[:1])
        q, k, v = split_heads(qkv, heads)
        dq, dk, dv = split_heads(dqkv, heads)
        group = heads[0] // heads[1]
        lane, before = _Lane(mesh, k, v, named("context", self.module)), None
        for head in range(heads[1]):
            keys, values = lane.whole(head)
            own, sums = slice(head * group, (head + 1) * group), empty((2, *keys.shape), keys.dtype)
            given = dy_heads[:, own], q[:, own], keys, values, y_heads[:, own], lse[head]
            kernels().attention.backward(*given, dq[:, own], *sums, **how)
            del keys, values, given
            if before is not None:
                lane.take(before, dk[:, head - 1], dv[:, head - 1])
            before = lane.scatter(sums)
            del sums
        lane.take(before, dk[:, -1], dv[:, -1])
        return dqkv, None, None, None


def context_attention(
    qkv: "Tensor",
    heads: int,
    mesh: DeviceMesh,
    scale: float | None = None,
    kv_heads: int | None = None,
    starts: Array | None = None,
    window: int | None = None,
) -> "Tensor":
    """As self_attention, is_causal, of sequences of which this rank has the chunks that `positions_of` gives.

    Collective, with equal shapes on all ranks.

    Args:
        qkv: (batch, time, (heads + 2 * kv_heads) * head_dim) of this rank's positions.
        mesh: the ranks, on one axis.
        starts: int64 (batch, time) on the device, where the document of each of these positions begins in the
            whole sequence.
        window: that of self_attention, counted in the whole sequence.

    Returns:
        (batch, time, heads * head_dim).

    Raises:
        ValueError: if sizes or `window` don't fit or `time` is odd.
        TypeError: for other dtypes.
    """
    qkv, kv_heads = tensor(qkv), heads if kv_heads is None else kv_heads
    scale = check_packed("context_attention", qkv, heads, kv_heads, scale)
    if qkv.shape[1] % 2:
        raise ValueError(
            f"context_attention: qkv must have an even number of positions, two chunks, got {qkv.shape[1]}"
        )
    starts = None if starts is None else asarray(starts)
    if starts is not None and starts.shape != qkv.shape[:2]:
        raise ValueError(f"context_attention: starts must be {qkv.shape[:2]}, got {starts.shape}")
    how = {"causal": True, "scale": scale, "starts": starts, "offsets": _offsets(mesh, qkv.shape[1])}
    how["window"] = check_window("context_attention", window, qkv.shape[1] * mesh.size)
    return ContextAttention.apply(qkv, (heads, kv_heads, kv_heads), mesh, how)


def _offsets(mesh: DeviceMesh, time: int) -> tuple[int, int]:
    """Where this rank's two chunks begin."""
    first, second = own_chunks(mesh.rank, mesh.size)
    return first * (time // 2), second * (time // 2)


class _Lane:
    """One call's collectives, in the stream for them.

    Arrays belong to the stream of the ops, which waits for each collective before they are given back.
    """

    def __init__(self, mesh: DeviceMesh, k: Array, v: Array, tag: str) -> None:
        """k, v: (batch, heads, own time, head_dim)."""
        self._mesh, self._k, self._v, self._tag, self._here = mesh, k, v, tag, device.current()
        self._communicator, self._stream = mesh.communicator(ROLE), mesh.stream(ROLE)
        self._following = self._gather(0)

    def whole(self, head: int) -> Array:
        """Keys and values of a head, the next at each call, by time: (2, batch, 1, time, head_dim).

        From then on those of the one behind it are gathered.
        """
        (parts, done), self._following = self._following, None
        self._here.current_stream.wait(done)
        found = self._in_order(parts)
        del parts
        self._following = self._gather(head + 1) if head + 1 < self._k.shape[1] else None
        return found

    def scatter(self, sums: Array) -> tuple[Array, Array, Event]:
        """Begin to add up what ranks have for the whole sequence; see `take`."""
        _, batch, _, time, width = sums.shape
        ranks = self._mesh.size
        parts = empty((ranks, 2, batch, 2, time // (2 * ranks), width), dtypes.exact(sums.dtype))
        own = empty(parts.shape[1:], parts.dtype)
        cut = sums.reshape(2, batch, 2 * ranks, *parts.shape[4:])
        parts[:, :, :, 0] = cut[:, :, :ranks].transpose(2, 0, 1, 3, 4)
        parts[:, :, :, 1] = cut[:, :, : ranks - 1 : -1].transpose(2, 0, 1, 3, 4)
        done = self._submit("reduce_scatter", flat(own), flat(parts))
        return own, parts, done

    def take(self, scattered: tuple[Array, Array, Event], dk: Array, dv: Array) -> None:
        """What comes of a `scatter` goes to (batch, own time, head_dim) each."""
        own, _, done = scattered
        self._here.current_stream.wait(done)
        dk[...], dv[...] = own.reshape(2, *dk.shape)

    def _gather(self, head: int) -> tuple[Array, Event]:
        """Begin to gather those of a head."""
        k, v = self._k[:, head], self._v[:, head]
        parts = empty((self._mesh.size, 2, *k.shape), k.dtype)
        parts[self._mesh.rank, 0], parts[self._mesh.rank, 1] = k, v
        return parts, self._submit("all_gather", bits(parts))

    def _in_order(self, parts: Array) -> Array:
        """(2, batch, 1, time, head_dim) of the ranks' parts."""
        ranks, _, batch, own, width = parts.shape
        whole = empty((2, batch, 2 * ranks, own // 2, width), parts.dtype)
        parts = parts.reshape(ranks, 2, batch, 2, own // 2, width)
        whole[:, :, :ranks] = parts[:, :, :, 0].transpose(1, 2, 0, 3, 4)
        whole[:, :, : ranks - 1 : -1] = parts[:, :, :, 1].transpose(1, 2, 0, 3, 4)
        return whole.reshape(2, batch, 1, ranks * own, width)

    def _submit(self, call: str, *arrays: Array) -> Event:
        """Run a collective when what comes before in the stream of the ops is done; gives its end."""
        ready, done = self._here.new_event(), self._here.new_event()
        self._here.current_stream.record(ready)
        self._stream.wait(ready)
        getattr(self._communicator, call)(*arrays, stream=self._stream, tag=self._tag)
        self._stream.record(done)
        return done
