"""Collectives of objects: ranks exchange values as JSON, compare them, and report failures.

All functions use Communicator.all_gather_bytes.
"""

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from shardrt.comm.protocol import Communicator


def all_gather_object(control: Communicator, value: Any) -> list[Any]:
    """The `value` of each rank, in order, after a round trip through JSON. Collective."""
    return [json.loads(data) for data in control.all_gather_bytes(json.dumps(value).encode())]


def differing_ranks(control: Communicator, value: Any) -> list[int]:
    """The ranks whose `value` has another repr than rank 0's; [] if all agree. Collective."""
    message = control.all_gather_bytes(blake2b(repr(value).encode(), digest_size=16).digest())
    return [rank for rank, digest in enumerate(message) if digest != message[0]]


def broadcast_object(control: Communicator, value: Any) -> Any:
    """The `value` of rank 0, on every rank. Collective."""
    return all_gather_object(control, value if control.rank == 0 else None)[0]


def failures(control: Communicator, error: BaseException | None) -> list[str]:
    """A text "rank 1: ..." for each rank that has an error. Collective."""
    message = all_gather_object(control, None if error is None else f"{type(error).__name__}: {error}")
    return [f"rank {rank}: {text}" for rank, text in enumerate(message) if text is not None]


def differences(everyone: list[Any], name: str = "") -> list[str]:
    """ "a.b: 1 on rank 0, 2 on rank 3" for every leaf that differs between the ranks' nested dicts."""
    message = []
    for leaf, values in differing(everyone, name):
        other = next(rank for rank, value in enumerate(values) if value != values[0])
        message.append(f"{leaf}: {values[0]} on rank 0, {values[other]} on rank {other}")
    return message


def differing(nests: list[Any], name: str = "") -> Iterator[tuple[str, list[Any]]]:
    """("a.b", its value in each dict) for every leaf that differs between nested dicts; None if missing."""
    if all(value == nests[0] for value in nests):
        return
    if not all(isinstance(value, dict) for value in nests):
        yield name, nests
        return
    for key in sorted({key for value in nests for key in value}):
        yield from differing([value.get(key) for value in nests], f"{name}.{key}".lstrip("."))
