import numpy as np


def step(ranks, shards, shapes, x, target, rows, rate):
    inputs, last = [], len(shards) - 1
    for i, shard in enumerate(shards):
        inputs.append(x)
        x = x @ ranks.all_gather(shard).reshape(shapes[i])
        if i < last:
            x = np.maximum(x, 0)
    dy = 2 * (x - target) / rows
    for i in reversed(range(len(shards))):
        gradient = inputs[i].T @ dy
        dy = dy @ ranks.all_gather(shards[i]).reshape(shapes[i]).T * (inputs[i] > 0)
        shards[i] -= rate * ranks.reduce_scatter(gradient)
