"""kernels/cuda/quantise.cu on the GPU emulator: bitwise what the CPU computes."""

import numpy as np
import pytest

from shardrt.kernels import cpu
from shardrt.kernels.cuda import quantise as cuda
from shardrt.kernels.packed import packed_bytes
from tests.cuda.numbers import guarded
from tests.kernels.test_quantise import numbers


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("count", "block"), [(1, 32), (1003, 64), (2048, 256)])
def test_the_same_bits_as_on_the_cpu(emulated, bits, count, block):
    rows, nbytes = 3, packed_bytes(count, bits, block)
    given = np.stack([numbers(count, seed) for seed in range(rows)])
    if count > 1:
        given[1, 70], given[2, 3] = np.inf, np.nan
    wanted = np.zeros((rows, nbytes), np.uint8)
    with guarded("float32") as array:
        found = array(np.zeros((rows, nbytes)), dtype=np.uint8)
        for row in range(rows):
            cpu.quantise.pack(given[row], wanted[row], bits, block)
            cuda.pack(array(given[row]), found[row], bits, block)
        np.testing.assert_array_equal(found, wanted)
        each, out, error = (array(np.ones(size)) for size in (rows * count, count, count))
        cuda.unpack(found, each, bits, block)
        cuda.sum_rows(found, out, bits, block, 0.3, True)
        cuda.subtract(found[1], error, bits, block)
        others = [np.ones(size, np.float32) for size in (rows * count, count, count)]
        cpu.quantise.unpack(wanted, others[0], bits, block)
        cpu.quantise.sum_rows(wanted, others[1], bits, block, 0.3, True)
        cpu.quantise.subtract(wanted[1], others[2], bits, block)
        for one, other in zip((each, out, error), others, strict=True):
            np.testing.assert_array_equal(one, other)


def test_four_bits_compile_without_spilling():
    pytest.importorskip("cuda.pathfinder")
    from shardrt.kernels.cuda._compile import compile_with_log
    from tests.cuda.test_compile import resources

    defines = (("ELEMENT", "float"), ("CODES", "4"))
    for taken in resources(compile_with_log("quantise", defines, "sm_90")[1]).values():
        assert taken.spilled_bytes == taken.stack_bytes == 0
        assert taken.registers <= 64
