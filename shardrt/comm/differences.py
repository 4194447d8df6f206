"""Where nests of dicts, one of each rank, differ."""

from collections.abc import Iterator
from typing import Any

__all__ = ["differences", "differing"]


def differences(everyone: list[Any], name: str = "") -> list[str]:
    """Lines such as "a.b: 1 on rank 0, 2 on rank 3", one for every leaf that differs between the ranks."""
    lines = []
    for leaf, values in differing(everyone, name):
        other = next(rank for rank, value in enumerate(values) if value != values[0])
        lines.append(f"{leaf}: {values[0]} on rank 0, {values[other]} on rank {other}")
    return lines


def differing(nests: list[Any], name: str = "") -> Iterator[tuple[str, list[Any]]]:
    """("a.b", its value in each dict) for every leaf that differs between nested dicts; None if missing."""
    if all(value == nests[0] for value in nests):
        return
    if not all(isinstance(value, dict) for value in nests):
        yield name, nests
        return
    for key in sorted({key for value in nests for key in value}):
        yield from differing([value.get(key) for value in nests], f"{name}.{key}".lstrip("."))
