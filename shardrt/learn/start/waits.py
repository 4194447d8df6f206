"""Exercise 8: remove a wait, and let the race checker find it.

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
