import numpy as np

from shardrt.optim import Optimizer


class Lion(Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        settings = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, settings, state={"m": "exp_avg"})

    def numbers(self, group, steps):
        return group["lr"], group["weight_decay"], *group["betas"]

    def update(self, kernels, update):
        shard, gradient, m = (update.arrays[name] for name in ("shard", "gradient", "m"))
        for start, stop, lr, decay, beta1, beta2 in update.ranges.tolist():
            part = slice(int(start), int(stop))
            direction = np.sign(beta1 * m[part] + (1 - beta1) * gradient[part])
            shard[part] -= lr * (direction + decay * shard[part])
            m[part] = beta2 * m[part] + (1 - beta2) * gradient[part]
