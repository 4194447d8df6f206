"""Products by group: what each group's own layer gives, in one launch where groups have few rows."""

import numpy as np
import pytest

from shardrt.kernels import cuda as kernels
from shardrt.kernels.cuda import grouped as cuda
from tests.contracts import check, run
from tests.contracts.products import grouped_calls
from tests.cuda.numbers import dtype_of, normal

PRODUCTS = ("forward", "backward_input", "backward_weight")


def asked(emulated, monkeypatch):
    """The products that cublasLt is asked for from now on. (No fixture: tests/gpu runs these tests, too.)"""
    found, gemm = [], emulated.gemm
    monkeypatch.setattr(emulated, "gemm", lambda *args, **how: (found.append(args), gemm(*args, **how))[1])
    return found


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
def test_groups_may_have_a_product_each(emulated, monkeypatch, element):
    products = asked(emulated, monkeypatch)
    monkeypatch.setattr(cuda, "FEW", 0)
    for name in PRODUCTS:
        check(kernels, f"grouped.{name}", element)
    assert products


def test_groups_of_few_rows_have_one_launch_and_the_others_a_product_each(emulated, monkeypatch):
    products = asked(emulated, monkeypatch)
    monkeypatch.setattr(cuda, "FEW", 2 * 8 * 8 * 3)  # three rows
    for name in PRODUCTS:
        for call in grouped_calls[name]((3, 4, 0, 1, 9), 8, 8):
            run(getattr(cuda, name), call, "float32")
    assert emulated.launches == ["forward", "backward_input", *["backward_weight"] * 4]
    assert [len(a) * b.shape[1] for a, b, *_ in products] == [32, 72, 32, 72, *[64] * 8]


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
