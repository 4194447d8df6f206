"""Rotary position embedding (Su et al., RoFormer, 2021, section 3.4.2), in the half-split order of Llama.

Element i of a head and element i + half of it are one pair, turned by the angle of (position, i). On packed
rows, so that queries and keys are turned and values passed on in one sweep.
"""

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import fused
from shardrt.kernels.cpu._threads import run_rows


@cost("x cos sin -> y", flops=lambda x, cos, heads: 6 * len(x) * heads * cos.shape[1])
def forward(x: Array, cos: Array, sin: Array, y: Array, heads: int) -> None:
    """Compute y = x with the first `heads` heads of every row turned, the rest as it is; y may be x.

    x, y (sequences * time, width), sequence after sequence; cos, sin (time, head_dim / 2), by position.
    """
    run_rows(_rotate, x.shape[0], x.size, x, cos, sin, y, heads, x.dtype.type(1))


@cost("dy cos sin -> dx", flops=lambda dy, cos, heads: 6 * len(dy) * heads * cos.shape[1])
def backward(dy: Array, cos: Array, sin: Array, dx: Array, heads: int) -> None:
    """Compute dx from dy: turned back; dx may be dy."""
    run_rows(_rotate, dy.shape[0], dy.size, dy, cos, sin, dx, heads, dy.dtype.type(-1))


@fused
def _rotate(start, stop, x, cos, sin, y, heads, sign):
    time, half = cos.shape
    for row in range(start, stop):
        angle_cos, angle_sin = cos[row % time], sin[row % time]
        for head in range(heads):
            low, middle, high = 2 * head * half, (2 * head + 1) * half, (2 * head + 2) * half
            first, second = x[row, low:middle], x[row, middle:high]
            to_first, to_second = y[row, low:middle], y[row, middle:high]
            for i in range(half):
                a, b, s = first[i], second[i], sign * angle_sin[i]
                to_first[i] = a * angle_cos[i] - b * s
                to_second[i] = b * angle_cos[i] + a * s
        rest, to_rest = x[row, 2 * heads * half :], y[row, 2 * heads * half :]
        for i in range(rest.size):
            to_rest[i] = rest[i]
