"""Products by group: what each group's own layer gives, in one launch where groups have few rows."""

from pathlib import Path

import numpy as np
import pytest

from shardrt.kernels.cpu import grouped as cpu
from shardrt.kernels.cuda import _launch
from shardrt.kernels.cuda import grouped as cuda
from tests.cuda.numbers import ELEMENTS, assert_close, dtype_of, guarded, normal

COUNTS = {"some": (3, 0, 1, 6), "one": (0, 0, 10, 0), "none": (0, 0, 0, 0), "all but the last": (4, 4, 4, 0)}
MANY = (35, 0, 2, 40)  # more rows than a tile


def asked(emulated, monkeypatch):
    """The products that cublasLt is asked for from now on. (No fixture: tests/gpu runs these tests, too.)"""
    found, gemm = [], emulated.gemm
    monkeypatch.setattr(emulated, "gemm", lambda *args, **how: (found.append(args), gemm(*args, **how))[1])
    return found


def compare(element, counts, inputs, outputs, offset=0, gradient=None):
    """All three beside those of the CPU in float64."""
    rows, groups = sum(counts) + 2, len(counts)
    with guarded(element) as array:
        x, dy = array(normal(rows, inputs), offset), array(normal(rows, outputs), offset)
        weight = array(normal(groups, outputs, inputs), offset)
        wide = [a.astype(np.float64) for a in (x, dy, weight)]
        y, dx = array(np.full((rows, outputs), np.nan)), array(np.full((rows, inputs), np.nan))
        expected, slopes = np.zeros((rows, outputs)), np.zeros((rows, inputs))
        cuda.forward(x, weight, counts, y)
        cpu.forward(wide[0], wide[2], counts, expected)
        assert_close(y, expected)
        cuda.backward_input(dy, weight, counts, dx)
        cpu.backward_input(wide[1], wide[2], counts, slopes)
        assert_close(dx, slopes)
        for accumulate in (False, True):
            start = normal(groups, outputs, inputs, seed=1) if accumulate else np.full(weight.shape, np.nan)
            dweight = array(start, dtype=gradient)
            total = dweight.astype(np.float64)
            cuda.backward_weight(x, dy, counts, dweight, accumulate)
            cpu.backward_weight(wide[0], wide[1], counts, total, accumulate)
            assert_close(dweight, total)


@pytest.mark.parametrize("few", [0, cuda.FEW], ids=["cublasLt", "together"])
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_products(emulated, monkeypatch, element, counts, few):
    products = asked(emulated, monkeypatch)
    monkeypatch.setattr(cuda, "FEW", few)
    compare(element, counts, 5, 7)
    assert len(products) == (0 if few else 4 * sum(count > 0 for count in counts))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(
    "inputs, outputs, offset",
    [(72, 40, 0), (40, 72, 0), (72, 40, 1), (33, 66, 0)],
    ids=["vectors", "vectors, wide", "not aligned", "odd"],
)
def test_products_of_several_tiles(emulated, monkeypatch, element, inputs, outputs, offset):
    products = asked(emulated, monkeypatch)
    compare(element, MANY, inputs, outputs, offset)
    assert not products


@pytest.mark.parametrize("element", ["float16", "bfloat16"])
@pytest.mark.parametrize("width", [16, 7])
def test_gradients_of_weights_in_float32(emulated, element, width):
    compare(element, MANY, width, width, gradient=np.float32)


def test_groups_of_few_rows_have_one_launch_and_the_others_a_product_each(emulated, monkeypatch):
    products = asked(emulated, monkeypatch)
    monkeypatch.setattr(cuda, "FEW", 2 * 8 * 8 * 3)  # three rows
    compare("float32", (3, 4, 0, 1, 9), 8, 8)
    assert emulated.launches == ["forward", "backward_input", "backward_weight", "backward_weight"]
    assert [len(a) * b.shape[1] for a, b, *_ in products] == [32, 72, 32, 72, 64, 64, 64, 64]


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
def test_the_bits_of_a_group_do_not_depend_on_the_others(emulated, element):
    """So ranks that have some of the experts compute what one with all of them would."""
    kind = dtype_of(element)
    x, dy = normal(80, 24).astype(kind), normal(80, 40).astype(kind)
    weight = normal(3, 40, 24).astype(kind)

    def of(counts, start, groups):
        rows = slice(start, start + sum(counts))
        y, dx, dweight = np.empty_like(dy[rows]), np.empty_like(x[rows]), np.empty_like(weight[groups])
        cuda.forward(x[rows], weight[groups], counts, y)
        cuda.backward_input(dy[rows], weight[groups], counts, dx)
        cuda.backward_weight(x[rows], dy[rows], counts, dweight, False)
        return [array.view(np.uint8) for array in (y, dx, dweight)]

    together = of((30, 37, 13), 0, slice(0, 3))
    apart = zip(of((30,), 0, slice(0, 1)), of((37, 13), 30, slice(1, 3)), strict=True)
    for whole, parts in zip(together, apart, strict=True):
        np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_its_tiles_are_those_of_the_source():
    source = (Path(_launch.__file__).parent / "grouped.cu").read_text()
    assert f"ROWS = {cuda._ROWS}, COLUMNS = {cuda._COLUMNS}, DEPTH" in source
    assert cuda._THREADS == cuda._ROWS * cuda._COLUMNS // 16
    assert source.count(f"__launch_bounds__({cuda._THREADS})") == 3
