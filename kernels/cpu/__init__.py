"""Kernels of the CPU: NumPy's BLAS for matmuls, Numba where fusing pays. One module per op."""

from shardrt.kernels.cpu import (
    activation,
    adamw,
    adamw8bit,
    attention,
    batch_norm,
    blockwise,
    cast,
    conv2d,
    cross_entropy,
    dropout,
    elementwise,
    embedding,
    grouped,
    layer_norm,
    linear,
    lion,
    lion8bit,
    matmul,
    muon,
    philox,
    pool,
    quantise,
    reduce,
    rms_norm,
    rotary,
    route,
    sgd,
    softmax,
    stochastic,
    swiglu,
)
from shardrt.kernels.cpu._threads import set_threads, threads
from shardrt.kernels.cpu._warm_up import compiled, warm_up

__all__ = ["compiled", "set_threads", "threads", "warm_up"]
