"""Ops on tensors, as functions. Import as `from shardrt import functional as F`.

One file per family. Each op is a Function, forward and backward together, with the function that users call
below it. The numbers are computed by kernels.
"""

from shardrt.functional.activation import gelu, relu, silu, swiglu
from shardrt.functional.attention import scaled_dot_product_attention, self_attention
from shardrt.functional.cast import cast
from shardrt.functional.dropout import dropout
from shardrt.functional.elementwise import (
    add,
    div,
    exp,
    log,
    maximum,
    mul,
    neg,
    pow,
    sqrt,
    sub,
    tanh,
)
from shardrt.functional.embedding import embedding
from shardrt.functional.linear import linear
from shardrt.functional.loss import cross_entropy, linear_cross_entropy
from shardrt.functional.matmul import matmul
from shardrt.functional.norm import layer_norm, rms_norm
from shardrt.functional.reduce import max, mean, sum
from shardrt.functional.rotary import rotary
from shardrt.functional.shape import (
    chunk,
    concatenate,
    expand,
    getitem,
    permute,
    reshape,
    split,
    squeeze,
    stack,
    transpose,
    unsqueeze,
)
from shardrt.functional.softmax import log_softmax, softmax

__all__ = [
    "add",
    "cast",
    "chunk",
    "concatenate",
    "cross_entropy",
    "div",
    "dropout",
    "embedding",
    "exp",
    "expand",
    "gelu",
    "getitem",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "log",
    "log_softmax",
    "matmul",
    "max",
    "maximum",
    "mean",
    "mul",
    "neg",
    "permute",
    "pow",
    "relu",
    "reshape",
    "rms_norm",
    "rotary",
    "scaled_dot_product_attention",
    "self_attention",
    "silu",
    "softmax",
    "split",
    "sqrt",
    "squeeze",
    "stack",
    "sub",
    "sum",
    "swiglu",
    "tanh",
    "transpose",
    "unsqueeze",
]
