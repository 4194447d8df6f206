"""Exercise 12: write an optimizer.

Lion (Chen et al., 2023) keeps one array m per parameter, which begins at 0. One update of the weights w by
the gradient g, with the learning rate lr, the weight decay d and two numbers beta1 and beta2:

    direction = sign(beta1 * m + (1 - beta1) * g)
    w = w - lr * (direction + d * w)
    m = beta2 * m + (1 - beta2) * g

An optimizer of shardrt sees flat shards, not parameters. update() gets arrays that are equally long: `shard`
(the weights), `gradient` and the state. It changes `shard` and `m` in place, in some ranges [start, stop).
The base class makes the state: name each array in `state`, as {your name: name in checkpoints}. State that
you keep elsewhere is lost when a run is resumed. PyTorch's name for a mean of gradients is "exp_avg".

numbers() says what a range gets for its group, as a tuple of floats. update() finds them behind start and
stop. Read more: docs/howto/optimizers.md.
"""

import numpy as np

from shardrt.optim import Optimizer


class Lion(Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        settings = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, settings, state={})  # name m here

    def numbers(self, group, steps):
        """What a range needs of its group. steps: which update this is, from 1."""
        return (group["lr"],)  # more is needed

    def update(self, kernels, update):
        shard, gradient = update.arrays["shard"], update.arrays["gradient"]
        for start, stop, lr in update.ranges.tolist():
            part = slice(int(start), int(stop))
            raise NotImplementedError
