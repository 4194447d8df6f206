"""What rounding to 16 bits costs."""

from shardrt.kernels.shape._cost import Array, Cost, flat


def round_to(x: Array, out: Array, kind: str) -> Cost:
    check_kind(kind)
    return flat((x,), (out,), 1)


def pack(x: Array, out: Array, kind: str) -> Cost:
    check_kind(kind)
    return flat((x,), (out,), 1)


def unpack(x: Array, out: Array, kind: str) -> Cost:
    check_kind(kind)
    return flat((x,), (out,), 1)


def check_kind(kind: str) -> None:
    """Raise ValueError for a type that is not one of the two."""
    if kind not in ("bfloat16", "float16"):
        raise ValueError(f"kind must be 'bfloat16' or 'float16', got {kind!r}")
