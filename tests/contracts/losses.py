"""Contracts of cross entropy, of whole rows of logits and of parts of them."""

import numpy as np

from tests.contracts import Call, Double, Out, Wide, contract
from tests.cuda.numbers import normal

SHAPES = [(1, 1), (3, 7), (5, 8), (6, 65), (3, 256), (2, 2051), (2, 4160)]
IGNORE = -100


def targets_of(shape):
    """Random ones; the last row is ignored if there are several."""
    targets = np.random.default_rng(shape).integers(0, shape[1], shape[0])
    if shape[0] > 1:
        targets[-1] = IGNORE
    return targets


def losses(logits, targets):
    """losses, lse."""
    highest = logits.max(1)
    lse = highest + np.log(np.exp(logits - highest[:, None]).sum(1))
    chosen = logits[np.arange(len(logits)), np.where(targets == IGNORE, 0, targets)]
    return np.where(targets == IGNORE, 0, lse - chosen), lse


def slopes(logits, targets, lse, scale=1.0, first=0):
    """The gradient of the logits; `first` is the word of the first column."""
    hot = targets[:, None] == first + np.arange(logits.shape[1])
    return scale * (targets != IGNORE)[:, None] * (np.exp(logits - lse[:, None]) - hot)


def extreme(width):
    """(logits, targets): rows far from zero, and rows of which one word alone is possible, which is right."""
    logits = normal(4, width)
    logits[0] += 1e4
    logits[1] -= 1e4
    logits[2, 1:] = -np.inf
    logits[3, :-1] = -np.inf
    return logits, np.array([1, 2, 0, width - 1])


def padded(values, row):
    """A view of rows that begin `row` elements apart."""
    whole = np.full((len(values), row), np.nan)
    whole[:, : values.shape[1]] = values
    return whole[:, : values.shape[1]]


def cases():
    """(logits, targets): of dense rows and of others. Of one word the loss is 0 but for rounding."""
    for shape in SHAPES[1:]:
        yield 3 * normal(*shape), targets_of(shape)
    for row in (64, 67):
        yield padded(3 * normal(3, 50), row), targets_of((3, 50))


@contract("cross_entropy.forward")
def forward():
    for logits, targets in cases():
        yield Call((logits, targets, Out(wide=True), Out(wide=True), IGNORE), losses)
    for width in (8, 37, 3001):
        args = *extreme(width), Out(wide=True), Out(wide=True), IGNORE
        yield Call(args, losses, factor=(1e4, 1), elements=("float32",))


@contract("cross_entropy.backward")
def backward():
    for logits, targets in cases():
        lse = Wide(losses(logits, targets)[1])
        for scale in (0.25, None):
            args = logits, targets, lse, Out(), None if scale is None else Double(np.array(scale)), IGNORE

            def gradient(logits, targets, lse, scale=1.0):
                return slopes(logits, targets, lse, scale)

            yield Call(args, gradient, over=0)
    for first in (0, 3, 50):  # of a part of the words
        logits, targets = padded(3 * normal(6, 40), 41), targets_of((6, 65))
        args = logits, targets, Wide(5 + normal(6)), Out(), None, IGNORE, first
        yield Call(args, lambda *arrays, first=first: slopes(*arrays, first=first), over=0)


@contract("cross_entropy.forward_in_place")
def forward_in_place():
    """The gradient takes the place of the logits."""
    for shape in SHAPES[1:]:
        for padding in (0, 1, 64):
            logits = Out(padded(3 * normal(*shape), shape[1] + padding))
            args = logits, targets_of(shape), Out(wide=True), Out(wide=True), IGNORE

            def all_three(logits, targets):
                own, lse = losses(logits, targets)
                return slopes(logits, targets, lse), own, lse

            yield Call(args, all_three, offsets=(0,))


@contract("cross_entropy.backward_in_place")
def backward_in_place():
    """It has been done."""
    for factor in (None, Double(np.array(0.3)), Double(np.array([0.5, 0.0, 3.0]))):
        args = normal(3, 50), targets_of((3, 50)), Wide(normal(3)), factor, IGNORE
        yield Call(args, lambda *arrays: ())


@contract("cross_entropy.forward_part")
def forward_part():
    for first in (0, 3, 50):
        logits, targets = padded(3 * normal(6, 40), 41), targets_of((6, 65))
        args = logits, targets, Out(wide=True), Out(wide=True), IGNORE, first, 90

        def part(logits, targets, first=first):
            column, lse = targets - first, losses(logits, targets * 0)[1]
            here = (column >= 0) & (column < logits.shape[1])
            return np.where(here, logits[np.arange(6), column * here], 0), lse

        yield Call(args, part)


@contract("cross_entropy.join")
def join():
    for rows in (3, 300):
        parts, targets = normal(3, 2, rows), targets_of((rows, 40))
        parts[1, 0, 0] = -np.inf  # a part without a word that is possible

        def whole(parts, targets):
            lse = np.log(np.exp(parts[:, 0]).sum(0))
            return np.where(targets == IGNORE, 0, lse - parts[:, 1].sum(0)), lse

        yield Call((Wide(parts), targets, Out(wide=True), Out(wide=True), IGNORE), whole, factor=2)


@contract("cross_entropy.scale_rows")
def scale_rows():
    for width in (1, 24, 33):
        for factor in (np.array(0.3), np.array(1.0), np.array([0.5, 0.0, 3.0])):
            yield Call((normal(3, width), Double(factor), Out()), scaled, over=0)


def scaled(x, factor):
    return x * (factor[:, None] if factor.ndim else factor)
