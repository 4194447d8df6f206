"""From measured calls to the figures of a machine (shardrt/simulate/machine.py).

The figures are peaks, and the part of them that each kernel reaches, over its size. Sizes are put together by
half octaves; a point is what all calls in it did in all of their seconds, because the time of a step is a sum
too. Calls that took twice their kernel's median at that size were disturbed, and are left out.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import log2
from typing import Any

from shardrt.dtypes import bfloat16

from .watched import Sample

PRODUCTS = ("linear.forward", "linear.backward_input", "linear.backward_weight", "linear.backward_parameters")
COMPUTING = (*PRODUCTS, "linear.forward_gelu", "matmul.", "grouped.", "conv2d.", "attention.")
WIDE = 128  # the smallest size of products that lose nothing by being narrow
COPY = "copy"

Curve = list[list[float]]


def device_of(samples: Iterable[Sample]) -> dict[str, Any]:
    """Peaks and kernels, as under [device]. Raises ValueError where no product or no copy is among them.

    The peak of a type is the rate of its fastest products, the bandwidth that of the fastest copies; so no
    part is above 1, but by chance. Products, and what is made of them, have parts of the flops; all others
    of the bandwidth. What was not measured has the parts of products and copies. Products of bfloat16 have
    their own parts of their own peak.
    """
    samples = list(samples)
    products = [s for s in samples if s.name in PRODUCTS and s.flops]
    copies = [s for s in samples if s.name == COPY]
    if not products or not copies:
        raise ValueError("device_of: peaks need measurements of matmuls and copies")
    peaks = {
        dtype: _fastest([s for s in products if s.dtype == dtype], "flops")
        for dtype in sorted({s.dtype for s in products})
    }
    bandwidth = _fastest(copies, "nbytes")
    groups: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        own_parts = sample.dtype == bfloat16 and sample.name.startswith(COMPUTING)
        groups[sample.name, bfloat16 if own_parts else ""].append(sample)
    products = [s for s in products if s.dtype != bfloat16] or products
    narrow = narrow_of(products, peaks)
    wide = [s for s in products if min(s.sizes) >= WIDE]
    kernels = [
        {
            "name": "",
            "flops": curve(wide or products, "flops", lambda s: peaks[s.dtype]),
            "bandwidth": curve(copies, "nbytes", lambda s: bandwidth),
        }
    ]
    for name, dtype in sorted(groups.keys() - {(COPY, "")}):
        own = groups[name, dtype]
        if name.startswith(COMPUTING):
            own = [s for s in own if name not in PRODUCTS or min(s.sizes) >= WIDE] or own
            if found := curve(own, "flops", lambda s: peaks.get(s.dtype, max(peaks.values()))):
                kernels.append({"name": name, **({"dtype": dtype} if dtype else {}), "flops": found})
                if narrow and name in (*PRODUCTS, "linear.forward_gelu"):
                    kernels[-1]["narrow"] = narrow
        elif found := curve(own, "nbytes", lambda s: bandwidth):
            kernels.append({"name": name, "bandwidth": found})
    return {"flops": {"": max(peaks.values()), **peaks}, "bandwidth": bandwidth, "kernels": kernels}


def curve(samples: Sequence[Sample], what: str, peak: Callable[[Sample], float]) -> Curve:
    """Points (size, part of the peak) in ascending order. what: "flops" or "nbytes"."""
    at: dict[int, list[Sample]] = defaultdict(list)
    for sample in undisturbed(samples):
        if size := getattr(sample, what):
            at[round(2 * log2(size))].append(sample)
    found = []
    for _, own in sorted(at.items()):
        sizes = [getattr(sample, what) for sample in own]
        least = sum(size / peak(sample) for size, sample in zip(sizes, own, strict=True))
        part = least / sum(sample.seconds for sample in own)
        found.append([_digits(statistics.fmean(sizes)), _digits(part)])
    return found


def narrow_of(products: Sequence[Sample], peaks: dict[str, float]) -> Curve:
    """The part that products with a smallest size below WIDE reach of what they would if they were wide."""
    at: dict[int, list[float]] = defaultdict(list)
    for sample in undisturbed([s for s in products if min(s.sizes) < WIDE]):
        at[round(log2(min(sample.sizes)))].append(sample.flops / sample.seconds / peaks[sample.dtype])
    found = [[2.0**place, _digits(statistics.median(parts))] for place, parts in sorted(at.items())]
    return [*found, [WIDE, 1.0]] if found else []


def undisturbed(samples: Iterable[Sample]) -> list[Sample]:
    """Without those that took twice the median of the same kernel at the same size."""
    groups: dict[Any, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.name, sample.sizes, sample.nbytes, sample.flops].append(sample)
    found = []
    for own in groups.values():
        most = 2 * statistics.median(sample.seconds for sample in own)
        found += [sample for sample in own if 0 < sample.seconds <= most]
    return found


def _fastest(samples: Sequence[Sample], what: str) -> float:
    """The best rate of any half octave."""
    return _digits(max(part for _, part in curve(samples, what, lambda _: 1.0)))


def calls_of(measured: dict[str, list[tuple[float, float]]], base: float) -> dict[str, Curve]:
    """By collective, bytes per second over bytes that a rank sends. measured: (bytes, seconds) by call.

    What is no longer than a call without bytes counts as a twentieth of it.
    """
    return {
        call: [
            [_digits(sent), _digits(sent / max(seconds - base, base / 20))] for sent, seconds in sorted(rows)
        ]
        for call, rows in measured.items()
    }


def share(alone: float, moving: float, together: float) -> float:
    """Which part of the processor a collective keeps that takes `moving` seconds beside work of `alone`."""
    return min(1.0, max(0.0, (together - max(alone, moving)) / min(alone, moving)))


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
