"""Products of float8 by the binding of cublasLt, against the stand-in: numbers, and what is refused."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from shardrt.kernels.cuda import float8
from shardrt.kernels.cuda._cublaslt_plan import NoSuchProduct
from shardrt.kernels.cuda.float8 import E4M3, E5M2
from tests.cuda.numbers import dtype_of, guarded, normal
from tests.cuda.played_cublaslt import record
from tests.cuda.test_float8 import cast

pytestmark = pytest.mark.usefixtures("kept")


def quantised(array, x, kind):
    rowwise, _, scale = cast(array, array(x), kind)
    return rowwise, scale, rowwise.view(getattr(ml_dtypes, kind)).astype(np.float64) * np.float64(scale[0])


RESULTS = list(
    itertools.product([(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ["float32", "bfloat16", "float16"])
)


@pytest.mark.parametrize("kinds, result", RESULTS)
def test_a_product_is_that_of_what_was_rounded(emulated, lt, monkeypatch, kinds, result):
    """In float64, to the rounding of the result; and within 2**-3 or so of what was not rounded."""
    m, n, k = 48, 32, 64
    monkeypatch.setattr(emulated, "gemm_float8", lt.gemm_float8, raising=False)
    with guarded("float32") as array:
        x, y = normal(m, k), normal(n, k, seed=1)
        (a, of_a, exact_a), (b, of_b, exact_b) = (
            quantised(array, each, kind) for each, kind in zip((x, y), kinds, strict=True)
        )
        out, before = array(np.full((m, n), np.nan), dtype=dtype_of(result)), normal(m, n, seed=2)
        float8.matmul(a, b, out, kinds, (of_a, of_b), fast=True)
        assert record(lt._stage.fake).fast == 1
        expected, error = (
            exact_a @ exact_b.T,
            {"float32": 2**-23, "bfloat16": 2**-8, "float16": 2**-11}[result],
        )
        scale = np.abs(exact_a) @ np.abs(exact_b.T)
        assert (np.abs(out.astype(np.float64) - expected) <= error * scale).all()
        rounded = {E4M3: 2**-4, E5M2: 2**-3}
        away = np.abs(expected - x @ y.T)
        assert (away <= (sum(rounded[kind] for kind in kinds) + 0.02) * (np.abs(x) @ np.abs(y.T))).all()
        assert np.linalg.norm(away) <= 0.08 * np.linalg.norm(x @ y.T)
        out[...] = before
        float8.matmul(a, b, out, kinds, (of_a, of_b), accumulate=True)
        assert record(lt._stage.fake).fast == 0
        assert (
            np.abs(out.astype(np.float64) - expected - before) <= 2 * error * (scale + np.abs(before))
        ).all()


@pytest.mark.parametrize(
    "result, of_bias", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float16",) * 2]
)
def test_a_bias_is_added(lt, result, of_bias):
    with guarded("float32") as array:
        ones = array(np.full((16, 32), 0x38), dtype=np.uint8)  # 1.0
        scales = [array(np.array([each, 0.0])) for each in (0.5, 4.0)]
        bias = array(normal(16), dtype=dtype_of(of_bias))
        out = array(np.full((16, 16), np.nan), dtype=dtype_of(result))
        how = {"accumulate": False, "fast": False}
        for shift in (0, 1):  # the second time other scales and another bias go through the same plan
            lt.gemm_float8(ones, ones.T, out, (E4M3, E4M3), scales, bias=bias, **how)
            exact = 64.0 * (shift + 1) + bias.astype(np.float64)
            np.testing.assert_allclose(out.astype(np.float64), np.tile(exact, (16, 1)), rtol=2**-8)
            scales = [array(np.array([each, 0.0])) for each in (1.0, 4.0)]
            bias = array(bias[::-1].copy(), dtype=dtype_of(of_bias))


def product(array, m=16, n=16, k=32, kinds=(E4M3, E4M3), result="bfloat16", bias=None, flip=False):
    a, b = array(np.zeros((m, k)), dtype=np.uint8), array(np.zeros((n, k)), dtype=np.uint8).T
    if flip:
        b = array(np.zeros((k, n)), dtype=np.uint8)
    bias = None if bias is None else array(np.zeros(n), dtype=dtype_of(bias))
    scales = [array(np.ones(2), dtype=np.float32) for _ in range(2)]
    return (a, b, array(np.zeros((m, n)), dtype=dtype_of(result)), kinds, scales), bias


REFUSED = {
    "rows": {"m": 24},
    "columns": {"n": 40},
    "inner": {"k": 40},
    "not along the inner dimension": {"flip": True},
    "both E5M2": {"kinds": (E5M2, E5M2)},
    "float64": {"result": "float64"},
    "a bias of another type": {"bias": "float32", "result": "float32"},
    "a bias of float16": {"bias": "float16"},
}


@pytest.mark.parametrize("which", REFUSED)
def test_what_cublaslt_refuses(lt, which):
    with guarded("float32") as array:
        args, bias = product(array, **REFUSED[which])
        with pytest.raises(NoSuchProduct):
            lt.gemm_float8(*args, accumulate=False, bias=bias, fast=False)


def test_scales_are_no_part_of_a_plan(lt):
    """So one plan serves all of them."""
    with guarded("float32") as array:
        (a, b, out, kinds, scales), _ = product(array)
        a[...] = b[...] = 0x38
        lt.gemm_float8(a, b, out, kinds, scales, accumulate=False, bias=None, fast=False)
        first = float(out[0, 0])
        scales[0][0] = 3
        lt.gemm_float8(a, b, out, kinds, scales, accumulate=False, bias=None, fast=False)
        assert (first, float(out[0, 0]), len(lt._plans)) == (32, 96, 1)
