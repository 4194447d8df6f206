"""Exercise 9: put a missing wait back.

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
        for shard, gradient in zip(shards, gradients, strict=True):
            shard -= gradient  # stands for the optimizer


if __name__ == "__main__":
    train()
