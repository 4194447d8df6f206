"""AdamW, Lion and SGD on a flat shard: bits that depend on nothing around, launches, and rounded copies."""

import numpy as np
import pytest

from shardrt.kernels import cpu, cuda
from shardrt.kernels.cpu import cast
from tests.contracts import CONTRACTS, run
from tests.contracts.optimizers import ADAMW, COUNT, PLACES, adamw, tables
from tests.cuda.numbers import assert_close, dtype_of, guarded, normal

WHOLE, RANGES = (table.values for table in tables(ADAMW))
INSIDE = np.zeros(COUNT, bool)
for _start, _stop in PLACES:
    INSIDE[_start:_stop] = True


def state():
    """param, grad, m, v."""
    _, call, *_ = adamw()
    return [getattr(arg, "values", arg) for arg in call.args[:4]]


@pytest.mark.parametrize("kernel", ["adamw", "lion", "sgd"])
@pytest.mark.parametrize("element", ["float32", "bfloat16"])
def test_vectors_and_single_elements_have_the_same_bits_in_one_launch(emulated, kernel, element):
    for call in CONTRACTS[f"{kernel}.step"]():
        if element not in call.elements:
            continue
        del emulated.launches[:]
        aligned, others = (run(getattr(cuda, kernel).step, call, element, offset) for offset in (0, 1))
        assert len(emulated.launches) == 2
        for one, other in zip(aligned, others, strict=True):
            np.testing.assert_array_equal(one, other)


def test_nothing_is_launched_for_no_ranges(emulated):
    with guarded("float32") as array:
        cuda.adamw.step(*map(array, state()), RANGES[:0])
    assert not emulated.launches


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
def test_a_range_has_the_same_bits_whatever_the_others(emulated, element):
    with guarded(element) as array:
        together, alone = ([array(values) for values in state()] for _ in range(2))
        cuda.adamw.step(*together, RANGES)
        for row in RANGES:
            cuda.adamw.step(*alone, row[None])
        for one, other in zip(together, alone, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("shift", [0, 1])
def test_the_new_weights_are_written_rounded_as_a_cast_would(emulated, kind, shift):
    """By both; outside of the ranges nothing is written."""
    with guarded("float32") as array:
        on_cuda, on_cpu = ([array(values, shift) for values in state()] for _ in range(2))
        low = array(np.zeros(COUNT), shift, dtype_of(kind))
        cuda.adamw.step(*on_cuda, RANGES, low, kind)
        widened = np.zeros(COUNT, np.float32)
        cpu.adamw.step(*on_cpu, RANGES, widened, kind)
    for param, found in ((on_cuda[0], low.astype(np.float32)), (on_cpu[0], widened)):
        expected = np.empty(COUNT, np.float32)
        cast.round_to(param, expected, kind)
        np.testing.assert_array_equal(found[INSIDE], expected[INSIDE])
        assert not found[~INSIDE].any()


@pytest.mark.parametrize("shift", [0, 1])
def test_a_first_moment_in_bfloat16_is_kept_as_on_the_cpu(emulated, shift):
    both = []
    for step in (cuda.adamw.step, cpu.adamw.step):
        with guarded("float32") as array:
            param, grad, m, v = (array(values, shift) for values in state())
            bits = np.empty(COUNT + shift, np.uint16)[shift:]
            cast.pack(np.ascontiguousarray(m), bits, "bfloat16")
            step(param, grad, bits, v, RANGES)
        both.append((param, v, (bits.astype(np.uint32) << 16).view(np.float32)))
    for found, expected in zip(both[0][:2], both[1][:2], strict=True):
        assert_close(found, expected.astype(np.float64))
    np.testing.assert_allclose(both[0][2], both[1][2], rtol=2**-7)  # a sum that ends elsewhere may round on


def test_the_first_step_reads_no_momentum(emulated):
    with guarded("float32") as array:
        param, grad, momentum = array(normal(130)), array(normal(130)), array(np.full(130, np.nan))
        cuda.sgd.step(param, grad, momentum, np.array([[0, 130, 0.1, 0.0, 0.0, 1.0]]), 0.9, False)
        np.testing.assert_array_equal(momentum, grad)
        assert np.isfinite(param).all()
