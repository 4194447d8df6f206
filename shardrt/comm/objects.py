"""Collectives of objects: ranks exchange values as JSON, compare them, and report failures."""

import json
from functools import cache
from hashlib import blake2b
from typing import Any

from shardrt.comm.protocol import Communicator

__all__ = ["all_gather_object", "broadcast_object", "differing_ranks", "failures"]


def all_gather_object(control: Communicator, value: Any) -> list[Any]:
    """The `value` of each rank, in order, after a round trip through JSON; equal ones are one. Collective."""
    return list(map(cache(json.loads), control.all_gather_bytes(json.dumps(value).encode())))


def differing_ranks(control: Communicator, value: Any) -> list[int]:
    """The ranks whose `value` has another repr than rank 0's; [] if all agree. Collective."""
    digests = control.all_gather_bytes(blake2b(repr(value).encode(), digest_size=16).digest())
    return [rank for rank, digest in enumerate(digests) if digest != digests[0]]


def broadcast_object(control: Communicator, value: Any) -> Any:
    """The `value` of rank 0, on every rank. Collective."""
    return all_gather_object(control, value if control.rank == 0 else None)[0]


def failures(control: Communicator, error: BaseException | None) -> list[str]:
    """A text "rank 1: ..." for each rank that has an error. Collective."""
    texts = all_gather_object(control, None if error is None else f"{type(error).__name__}: {error}")
    return [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
