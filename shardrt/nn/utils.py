"""Gradient norms and clipping over all parameters and all ranks."""

from collections.abc import Iterable
from math import sqrt

import numpy as np

from shardrt import device
from shardrt.nn.parameter import Parameter
from shardrt.nn.storage import Storage


def clip_grad_norm_(parameters: Iterable[Parameter], max_norm: float) -> float:
    """Scale the gradients down so that their global 2-norm is at most `max_norm`; gives the norm before.

    The norm is over all elements on all ranks, each counted once: local sums of squares in float64, one
    all-reduce of one number. Call it on every rank. An infinite `max_norm` only measures.

    Raises ValueError if `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be positive, got {max_norm}")
    pieces = list(_gradient_pieces(parameters))
    norm = _norm(pieces)
    if norm > max_norm:
        factor = max_norm / (norm + 1e-6)
        kernels = device.current().kernels
        for _, piece in pieces:
            kernels.elementwise.scale_(piece, factor)
    return norm


def _norm(pieces: list[tuple[Storage, np.ndarray]]) -> float:
    here = device.current()
    sums: dict = {}
    for storage, piece in pieces:
        sums.setdefault(storage.communicator, []).append(here.kernels.reduce.square_sum(piece))
    total = 0.0
    for communicator, values in sums.items():
        value = np.array([sum(values)], np.float64)
        if communicator is not None:
            communicator.all_reduce(value, op="sum", stream=here.current_stream)
        total += float(value[0])
    return sqrt(total)


def _gradient_pieces(parameters: Iterable[Parameter]) -> Iterable[tuple[Storage, np.ndarray]]:
    """(storage, 1-D view of its gradient), neighbouring parameters of one storage as one view."""
    ranges: dict[Storage, list[tuple[int, int]]] = {}
    for parameter in parameters:
        start, stop, _ = parameter.storage.range_of(parameter)
        if parameter.requires_grad:
            ranges.setdefault(parameter.storage, []).append((start, stop))
    for storage, pieces in ranges.items():
        gradient = storage.gradient
        if gradient is None:
            gradient, pieces = np.zeros(0, np.float32), []
        # A rank that holds nothing of a storage still joins its all-reduce, with an empty piece.
        for start, stop in merged(pieces) or [(0, 0)]:
            yield storage, gradient[start:stop]


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, with ranges that touch joined into one, and empty ones left out."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start == stop:
            continue
        if result and result[-1][1] >= start:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result
