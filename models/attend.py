"""How the language models here attend: to what a cache has, to parts on other ranks, or to themselves."""

from typing import Any

from shardrt import Tensor
from shardrt import functional as F

from .cache import LayerCache

Array = Any


def attend(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    *,
    context: Any = None,
    cache: LayerCache | None = None,
    starts: Array = None,
    positions: Array = None,
    window: int | None = None,
) -> Tensor:
    """Causal self-attention of `qkv` (batch, time, (heads + 2 * kv_heads) * head_dim); (batch, time, width).

    context: that of the module, where a sequence may lie on several ranks (parallel/context.py). cache: of
    the tokens before these. starts, positions: those of the model. window: of F.self_attention.
    """
    if cache is not None:
        return cache.attend(qkv, heads, kv_heads, window)
    if context is not None and context.in_parts(positions):
        return context.attend(qkv, heads, kv_heads, starts, window)
    return F.self_attention(qkv, heads, kv_heads=kv_heads, starts=starts, window=window)
