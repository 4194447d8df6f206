"""Kernels of the CPU: NumPy's BLAS for products, Numba where fusing pays. One module per op."""

from shardrt.kernels.cpu import (
    activation,
    adamw,
    attention,
    cast,
    cross_entropy,
    dropout,
    elementwise,
    embedding,
    layer_norm,
    linear,
    matmul,
    philox,
    reduce,
    rms_norm,
    rotary,
    sgd,
    softmax,
    swiglu,
)
from shardrt.kernels.cpu._threads import set_threads, threads
from shardrt.kernels.cpu._warm_up import warm_up

__all__ = [
    "activation",
    "adamw",
    "attention",
    "cast",
    "cross_entropy",
    "dropout",
    "elementwise",
    "embedding",
    "layer_norm",
    "linear",
    "matmul",
    "philox",
    "reduce",
    "rms_norm",
    "rotary",
    "set_threads",
    "sgd",
    "softmax",
    "swiglu",
    "threads",
    "warm_up",
]
