"""Checks the arguments of a model's forward before any computation."""

from typing import Any

import numpy as np


def check_tokens(tokens: Any) -> None:
    """Raise TypeError unless `tokens` is an array or tensor, ValueError unless it is (batch, time)."""
    _check_array("tokens", tokens)
    if tokens.ndim != 2:
        more = "; one sequence is tokens[None]" if tokens.ndim == 1 else ""
        raise ValueError(f"tokens: must be (batch, time), got {tokens.shape}{more}")


def check_positions(
    positions: Any, shape: tuple[int, int], block_size: int, *, of_rows: bool = False
) -> np.ndarray:
    """As a host array. Raises TypeError for other than integers, ValueError unless (time,) that fit.

    Args:
        shape: of the tokens, (batch, time).
        of_rows: positions may have this shape, too.
    """
    array = np.asarray(positions)
    if array.dtype.kind not in "iu":
        raise TypeError(f"positions: must be integers, got {array.dtype}")
    if array.shape != shape[1:] and not (of_rows and array.shape == shape):
        raise ValueError(f"positions: must be ({shape[1]},), one for each token of a row, got {array.shape}")
    if array.size and not 0 <= array.min() <= array.max() < block_size:
        raise ValueError(
            f"positions: must be 0 to {block_size - 1}, below block_size; got {array.min()} to {array.max()}"
        )
    return array


def check_images(images: Any, channels: int, size: int | None = None) -> None:
    """Raise TypeError unless `images` is an array or tensor, ValueError for another shape."""
    _check_array("images", images)
    expected = (channels, *images.shape[2:]) if size is None else (channels, size, size)
    if images.ndim != 4 or images.shape[1:] != expected:
        shape = ("height", "width") if size is None else (size, size)
        raise ValueError(f"images: must be (batch, {channels}, {shape[0]}, {shape[1]}), got {images.shape}")


def _check_array(name: str, values: Any) -> None:
    if not hasattr(values, "shape") or not hasattr(values, "ndim"):
        raise TypeError(f"{name}: must be an array or a tensor, got {type(values).__name__}")
