"""Layers of a transformer: parameters and one call of functional each. Defaults are PyTorch's.

`init` is the initial value of a weight (nn.init), `dtype` is float32 unless given.
"""

from collections.abc import Callable
from math import sqrt
from typing import Any

import numpy as np

from shardrt import functional as F
from shardrt.nn import init as initial
from shardrt.nn.init import Initialiser
from shardrt.nn.public import Module, Parameter
from shardrt.tensor import Tensor

__all__ = ["Dropout", "Embedding", "LayerNorm", "Linear", "RMSNorm"]


class Linear(Module):
    """(..., in_features) -> (..., out_features): x times weight transposed, plus bias.

    Args:
        init: the initial weight, the bias then at 0. Left out, both start evenly from +-1 /
            sqrt(in_features), as in PyTorch.
        gelu: GELU of it, in the tanh form (F.linear_gelu).

    Example:
        >>> import numpy as np
        >>> from shardrt import nn
        >>> layer = nn.Linear(8, 2)
        >>> layer(np.ones((3, 8), np.float32)).shape
        (3, 2)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init: Initialiser | None = None,
        gelu: bool = False,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__()
        check_sizes("Linear", in_features=in_features, out_features=out_features)
        bound = 1 / sqrt(in_features)
        even = initial.Uniform(-bound, bound)
        self.gelu = gelu
        self.adapter: Callable[[Linear, Tensor], Tensor] | None = None  # computes in its place; see add_lora
        self.weight = Parameter((out_features, in_features), init or even, dtype=dtype)
        self.bias = (
            Parameter((out_features,), initial.Zeros() if init else even, dtype=dtype) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.adapter is not None:
            return self.adapter(self, x)
        product = F.linear_gelu if self.gelu else F.linear
        return product(x, self.weight, self.bias)


class Embedding(Module):
    """Integers (...) -> (..., embedding_dim): rows of a table of num_embeddings, which starts as N(0, 1).

    Example:
        >>> from shardrt import nn
        >>> nn.Embedding(100, 8)([[5, 6, 7]]).shape
        (1, 3, 8)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init: Initialiser | None = None,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__()
        check_sizes("Embedding", num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        self.weight = Parameter(
            (num_embeddings, embedding_dim), init or initial.Normal(0.0, 1.0), dtype=dtype
        )

    def forward(self, indices: Any) -> Tensor:
        words = self.weight.words  # of a vocabulary that is split over ranks
        return F.embedding(indices, self.weight) if words is None else words.embedding(indices, self.weight)


class LayerNorm(Module):
    """Layer norm over the last dimension, `width` long. weight starts at 1, bias at 0.

    norm(x) -> y; norm(x, added) -> (x + added, the norm of that), which takes fewer passes over memory.

    Example:
        >>> import numpy as np
        >>> from shardrt import nn
        >>> nn.LayerNorm(8)(np.ones((3, 8), np.float32)).shape
        (3, 8)
    """

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True, *, dtype: Any = np.float32) -> None:
        super().__init__()
        check_sizes("LayerNorm", width=width)
        self.eps = eps
        self.weight = Parameter((width,), initial.Ones(), dtype=dtype)
        self.bias = Parameter((width,), initial.Zeros(), dtype=dtype) if bias else None

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if added is not None:
            return F.add_layer_norm(x, added, self.weight, self.bias, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(Module):
    """RMS norm over the last dimension, `width` long. weight starts at 1.

    norm(x) -> y; norm(x, added) -> (x + added, the norm of that), which takes fewer passes over memory.
    """

    def __init__(self, width: int, eps: float = 1e-6, *, dtype: Any = np.float32) -> None:
        super().__init__()
        check_sizes("RMSNorm", width=width)
        self.eps = eps
        self.weight = Parameter((width,), initial.Ones(), dtype=dtype)

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if added is not None:
            return F.add_rms_norm(x, added, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Dropout(Module):
    """In training, each element 0 with probability p; in evaluation nothing.

    Example:
        >>> import numpy as np
        >>> from shardrt import nn
        >>> layer = nn.Dropout(0.1)
        >>> layer(np.ones((3, 8), np.float32)).shape
        (3, 8)
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"Dropout: p must be in [0, 1), got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training)


def check_sizes(layer: str, **sizes: int) -> None:
    """Raise TypeError, with the argument's name, for a size that is no integer, ValueError below 1."""
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer):
            raise TypeError(f"{layer}: {name} must be an integer, got {size!r}")
        if size < 1:
            raise ValueError(f"{layer}: {name} must be at least 1, got {size}")
