"""What kernels cost: the functions of kernels/cpu and kernels/cuda, which here compute nothing.

Each takes the same arguments and gives a Cost: what it reads and writes, operations, bytes, and the launches
of the CUDA twin. It looks at shapes, types and strides alone: no element need exist. What in the twins is a
function of numbers (reduce.power_rows, cast.check_kind) is the same here. Where the CUDA twin's launches
depend on the GPU or on what its libraries can do, a module says what it assumes. ON_CPU has what differs on a
CPU.
"""

from shardrt.kernels.shape import (
    activation,
    adamw,
    attention,
    batch_norm,
    cast,
    conv2d,
    cross_entropy,
    dropout,
    elementwise,
    embedding,
    float8,
    grouped,
    layer_norm,
    linear,
    lion,
    matmul,
    philox,
    pool,
    reduce,
    rms_norm,
    rotary,
    route,
    sgd,
    softmax,
    swiglu,
)
from shardrt.kernels.shape._cost import Answer, Cost, New
from shardrt.kernels.shape._on_cpu import ON_CPU

__all__ = [
    "Answer",
    "Cost",
    "New",
    "ON_CPU",
    "activation",
    "adamw",
    "attention",
    "batch_norm",
    "cast",
    "conv2d",
    "cross_entropy",
    "dropout",
    "elementwise",
    "embedding",
    "float8",
    "grouped",
    "layer_norm",
    "linear",
    "lion",
    "matmul",
    "philox",
    "pool",
    "reduce",
    "rms_norm",
    "rotary",
    "route",
    "sgd",
    "softmax",
    "swiglu",
    "warm_up",
]


def warm_up() -> None:
    """There is nothing to compile."""
