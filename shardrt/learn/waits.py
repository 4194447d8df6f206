"""Exercise: remove waits, and name the race that each of them prevents."""

from functools import cache
from types import ModuleType
from typing import Any

from shardrt.learn.checking import need, started
from shardrt.simulate.proof import prove
from shardrt.simulate.script import record_of

TITLE = "Remove a wait"
LEVEL = "medium"
TEACHES = "which two accesses a wait keeps apart"
TAKEAWAY = (
    "Each wait belongs to a pair of accesses: a write before a read (the data are there), or a read before a "
    "write (the buffer is free). A wait without such a pair costs time and protects nothing."
)

_ACCESSES = [f"{stream} {does}" for stream in ("compute", "gather") for does in ("reads", "writes")]


@cache
def prepare() -> dict[str, set[tuple[str, str]]]:
    """By wait, the accesses of the races without it."""
    train = started("waits")["train"]
    return {wait: _races(train, wait) for wait in "ABCD"}


def _races(train, remove: str) -> set[tuple[str, str]]:
    races = prove(record_of(lambda: train(remove), ranks=2)).races
    return {tuple(f"{each.stream} {each.does}" for each in (race.first, race.second)) for race in races}


def check(answer: ModuleType) -> str:
    """Compare what was found with the proof."""
    found = getattr(answer, "FOUND", None)
    keys = isinstance(found, dict) and set(found) == set("ABCD")
    need(keys, 'FOUND must be a dict with the keys "A", "B", "C" and "D".')
    for wait, races in prepare().items():
        _check(wait, found[wait], races)
    return "your four answers equal the proofs of the race checker, each with one wait removed."


def _check(wait: str, said: Any, races: set[tuple[str, str]]) -> None:
    need(said != "?", f'FOUND["{wait}"] is open. Set REMOVE = "{wait}" and run shardrt races on the file.')
    need(
        said is not None or not races,
        f'Without wait {wait} there is a race. Set REMOVE = "{wait}" to see it.',
    )
    if said is None:
        return
    pair = isinstance(said, tuple | list) and len(said) == 2 and all(each in _ACCESSES for each in said)
    need(pair, f'FOUND["{wait}"] must be None, or two of these accesses: {", ".join(_ACCESSES)}.')
    first, second = said
    need(
        races,
        f"Without wait {wait} there is no race: wait B already orders the same work. Its answer is None.",
    )
    need((second, first) not in races, f"Wait {wait}: right, but in the other order. Which is issued first?")
    reads = first.endswith("reads") and second.endswith("reads")
    need(not reads, f"Wait {wait}: two reads never race. One of the two accesses writes.")
    need(
        first.split()[0] != second.split()[0],
        f"Wait {wait}: one stream is always in order. A race has two streams.",
    )
    need(
        (first, second) in races,
        f"Wait {wait}: the report names another pair. Its lines `first` and `second` have stream and verb.",
    )
