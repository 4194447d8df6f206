"""Learning-rate schedules: pure functions of the step, so that resuming needs no state."""

from math import cos, pi


def warmup_cosine(step: int, *, lr: float, min_lr: float, warmup_steps: int, total_steps: int) -> float:
    """The learning rate of `step` (counted from 0): linear warm-up, then half a cosine down to `min_lr`.

    (Loshchilov and Hutter, SGDR, 2017, equation 5 without restarts.) From `total_steps` on it is `min_lr`.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if step >= total_steps:
        return min_lr
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return min_lr + 0.5 * (lr - min_lr) * (1 + cos(pi * progress))
