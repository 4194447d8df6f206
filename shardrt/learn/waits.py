"""Exercise: remove waits, and name the race that each of them prevents."""

from functools import cache
from types import ModuleType
from typing import Any

from shardrt.learn.checking import Hint, constant
from shardrt.simulate.proof import prove
from shardrt.simulate.script import record_of

TITLE = "Remove a wait"
LEVEL = "medium"
TEACHES = "which two accesses a wait keeps apart"
TAKEAWAY = (
    "Each wait belongs to a pair of accesses: a write before a read (data are there), a read before a write (the "
    "buffer is free). A wait without such a pair costs time and protects nothing."
)

START = '''"""Exercise 8: remove a wait, and let the race checker find it.

train() gathers the layers of a model through two slots, as FSDP's prefetch does. The stream "gather" fills a
slot while the stream "compute" reads the other one. Streams run at the same time; only waits order them. The
program has no race, but one of its four waits, A to D, is not needed.

Remove one at a time: set REMOVE = "A", then run the race checker on this file.

    shardrt races --ranks 2 -- exercise_08.py

It records the program without running it, and proves for any speed of the streams whether two accesses to the
same memory can meet. Write into FOUND, for each wait, the two accesses of the race in the order in which the
program issues them: a stream ("compute" or "gather") and what it does there ("reads" or "writes").

    "A": ("gather reads", "compute writes")      the form of an answer
    "A": None                                    without this wait there is still no race

Read more: docs/explanation/races.md.
"""

import numpy as np

from shardrt.comm import init_device_mesh

REMOVE = ""
FOUND = {"A": "?", "B": "?", "C": "?", "D": "?"}
LAYERS, SIZE = 6, 1 << 20


def train(remove):
    mesh = init_device_mesh("auto")
    device, group = mesh.device, mesh.communicator("gather")
    compute, gather = device.current_stream, device.new_stream("gather")
    shards = [device.zeros(SIZE // mesh.size, np.float32) for _ in range(LAYERS)]
    slots = [device.zeros(SIZE, np.float32) for _ in range(2)]
    x = device.zeros(SIZE, np.float32)
    ready, free = ([device.new_event() for _ in slots] for _ in range(2))
    updated = device.new_event()
    compute.record(updated)
    gather.wait(updated)  # the zeros are there
    for _ in range(2):
        for layer in range(LAYERS):
            n = layer % 2
            own = slots[n][: SIZE // mesh.size]
            if "A" not in remove:
                gather.wait(free[n])
            gather.submit(device.copy, own, shards[layer])
            group.all_gather(slots[n], stream=gather, tag=f"layer {layer}")
            gather.record(ready[n])
            if "B" not in remove:
                compute.wait(ready[n])
            x += slots[n]  # stands for the forward of the layer
            compute.record(free[n])
        if "C" not in remove:
            compute.wait(ready[1])
        for shard in shards:
            shard -= 0.1  # stands for the optimizer
        compute.record(updated)
        if "D" not in remove:
            gather.wait(updated)


if __name__ == "__main__":
    train(REMOVE)
'''

_ACCESSES = [f"{stream} {does}" for stream in ("compute", "gather") for does in ("reads", "writes")]


@cache
def prepare() -> dict[str, set[tuple[str, str]]]:
    """By wait, the accesses of the races without it."""
    started: dict[str, Any] = {"__name__": "exercise"}
    exec(START, started)
    return {wait: _races(started["train"], wait) for wait in "ABCD"}


def _races(train, remove: str) -> set[tuple[str, str]]:
    races = prove(record_of(lambda: train(remove), ranks=2)).races
    return {tuple(f"{each.stream} {each.does}" for each in (race.first, race.second)) for race in races}


def check(answer: ModuleType) -> str:
    """Compare what was found with the proof."""
    found = constant(answer, "FOUND")
    if not isinstance(found, dict) or set(found) != set("ABCD"):
        raise Hint('FOUND must be a dict with the keys "A", "B", "C" and "D".')
    for wait, races in prepare().items():
        said = found[wait]
        if said == "?":
            raise Hint(
                f'FOUND["{wait}"] is still open. Set REMOVE = "{wait}" and run shardrt races on the file.'
            )
        if said is None:
            if races:
                raise Hint(f'Without wait {wait} there is a race. Set REMOVE = "{wait}" and read the report.')
            continue
        if (
            not isinstance(said, tuple | list)
            or len(said) != 2
            or not all(each in _ACCESSES for each in said)
        ):
            raise Hint(f'FOUND["{wait}"] must be None, or two of these accesses: {", ".join(_ACCESSES)}.')
        _check(wait, tuple(said), races)
    return "your four answers equal the proofs of the race checker, each with one wait removed."


def _check(wait: str, said: tuple[str, str], races: set[tuple[str, str]]) -> None:
    if said in races:
        return
    if not races:
        raise Hint(
            f"Without wait {wait} there is no race: wait B already orders the same work. Its answer is None."
        )
    if said[::-1] in races:
        raise Hint(
            f"Wait {wait}: these are the two accesses, in the other order. Which does the program issue first?"
        )
    if all(each.endswith("reads") for each in said):
        raise Hint(f"Wait {wait}: two reads never race. One of the two accesses writes.")
    if said[0].split()[0] == said[1].split()[0]:
        raise Hint(f"Wait {wait}: two accesses of one stream are always in order. A race needs two streams.")
    raise Hint(
        f"Wait {wait}: the report names another pair. Look at the lines `first` and `second`: stream, then verb."
    )
