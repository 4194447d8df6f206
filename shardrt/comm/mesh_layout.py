"""MeshLayout: sizes and strides of ranks in a mesh. Along which axes do two ranks differ?

In a mesh of shape (2, 4, 2), a step along the last axis adds 1 to the rank, along the second 2, along the
first 8. A layout is a tuple of pairs (stride, end = stride * size), here (8, 16), (2, 8), (1, 2). A rank's
index along a pair is `rank % end // stride`. Adjacent axes merge: (2, 8) and (1, 2) are (1, 8). A fold of the
mesh has a layout, too, for example (4, 16), (1, 4), so axes of a fold compare with axes of the mesh.
PyTorch's `_MeshLayout` has the same content.
"""

from math import prod
from typing import Any

__all__ = ["MeshLayout", "index_in", "overlap", "size_of", "union", "without"]

# The largest stride first. Pairs neither overlap nor touch.
MeshLayout = tuple[tuple[int, int], ...]


def union(*layouts: MeshLayout) -> MeshLayout:
    """The layout of all axes of these layouts: (8, 16) and (2, 8) give (2, 16)."""
    merged: list[tuple[int, int]] = []
    for stride, end in sorted(pair for layout in layouts for pair in layout):
        if merged and stride <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((stride, end))
    return tuple(reversed(merged))


def overlap(first: MeshLayout, second: MeshLayout) -> bool:
    """Whether two ranks can differ along both layouts at once."""
    return any(max(a[0], b[0]) < min(a[1], b[1]) for a in first for b in second)


def without(layout: MeshLayout, others: MeshLayout) -> MeshLayout:
    """The layout without the axes of `others`. Raises ValueError if `others` cuts across an axis."""
    for stride, end in others:
        pieces = [
            piece
            for low, high in layout
            for piece in ((low, min(high, stride)), (max(low, end), high))
            if piece[0] < piece[1]
        ]
        if any(high % low for low, high in pieces):
            raise ValueError(f"mesh axes {others} do not divide {layout} (stride, end) evenly")
        layout = tuple(pieces)
    return union(layout)


def index_in(layout: MeshLayout, rank: Any) -> Any:
    """Index along this layout of a rank, or of each rank of an array: 5 has index 2 along (2, 8)."""
    index = rank * 0
    for stride, end in layout:
        index = index * (end // stride) + rank % end // stride
    return index


def size_of(layout: MeshLayout) -> int:
    """Number of ranks along this layout: 4 for (2, 8)."""
    return prod(end // stride for stride, end in layout)
