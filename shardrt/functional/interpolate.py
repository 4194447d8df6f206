"""Images at another size: along each axis one small matrix, so that the backward is its transpose."""

from functools import cache

import numpy as np

from shardrt.functional._arrays import asarray, check_floats, tensor
from shardrt.functional._types import Tensor
from shardrt.functional.matmul import matmul
from shardrt.functional.shape import getitem
from shardrt.functional.words import only


def interpolate(
    x: "Tensor",
    size: int | tuple[int, int] | None = None,
    scale_factor: float | tuple[float, float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> "Tensor":
    """(batch, channels, height, width) at another size, as in PyTorch, without antialiasing.

    It costs matmuls with a matrix (new, old) for each axis.

    Args:
        size, scale_factor: one of them; a number for both axes, or (vertical, horizontal).
        mode: "nearest", "bilinear" or "bicubic".
        recompute_scale_factor: the factor comes from the integer sizes.

    Raises:
        ValueError: for bad arguments.
        TypeError: for other than floats.
    """
    x = tensor(x)
    check_floats("interpolate", x=x)
    only("interpolate", "blur x before, by F.conv2d", antialias=(antialias, False))
    if x.ndim != 4 or min(x.shape) < 1:
        raise ValueError(f"interpolate: x must be (batch, channels, height, width), got {x.shape}")
    if (size is None) == (scale_factor is None):
        raise ValueError("interpolate: pass either size or scale_factor")
    if mode not in ("nearest", "bilinear", "bicubic"):
        raise ValueError(f"interpolate: mode must be 'nearest', 'bilinear' or 'bicubic', got {mode!r}")
    given = size if scale_factor is None else scale_factor
    given = (given, given) if isinstance(given, int | float) else tuple(given)
    axes = []  # (old size, new size, the step in x for one in the result)
    for old, wanted in zip(x.shape[2:], given, strict=True):
        new = int(wanted if scale_factor is None else old * wanted)
        if new < 1:
            raise ValueError(f"interpolate: the output size must be at least 1, got {new}")
        axes.append((old, new, old / new if scale_factor is None or recompute_scale_factor else 1 / wanted))
    if mode == "nearest":
        rows, columns = (
            asarray(np.minimum((np.arange(new) * step).astype(np.int64), old - 1)) for old, new, step in axes
        )
        return getitem(getitem(x, (..., rows, slice(None))), (..., columns))
    down, across = (asarray(_matrix(mode, *axis, bool(align_corners)), x.dtype) for axis in axes)
    return matmul(matmul(tensor(down), x), tensor(across.T))


@cache
def _matrix(mode: str, old: int, new: int, step: float, align_corners: bool) -> np.ndarray:
    """(new, old): the weights of the old elements in each new element."""
    if align_corners:
        centres = np.arange(new) * ((old - 1) / (new - 1) if new > 1 else 0.0)
    else:
        centres = (np.arange(new) + 0.5) * step - 0.5
        if mode == "bilinear":
            centres = np.maximum(centres, 0)
    first = np.floor(centres)
    matrix = np.zeros((new, old))
    offsets = (0, 1) if mode == "bilinear" else (-1, 0, 1, 2)
    for offset in offsets:
        distance = np.abs(centres - first - offset)
        share = 1 - distance if mode == "bilinear" else _cubic(distance)
        column = np.clip(first + offset, 0, old - 1).astype(np.int64)
        np.add.at(matrix, (np.arange(new), column), share)
    return matrix


def _cubic(distance: np.ndarray, a: float = -0.75) -> np.ndarray:
    """Keys' kernel (Cubic convolution interpolation, 1981), with the constant that PyTorch takes."""
    d = distance
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))
