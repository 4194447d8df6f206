"""Ops on tensors, as functions. Import as `from shardrt import functional as F`.

One file per family. Each op is a Function, forward and backward together, with the function that users call
below it. The numbers are computed by kernels.
"""

from shardrt.functional.activation import gelu, relu, sigmoid, silu, swiglu
from shardrt.functional.attention import document_starts, scaled_dot_product_attention, self_attention
from shardrt.functional.batch_norm import batch_norm
from shardrt.functional.cast import cast
from shardrt.functional.conv2d import conv2d
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
from shardrt.functional.linear import linear, linear_gelu
from shardrt.functional.loss import cross_entropy, linear_cross_entropy
from shardrt.functional.matmul import matmul
from shardrt.functional.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from shardrt.functional.pool import avg_pool2d, global_avg_pool2d, max_pool2d
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
    "add_layer_norm",
    "add_rms_norm",
    "add",
    "avg_pool2d",
    "batch_norm",
    "cast",
    "chunk",
    "concatenate",
    "conv2d",
    "cross_entropy",
    "div",
    "document_starts",
    "dropout",
    "embedding",
    "exp",
    "expand",
    "gelu",
    "getitem",
    "global_avg_pool2d",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_gelu",
    "log",
    "log_softmax",
    "matmul",
    "max",
    "max_pool2d",
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
    "sigmoid",
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
