"""Exercise 5: shard a training loop.

one_rank below trains a net of linear layers, with ReLU in between, on one rank. Write the same step for one
of N ranks that each hold 1/N of every layer:

    shards[i]                     this rank's part of layer i, 1-D; change it in place
    shapes[i]                     the shape of layer i
    x, target                     this rank's rows of the batch
    rows                          the rows of all ranks together
    ranks.all_gather(shard)       the whole layer, 1-D, a new array on every rank
    ranks.reduce_scatter(whole)   this rank's part of the sum over ranks, 1-D

Follow FULL_SHARD: gather a layer for its forward, forget it, and gather it again for its backward. At most
two whole layers may exist at once: the one in use and the one that arrives.
"""

import numpy as np


def one_rank(layers, x, target, rows, rate):
    inputs = []
    for layer in layers:
        inputs.append(x)
        x = np.maximum(x @ layer, 0) if layer is not layers[-1] else x @ layer
    dy = 2 * (x - target) / rows  # of the squared error, averaged over all rows
    for i in reversed(range(len(layers))):
        gradient = inputs[i].T @ dy
        dy = dy @ layers[i].T * (inputs[i] > 0)
        layers[i] -= rate * gradient


def step(ranks, shards, shapes, x, target, rows, rate):
    """One step of the rank that calls."""
    raise NotImplementedError
