"""Contracts of attention: other numbers of keys, shared heads, documents, chunks of queries, windows."""

import numpy as np

from tests.contracts import Call, Out, Wide, contract
from tests.cuda.numbers import normal

SHAPES = [  # batch, heads, heads of keys, time, keys, width, causal
    (1, 1, 1, 1, 1, 1, True),
    (2, 3, 3, 33, 33, 20, True),
    (1, 2, 2, 5, 70, 32, False),
    (1, 1, 1, 70, 5, 65, False),
    (1, 2, 2, 65, 65, 130, True),
    (1, 2, 1, 131, 131, 33, True),  # more than a tile of the CPU's
    (2, 4, 2, 33, 33, 64, True),
    (1, 3, 1, 34, 41, 128, False),
]


def heads_of(x, parts, heads):
    """(batch, time, parts * width) as views (batch, heads, time, head_dim), as a linear layer makes them."""
    batch, time, width = x.shape
    x = x.reshape(batch, time, parts, heads, width // (parts * heads))
    return [x[:, :, part].transpose(0, 2, 1, 3) for part in range(parts)]


def starts_of(lengths, places):
    """Of two sequences: documents of these lengths, and one document."""
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)[places]
    return np.stack([starts, np.zeros_like(starts)])


def scores_of(q, k, causal, scale, starts=None, offsets=None, window=None):
    """q k^T, -inf where a query sees no key."""
    time, keys = q.shape[2], k.shape[2]
    k = np.repeat(k, q.shape[1] // k.shape[1], 1)
    offsets = (0,) if offsets is None else offsets
    places = np.concatenate([offset + np.arange(time // len(offsets)) for offset in offsets])
    seen = np.ones((len(q), time, keys), bool)
    if causal:
        seen &= np.arange(keys) <= places[:, None]
    if window is not None:
        seen &= np.arange(keys) > places[:, None] - window
    if starts is not None:
        seen &= np.arange(keys) >= starts[:, :, None]
    return np.where(seen[:, None], scale * q @ k.swapaxes(2, 3), -np.inf)


def attention(q, k, v, **how):
    """y, lse."""
    scores = scores_of(q, k, **how)
    highest = scores.max(3, keepdims=True)
    powers = np.exp(scores - highest)
    total = powers.sum(3, keepdims=True)
    return powers / total @ np.repeat(v, q.shape[1] // v.shape[1], 1), (highest + np.log(total))[..., 0]


def gradients(dy, q, k, v, y, lse, **how):
    """dq, dk, dv."""
    shared = q.shape[1] // k.shape[1]
    weights = np.exp(scores_of(q, k, **how) - lse[..., None])
    slopes = dy @ np.repeat(v, shared, 1).swapaxes(2, 3) - (dy * y).sum(3, keepdims=True)
    slopes *= how["scale"] * weights
    dk, dv = slopes.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ dy
    return slopes @ np.repeat(k, shared, 1), *(
        x.reshape(len(k), -1, shared, *k.shape[2:]).sum(2) for x in (dk, dv)
    )


def cases():
    """((batch, heads, heads of keys, time, keys, width), keywords of a kernel, types of elements)."""
    for *shape, causal in SHAPES:
        every = ("float32", "float64", "float16", "bfloat16") if shape[:2] == [2, 3] else ("float32",)
        yield shape, {"causal": causal, "scale": 0.7 / np.sqrt(shape[-1])}, every
    for kv_heads in (1, 2):
        for lengths in ((1, 69), (40, 2, 28), (70,), (33, 32, 5)):
            how = {"causal": True, "scale": 0.3, "starts": starts_of(lengths, slice(None))}
            yield (2, 2, kv_heads, 70, 70, 20), how, ("float32",)
    for offsets in ((0, 78), (26, 52), (39,)):
        places = np.concatenate([offset + np.arange(26) for offset in offsets])
        how = {"causal": True, "scale": 0.3, "offsets": offsets}
        for more in ({}, {"starts": starts_of((10, 30, 61, 3), places)}):
            yield (2, 2, 1, len(places), 104, 20), how | more, ("float32",)
            yield (2, 2, 1, len(places), 104, 20), how | more | {"window": 9}, ("float32",)
    how = {"causal": True, "scale": 0.3}
    yield (1, 2, 2, 40, 40, 20), how | {"window": 3}, ("float32", "float64", "float16", "bfloat16")
    for window in (1, 31, 33, 1000):
        yield (2, 2, 1, 70, 70, 20), how | {"window": window}, ("float32",)
    documents = starts_of((40, 2, 28), slice(None))
    yield (2, 2, 1, 70, 70, 32), how | {"window": 12, "starts": documents}, ("float32",)


def packed(values):
    """(batch, heads, time, head_dim) as it lies in the array of a linear layer."""
    return np.ascontiguousarray(values.swapaxes(1, 2)).swapaxes(1, 2)


def operands(batch, heads, kv_heads, time, keys, width):
    """q, k and v, of which the last two are in one array."""
    (q,) = heads_of(normal(batch, time, heads * width), 1, heads)
    return q, *heads_of(normal(batch, keys, 2 * kv_heads * width), 2, kv_heads)


def forward(shape, how, **more):
    q, k, v = operands(*shape)
    args = q, k, v, Out(packed(np.full_like(q, np.nan))), Out(wide=True)
    return Call(args, lambda q, k, v, y: attention(q, k, v, **how), how, factor=2, **more)


def backward(shape, how, **more):
    q, k, v = operands(*shape)
    y, lse = attention(q, k, v, **how)
    dy, *outs = (packed(normal(*x.shape, seed=1)) for x in (q, q, k, v))
    args = dy, q, k, v, packed(y), Wide(lse), *map(Out, outs)
    return Call(args, lambda *arrays: gradients(*arrays[:6], **how), how, factor=4, **more)


@contract("attention.forward")
def forwards():
    for shape, how, elements in cases():
        yield forward(shape, how, elements=elements, offsets=(0,))


@contract("attention.backward")
def backwards():
    for shape, how, elements in cases():
        if min(shape[4], how.get("window", 2)) > 1:  # of one key, the slopes of scores are 0 but for rounding
            yield backward(shape, how, elements=elements, offsets=(0,))
