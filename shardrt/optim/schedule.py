"""Learning-rate schedules: pure functions of the step, so that resuming needs no state.

All count steps from 0, go up in a line over the first `warmup_steps`, and are `min_lr` from `total_steps` on.
"""

from math import cos, pi


def warmup_cosine(step: int, *, lr: float, min_lr: float, warmup_steps: int, total_steps: int) -> float:
    """The learning rate of `step`: after the warm-up half a cosine down to `min_lr`.

    (Loshchilov and Hutter, SGDR, 2017, equation 5 without restarts.)

    Example:
        >>> from shardrt import optim
        >>> how = {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 10, "total_steps": 100}
        >>> [round(optim.warmup_cosine(step, **how), 6) for step in (0, 9, 55, 100)]
        [0.0001, 0.001, 0.00055, 0.0001]
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if step >= total_steps:
        return min_lr
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return min_lr + 0.5 * (lr - min_lr) * (1 + cos(pi * progress))


def warmup_linear(step: int, *, lr: float, min_lr: float, warmup_steps: int, total_steps: int) -> float:
    """The learning rate of `step`: after the warm-up a line down to `min_lr`.

    Example:
        >>> from shardrt import optim
        >>> how = {"lr": 1e-3, "min_lr": 0.0, "warmup_steps": 10, "total_steps": 110}
        >>> [round(optim.warmup_linear(step, **how), 6) for step in (0, 10, 60, 110)]
        [0.0001, 0.001, 0.0005, 0.0]
    """
    return warmup_stable_decay(
        step,
        lr=lr,
        min_lr=min_lr,
        warmup_steps=warmup_steps,
        decay_steps=total_steps - warmup_steps,
        total_steps=total_steps,
    )


def warmup_stable_decay(
    step: int, *, lr: float, min_lr: float, warmup_steps: int, decay_steps: int, total_steps: int
) -> float:
    """The learning rate of `step` (WSD): after the warm-up `lr`, in the last `decay_steps` a line to min_lr.

    (Hu et al., MiniCPM, 2024, with a linear decay.) A run can be prolonged from any step before the decay:
    until there the rate does not depend on `total_steps`.

    Example:
        >>> from shardrt import optim
        >>> how = {"lr": 1e-3, "min_lr": 0.0, "warmup_steps": 10, "decay_steps": 20, "total_steps": 100}
        >>> [round(optim.warmup_stable_decay(step, **how), 6) for step in (0, 50, 90, 100)]
        [0.0001, 0.001, 0.0005, 0.0]
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if step >= total_steps:
        return min_lr
    left = (total_steps - step) / decay_steps if decay_steps > 0 else 1.0
    return min_lr + (lr - min_lr) * min(1.0, left)
