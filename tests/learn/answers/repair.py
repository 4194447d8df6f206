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
    free = [device.new_event() for _ in slots]
    reduced = device.new_event()
    for _ in range(2):
        for layer in reversed(range(LAYERS)):
            n = layer % 2
            compute.wait(free[n])
            slots[n][:] = x
            slots[n] += 1.0  # these two stand for the backward of the layer
            compute.record(written[n])
            reduce.wait(written[n])
            group.reduce_scatter(gradients[layer], slots[n], stream=reduce, tag=f"layer {layer}")
            reduce.record(free[n])
        reduce.record(reduced)
        compute.wait(reduced)
        for shard, gradient in zip(shards, gradients, strict=True):
            shard -= gradient  # stands for the optimizer
