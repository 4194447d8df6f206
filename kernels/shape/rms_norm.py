"""What RMS norm costs."""

from shardrt.kernels.shape._cost import Array, Cost, cost
from shardrt.kernels.shape._norm import backward as norm_backward


def forward(
    x: Array,
    weight: Array,
    y: Array,
    rstd: Array,
    eps: float,
    added: Array | None = None,
    total: Array | None = None,
) -> Cost:
    how = {"launches": min(len(x), 1), "sizes": x.shape}
    return cost((x, added, weight), (total, y, rstd), 4 * x.size, **how)


def backward(
    dy: Array,
    x: Array,
    weight: Array,
    rstd: Array,
    dx: Array | None,
    dweight: Array | None,
    accumulate: bool,
    dtotal: Array | None = None,
) -> Cost:
    return norm_backward((dy, x, weight, rstd, dtotal), dx, (dweight,), accumulate, 10)
