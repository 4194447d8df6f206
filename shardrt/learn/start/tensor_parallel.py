"""Exercise 10: cut a linear layer.

Tensor parallelism cuts the matmuls. An MLP has two linear layers:

    h = relu(x @ A + a)      A: (width, hidden), a: (hidden,)
    y = h @ B + b            B: (hidden, width), b: (width,)

Cut it over N ranks so that each rank computes 1/N of the hidden units. Every rank has the whole x, and needs
the whole y. In backward every rank has the whole gradient dy, and needs the whole dx. Write

    cut        the parts of A, a, B, b that a rank holds. Who holds b?
    forward    (y, anything that backward needs)
    backward   dx, and the gradients of the rank's own parts

    all_reduce(array)    in place, for a float32 array: array becomes its sum over ranks. Keep to ONE call in
                         forward and ONE in backward.

Every rank holds the whole b, and updates it alike. Read more: docs/explanation/tensor_parallel.md.
"""

import numpy as np


def cut(A, a, B, b, rank, ranks):
    """This rank's (A, a, B, b)."""
    raise NotImplementedError


def forward(parts, x, all_reduce):
    """(y, saved), with y whole on every rank. parts: what cut returned."""
    raise NotImplementedError


def backward(parts, saved, dy, all_reduce):
    """(dx, dA, da, dB, db), with dx and db whole on every rank, and the others as the parts."""
    raise NotImplementedError
