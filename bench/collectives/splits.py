"""Groups of ranks that run the same collective at once: NCCL_TESTS_SPLIT and its mask, as in nccl-tests."""

import os
import re
from collections import Counter

_SPLIT = re.compile(r"(AND|OR|MOD|DIV|[&|%/])\s*(0x[0-9a-f]+|0b[01]+|\d+)", re.IGNORECASE)
_CALLS = {
    "AND": lambda rank, value: rank & value,
    "OR": lambda rank, value: rank | value,
    "MOD": lambda rank, value: rank % value,
    "DIV": lambda rank, value: rank // value,
}
_MOST = (1 << 31) - 1  # MPI's, an int
_SHORT = {"&": "AND", "|": "OR", "%": "MOD", "/": "DIV"}


def colors(ranks: int) -> list[int]:
    """The group of each rank, by a number; 0 for all where the environment says nothing.

    Raises ValueError for what it says wrongly, and for groups of different sizes, whose bandwidths no one
    line can say.
    """
    mask, split = os.environ.get("NCCL_TESTS_SPLIT_MASK"), os.environ.get("NCCL_TESTS_SPLIT")
    if mask is not None:
        found = [rank & _hexadecimal(mask) for rank in range(ranks)]
    elif split is not None:
        found = _split(split, ranks)
    else:
        return [0] * ranks
    if max(found) > _MOST:
        raise ValueError(f"NCCL_TESTS_SPLIT: numbers of groups must be at most {_MOST}, got {max(found)}")
    sizes = Counter(found)
    if len(set(sizes.values())) > 1:
        groups = ", ".join(f"{size} in group {color}" for color, size in sorted(sizes.items()))
        raise ValueError(f"NCCL_TESTS_SPLIT: groups must be of one size, and of {ranks} ranks are {groups}")
    return found


def _hexadecimal(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        raise ValueError(f"NCCL_TESTS_SPLIT_MASK: must be hexadecimal, got {text!r}") from None


def _split(text: str, ranks: int) -> list[int]:
    match = _SPLIT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"NCCL_TESTS_SPLIT: must be AND, OR, MOD or DIV and a number, got {text!r}")
    name, value = match[1].upper(), int(match[2], 0 if match[2][1:2].lower() in ("x", "b") else 10)
    name = _SHORT.get(name, name)
    if name in ("MOD", "DIV") and not value:
        raise ValueError(f"NCCL_TESTS_SPLIT: {text!r} divides by 0")
    return [_CALLS[name](rank, value) for rank in range(ranks)]
