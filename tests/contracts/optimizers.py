"""Contracts of updates of a flat shard: inside the ranges, and nothing outside of them."""

import numpy as np

from tests.contracts import Call, Double, Out, Wide, contract
from tests.cuda.numbers import normal

COUNT = 13000
# One of one element, one that begins and ends anywhere, an empty one, two that touch within sixteen bytes,
# one that ends where a block's tile does, and one over several tiles.
PLACES = [(0, 1), (3, 20), (37, 37), (600, 1109), (1109, 4096), (4097, COUNT)]
CORRECTION = 1 / np.sqrt(1 - 0.95**3)
# What the weights and the step are multiplied by, 1 / the root of the bias, beta1, beta2, eps.
ADAMW = [
    (0.999, 1e-2, CORRECTION, 0.9, 0.95, 1e-8),
    (1.0, 1e-1, CORRECTION, 0.8, 0.9, 1e-3),
    (0.0, 1.0, 1.0, 0.0, 0.0, 1.0),
    (0.985, 3e-2, 2.0, 0.0, 0.5, 1e-8),
    (1.0, 1e-3, CORRECTION, 0.9, 0.95, 1e-8),
    (0.5, 2e-3, 3.0, 0.95, 0.99, 1e-6),
]
# What the weights are multiplied by, learning rate, beta1, beta2.
LION = [
    *((0.999, 1e-2, 0.9, 0.99), (1.0, 1e-1, 0.8, 0.5), (0.0, 1.0, 0.0, 0.0)),
    *((0.985, 3e-2, 0.0, 0.9), (0.7, 1e-3, 0.5, 0.5), (0.5, 2e-3, 0.95, 0.98)),
]
SGD = [(1e-2, 0.1), (1e-1, 0.0), (1.0, 1.0), (3e-2, 0.5), (1e-1, 0.2), (2e-2, 0.0)]  # learning rate, decay
# momentum, dampening, Nesterov's, the first step
RULES = [(0.9, 0.0, False, False), (0.9, 0.3, False, False), (0.9, 0.0, True, False), (0.9, 0.3, True, True)]


def tables(settings):
    """One range of everything, and several."""
    yield Double(np.array([(0, COUNT, *settings[0])]))
    yield Double(np.array([(*place, *own) for place, own in zip(PLACES, settings, strict=True)]))


def states(count, others):
    """Arrays of an update: all of one type, and then all but the parameters in float32, where it says so."""
    values = [normal(COUNT, seed=seed) for seed in range(count)]
    if count == 4:
        values[2:] = 0.1 * values[2], 0.01 * values[2] ** 2 + 0.01
    yield [Out(values[0]), values[1], *map(Out, values[2:])]
    if others:
        yield [Out(values[0]), Wide(values[1]), *(Out(v, wide=True) for v in values[2:])]
        yield [Out(values[0], wide=True), values[1], *(Out(v, wide=True) for v in values[2:])]


def in_ranges(rule):
    """The truth of a step: `rule` gives what one range becomes, from its settings and arrays."""

    def step(param, grad, *rest):
        *kept, ranges = rest
        results = [array.copy() for array in (param, *kept)]
        for start, stop, *settings in ranges:
            piece = slice(int(start), int(stop))
            updated = rule(*settings, *(array[piece] for array in (param, grad, *kept)))
            for result, values in zip(results, updated, strict=True):
                result[piece] = values
        return tuple(results)

    return step


def adamw_rule(keep, rate, correction, beta1, beta2, eps, param, grad, m, v):
    m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad**2
    return param * keep - rate * m / (np.sqrt(v) * correction + eps), m, v


@contract("adamw.step")
def adamw():
    for table in tables(ADAMW):
        for state in states(4, True):
            yield Call((*state, table), in_ranges(adamw_rule))


def lion_rule(keep, rate, beta1, beta2, param, grad, m):
    direction = np.sign(beta1 * m + (1 - beta1) * grad)
    return param * keep - rate * direction, beta2 * m + (1 - beta2) * grad


@contract("lion.step")
def lion():
    for table in tables(LION):
        for state in states(3, True):
            yield Call((*state, table), in_ranges(lion_rule))
    # The direction is a sign, with 0 of 0 and nan of nan.
    odd = np.array([1e-30, -1e-30, 0.0, -0.0, np.nan, np.inf, -np.inf])
    args = Out(np.ones(7)), odd, Out(np.zeros(7)), Double(np.array([[0, 7, 1.0, 0.5, 0.0, 1.0]]))
    yield Call(args, in_ranges(lion_rule), exact=True, elements=("float32",))


@contract("sgd.step")
def sgd():
    def plain(lr, decay, kept, added, param, grad):
        return (param - lr * (grad + decay * param),)

    for table in tables([(*own, 0.9, 1.0) for own in SGD]):
        for state in states(2, True):
            yield Call((*state, None, table, 0.9, False), in_ranges(plain))
    for momentum, dampening, nesterov, first in RULES:

        def rule(lr, decay, kept, added, param, grad, buffer, momentum=momentum, nesterov=nesterov):
            grad = grad + decay * param
            buffer = kept * buffer + added * grad
            return param - lr * (grad + momentum * buffer if nesterov else buffer), buffer

        moving = (0, 1) if first else (momentum, 1 - dampening)
        for table in tables([(*own, *moving) for own in SGD]):
            for state in states(3, True):
                yield Call((*state, table, momentum, nesterov), in_ranges(rule))


@contract("muon.direction")
def muon_direction():
    def truth(grad, m, momentum, nesterov):
        m = momentum * m + (1 - momentum) * grad
        return m, momentum * m + (1 - momentum) * grad if nesterov else m

    for nesterov in (True, False):
        for momentum in (0.95, 0.0):
            grad, m = normal(COUNT), normal(COUNT, seed=1)

            def of(grad, m, momentum=momentum, nesterov=nesterov):
                return truth(grad, m, momentum, nesterov)

            yield Call((grad, Out(m), Out(), momentum, nesterov), of)
            yield Call((Wide(grad), Out(m), Out(), momentum, nesterov), of)


@contract("muon.apply")
def muon_apply():
    for keep, rate in ((0.999, 1e-2), (1.0, 1.0)):

        def of(param, update, keep=keep, rate=rate):
            return keep * param - rate * update

        yield Call((Out(normal(COUNT)), normal(COUNT, seed=1), keep, rate), of)
