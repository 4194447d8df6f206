"""Exercise: put a missing wait back, without giving up the overlap."""

from collections import Counter
from functools import cache
from types import ModuleType
from typing import Any

from shardrt.device.program import Collective, HostWait, Program, Take, Work
from shardrt.learn.checking import Hint, function
from shardrt.simulate.clock import price
from shardrt.simulate.machine import Machine
from shardrt.simulate.proof import prove
from shardrt.simulate.script import record_of

TITLE = "Put a wait back"
LEVEL = "hard"
TEACHES = "a wait that is enough and costs no time"
TAKEAWAY = (
    "The writer waits for the last reader of the same slot, as late as possible. A wait for the whole stream, or "
    "on the host, is right as well, and gives away the time that two slots were there to hide."
)

START = '''"""Exercise 9: put a missing wait back.

train() is the backward of FSDP. The stream "compute" writes the whole gradient of a layer into one of two
slots; the stream "reduce" sums it over ranks into the rank's part. So a reduction runs while the next layer
computes. One thing is missing: a slot is written again while its reduction may still read it.

    shardrt races --ranks 2 -- exercise_09.py

reports the race. Put an event and a wait where they belong. The grader demands
- no race at any speed of the streams, and the same work in the same two slots,
- no wait on the host: nothing like synchronize(),
- the overlap: a layer must be able to compute while the reduction of the layer before it runs. The simulator
  prices your program on nodes of 8 H100. It may take 5 % longer than the racing one.

    event = device.new_event()
    stream.record(event)     the event is at this point of the stream
    stream.wait(event)       later work of the stream waits for it; an event without a record is no wait
"""

import numpy as np

from shardrt.comm import init_device_mesh

LAYERS, SIZE = 6, 1 << 26


def train():
    mesh = init_device_mesh("auto")
    device, group = mesh.device, mesh.communicator("reduce")
    compute, reduce = device.current_stream, device.new_stream("reduce")
    shards, gradients = (
        [device.zeros(SIZE // mesh.size, np.float32) for _ in range(LAYERS)] for _ in range(2)
    )
    slots = [device.zeros(SIZE, np.float32) for _ in range(2)]
    x = device.zeros(SIZE, np.float32)
    written = [device.new_event() for _ in slots]
    reduced = device.new_event()
    for _ in range(2):
        for layer in reversed(range(LAYERS)):
            n = layer % 2
            slots[n][:] = x
            slots[n] += 1.0  # these two stand for the backward of the layer
            compute.record(written[n])
            reduce.wait(written[n])
            group.reduce_scatter(gradients[layer], slots[n], stream=reduce, tag=f"layer {layer}")
        reduce.record(reduced)
        compute.wait(reduced)
        for shard, gradient in zip(shards, gradients):
            shard -= gradient  # stands for the optimizer


if __name__ == "__main__":
    train()
'''

_SLOWER = 1.05


@cache
def prepare() -> tuple[Program, float]:
    """The racing program, and its time."""
    started: dict[str, Any] = {"__name__": "exercise"}
    exec(START, started)
    programs = record_of(started["train"], ranks=2)
    return programs[0], price(programs, Machine.load("h100-8")).seconds


def check(answer: ModuleType) -> str:
    """Prove the repaired program, and price it."""
    racing, seconds = prepare()
    programs = record_of(function(answer, "train"), ranks=2)
    program = programs[0]
    if not any(isinstance(item, Collective) for item in program.items):
        raise Hint("train() issues no collective. Repair the program of the starting file.")
    if _count(program, HostWait) > _count(racing, HostWait):
        raise Hint("The host waits: nothing is issued meanwhile. Let a stream wait for an event instead.")
    if _nbytes(program) > _nbytes(racing):
        raise Hint("The program takes more memory. Two slots are enough, if a writer waits for the reader.")
    if _work(program) != _work(racing):
        raise Hint("The program does other work than the starting file. Add events and waits, nothing else.")
    if races := prove(programs).races:
        first, second = races[0].first, races[0].second
        raise Hint(
            f"There is still a race: {first.stream} {first.does} and then {second.stream} {second.does} the "
            f"same memory, {races[0].count} times. {_repair(races[0])}"
        )
    own = price(programs, Machine.load("h100-8")).seconds
    if own > _SLOWER * seconds:
        raise Hint(
            f"There is no race, but the overlap is lost: {1e3 * own:.2f} ms, where the racing program takes "
            f"{1e3 * seconds:.2f} ms. Wait for the reduction of the same slot, two layers ago, just before the write."
        )
    return f"no race at any speed, the same work, and {1e3 * own:.2f} ms of {1e3 * seconds:.2f} ms on the simulated machine."


def _repair(race: Any) -> str:
    if race.first.does == "reads":
        return "The reader must record an event behind its read, and the stream that writes must wait for it."
    return "That was in order in the starting file: put the waits that were there back."


def _count(program: Program, kind: type) -> int:
    return sum(isinstance(item, kind) for item in program.items)


def _nbytes(program: Program) -> int:
    return sum(item.memory.stop - item.memory.start for item in program.items if isinstance(item, Take))


def _work(program: Program) -> Counter[tuple[str, int]]:
    work = (item for item in program.items if isinstance(item, Work | Collective))
    return Counter((getattr(item, "name", "") or item.call, item.nbytes) for item in work)
