"""Contracts of sums: over buffers as a tree of neighbours, of powers as one, and of the largest element."""

from math import fsum

import numpy as np

from tests.contracts import Call, Double, Out, contract
from tests.contracts.casts import KINDS, bits_of
from tests.cuda.numbers import normal

PARTS = (1, 2, 3, 5, 6, 7, 8, 9, 17, 65)


def tree(parts):
    """Neighbours added, level by level; a last one without a neighbour goes up as it is."""
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def scaled_tree(scale, out, parts, kind):
    """To the bit, in numbers of this kind."""
    parts = [part.astype(kind) for part in parts]
    total = kind(scale) * tree(parts)
    return (total if out is None else out.astype(kind) + total).astype(np.float64)


@contract("reduce.sum_into")
def sum_into():
    for count in PARTS:
        pieces = [normal(131, seed=seed) for seed in range(count)]
        for kind in (np.float32, np.float64):
            how = {"exact": True, "elements": (kind.__name__,)}

            def added(out, *parts, kind=kind):
                return scaled_tree(0.3, out, parts, kind)

            def written(*parts, kind=kind):
                return scaled_tree(0.3, None, parts, kind)

            yield Call((Out(), pieces, 0.3, False), written, **how)
            yield Call((Out(normal(131, seed=99)), pieces, 0.3, True), added, **how)
    for size in (1, 3, 17, 2051):
        for count in (3, 9):
            pieces = [normal(size, seed=seed) for seed in range(count)]
            yield Call((Out(), pieces, 0.5, False), lambda *parts: 0.5 * sum(parts))


@contract("reduce.sum_packed")
def sum_packed():
    for name, kind in KINDS.items():
        for count in (1, 3, 8, 11):
            pieces = [bits_of(normal(131, seed=seed), kind) for seed in range(count)]

            def added(*given, kind=kind, count=count):
                *out, parts = *given[:-count], [part.view(kind) for part in given[-count:]]
                return scaled_tree(0.3, out[0] if out else None, parts, np.float32)

            how = {"exact": True, "elements": ("float32",)}
            yield Call((Out(), pieces, 0.3, False, name), added, **how)
            yield Call((Out(normal(131, seed=99)), pieces, 0.3, True, name), added, **how)


def spread_out(count):
    """Over ten orders of magnitude."""
    return normal(count) * 10.0 ** np.random.default_rng(1).integers(-2, 3, count)


POWERS = {
    1.0: np.abs,
    2.0: lambda x: x * x,
    2.5: lambda x: np.abs(x) ** 2.5,
    3.0: lambda x: x * x * np.abs(x),
}


@contract("reduce.power_sums")
def power_sums():
    """The exact sum of powers that are rounded to float64; the last bit of a broken power may differ."""

    def is_sum(found, x, p):
        return np.isclose(fsum(found.ravel()), fsum(POWERS[p](x)), rtol=1e-14 * (p == 2.5), atol=0)

    for count in (1, 17, 4099, 65_539):
        for p in POWERS:
            args = spread_out(count), p
            yield Call(args, lambda x: (), gives=lambda found, x, p=p: is_sum(found, x, p))
    for bad in (np.inf, -np.inf, np.nan):
        for place in (0, 999):
            x = normal(1000)
            x[place] = bad

            def is_bad(found, x, bad=bad):
                return np.array_equal(found, [[abs(bad), 0]], equal_nan=True)

            yield Call((x, 2.0), lambda x: (), gives=is_bad)
    yield Call((np.zeros(0), 2.0), lambda x: (), gives=lambda found, x: found.shape == (0, 2))

    out = Out(np.ones((1, 2)), double=True)
    yield Call((np.full(5, 3.0), 2.0, out), lambda x, out: np.array([[45.0, 0.0]]), exact=True)


@contract("reduce.add_pairs")
def add_pairs():
    """tests/cuda/test_reduce.py has the last bits."""

    def high_and_low(pairs):
        high = fsum(pairs[:, 0])
        return np.array([high, fsum([*pairs.ravel(), -high])])

    for count in (0, 1, 3, 2000):
        yield Call((Double(pairs_of(count)), Out(double=True)), high_and_low)
    for bad in (np.inf, np.nan, 1e308):  # 300 of 1e308 are too large together
        for place in (0, 299):
            pairs = np.full((300, 2), [1e308, 1.0])
            pairs[place] = bad, 0
            total = np.array([np.nan if np.isnan(bad) else np.inf, 0])
            args = Double(pairs), Out(double=True)
            yield Call(args, lambda pairs, total=total: total, exact=True)


def pairs_of(count):
    """High and low parts of numbers over twelve orders of magnitude."""
    random = np.random.default_rng(count)
    pairs = np.ldexp(random.random((count, 2)), random.integers(-20, 20, (count, 1)))
    pairs[:, 1] = np.ldexp(pairs[:, 1] - pairs[:, 0] / 2, -53)
    return pairs


@contract("reduce.clip_factor")
def clip_factor():
    for value in (0, 2.0, np.inf, np.nan):
        for limit in (0.7, 1e9, np.inf):
            for leave in (False, True):

                def norm_and_factor(pairs, limit=limit, leave=leave):
                    norm = np.sqrt(pairs.sum())
                    left = leave and not np.isfinite(norm)
                    return np.array([norm, 1.0 if left else np.minimum(limit / (norm + 1e-6), 1.0)])

                args = Double(np.array([[value, 2**-55], [1, 0]])), limit, leave, Out(double=True)
                yield Call(args, norm_and_factor, exact=True)


@contract("reduce.abs_max")
def abs_max():
    def is_largest(found, x):
        return np.array_equal(found, np.abs(x).max(initial=0), equal_nan=True)

    for count in (0, 1, 3, 17, 9001):
        yield Call((-np.abs(normal(count)),), lambda x: (), gives=is_largest)
    for place in (0, 31, 32, 4100, 9000):
        x = normal(9001)
        x[-1], x[0], x[place] = np.inf, np.inf, np.nan
        yield Call((x,), lambda x: (), gives=is_largest)
    for count in (0, 1000):
        args = normal(count), Out(np.ones(1))
        yield Call(args, lambda x, out: np.abs(x).max(initial=0, keepdims=True), exact=True)


def table_of(x, p):
    """What the two limbs of each row say together, and the numbers of nan and of infinities."""
    bits = x.astype(np.float32).view(np.uint32)
    exponents, whole = bits >> 23 & 255, (bits & 0x7FFFFF).astype(np.uint64)
    rows = np.zeros(256, np.uint64)
    np.add.at(rows, exponents, (whole | (exponents > 0).astype(np.uint64) << 23) ** np.uint64(p))
    return rows[:255], [np.isnan(x).sum(), np.isinf(x).sum()]


@contract("reduce.exact_power_sums")
def exact_power_sums():
    for p in (1, 2):
        for count in (0, 1, 1000, 140_001):
            bits = np.random.default_rng(count).integers(0, 2**32, count, dtype=np.uint32)
            with np.errstate(invalid="ignore"):
                x = bits.view(np.float32).astype(np.float64)  # nan and infinities among them

            def are_those(found, x, p=p):
                rows, odd = table_of(x, p)
                limbs = found[:255].astype(np.uint64) @ np.array([1, 1 << 24], np.uint64)
                return np.array_equal(limbs, rows) and found[255].tolist() == odd

            yield Call((x, p), lambda x: (), gives=are_those, elements=("float32",))
