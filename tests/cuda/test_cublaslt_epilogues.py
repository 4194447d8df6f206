"""GELU, its backward and the gradient of a bias in the products of cublasLt, played by a stand-in in C."""

import threading
from contextlib import suppress

import numpy as np
import pytest

from shardrt.kernels.cuda._cublaslt import CublasLt
from tests.cuda.numbers import assert_close, guarded, normal
from tests.cuda.played_cublaslt import Capturing, Stage, in_threads, record, slow

pytestmark = pytest.mark.usefixtures("kept")


@pytest.mark.parametrize("element", ["float32", "float16", "bfloat16"])
def test_gelu_in_the_product_keeps_what_was_before_it(lt, element):
    with guarded(element) as array:
        x, weight = array(normal(5, 16)), array(normal(24, 16))
        for bias in (array(normal(24)), None, array(normal(24, seed=3))):
            inner, out = (array(np.full((5, 24), np.nan)) for _ in range(2))
            assert lt.gemm_gelu(x, weight.T, bias, inner, out, slow)
            exact = x.astype(np.float64) @ weight.astype(np.float64).T
            exact += 0 if bias is None else bias.astype(np.float64)
            assert_close(inner, exact)
            assert_close(out, exact / (1 + np.exp(-2 * 0.7978845608028654 * (exact + 0.044715 * exact**3))))


def slope(x):
    """Of GELU in the tanh form, by central differences in float64."""
    h = 1e-5
    low, high = (v / (1 + np.exp(-2 * 0.7978845608028654 * (v + 0.044715 * v**3))) for v in (x - h, x + h))
    return (high - low) / (2 * h)


@pytest.mark.parametrize("element", ["float32", "float16", "bfloat16"])
def test_a_gradient_goes_on_through_gelu(lt, element):
    with guarded(element) as array:
        dy, weight = array(normal(5, 16)), array(normal(16, 24))
        for seed in (2, 3):  # the second time another matrix goes through the same plan
            inner, out = array(normal(5, 24, seed=seed)), array(np.full((5, 24), np.nan))
            assert lt.gemm_gelu_backward(dy, weight, inner, out, slow)
            exact = dy.astype(np.float64) @ weight.astype(np.float64) * slope(inner.astype(np.float64))
            assert_close(out, exact)


@pytest.mark.parametrize("element", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_over_rows_beside_a_weight_gradient(lt, element, accumulate):
    with guarded(element) as array:
        dy, x = array(normal(9, 24)), array(normal(9, 16))
        out, sums = array(np.ones((24, 16)), dtype=np.float32), array(np.full(24, 5.0), dtype=np.float32)
        for more in range(2):
            assert lt.gemm_sums(dy.T, x, out, sums, accumulate=accumulate, apart=slow)
            exact = dy.T.astype(np.float64) @ x.astype(np.float64)
            assert_close(out, 1 + (more + 1) * exact if accumulate else exact)
            assert_close(sums, dy.astype(np.float64).sum(0))  # written, not added to


@pytest.mark.parametrize(
    "what",
    ["float64", "a leading dimension of 12", "no multiple of 16 bytes", "sums of 16 bits", "rows first"],
)
def test_what_cublaslt_has_not_is_refused_before_anything_is_written(lt, library, what):
    before = record(library).products
    element = what if what == "float64" else "bfloat16"
    columns, offset = 12 if "12" in what else 24, int("no multiple" in what)
    with guarded(element) as array:
        inner, out = (array(np.full((5, columns), 7.0), offset=offset) for _ in range(2))
        dy, weight = array(normal(5, 16)), array(normal(16, columns))
        dweight = array(np.full((24, 16), 7.0), dtype=np.float64 if element == "float64" else np.float32)
        kind = element if what == "sums of 16 bits" else dweight.dtype
        sums = array(np.full(24, 7.0), dtype=kind, offset=offset)
        wide = array(normal(9, 24))
        for _ in range(2):  # the second time it is known
            if what in ("float64", "a leading dimension of 12", "no multiple of 16 bytes"):
                assert not lt.gemm_gelu(dy, weight, None, inner, out, slow)
                assert not lt.gemm_gelu_backward(dy, weight, inner, out, slow)
            if what in ("no multiple of 16 bytes", "sums of 16 bits"):
                assert not lt.gemm_sums(
                    wide.T, array(normal(9, 16)), dweight, sums, accumulate=False, apart=slow
                )
            if what == "rows first":
                a = array(normal(24, 9))
                assert not lt.gemm_sums(a, array(normal(9, 16)), dweight, sums, accumulate=False, apart=slow)
        assert all((result == 7).all() for result in (inner, out, dweight, sums))
    assert record(library).products == before


def test_what_is_faster_apart_is_left_to_that(library):
    """A library whose GELU is slow must not cost what it was to save; the choice is kept as others are."""
    x, weight = normal(8, 16).astype(np.float32), normal(24, 16).astype(np.float32)
    inner, out = (Stage(library).empty((8, 24), np.float32) for _ in range(2))
    for takes, used, measured in ((0.5, False, 5), (0.5, False, 0), (3.0, False, 0)):
        stage = Stage(library)
        lt = CublasLt(library, stage)

        def apart(out, stage=stage, takes=takes):
            stage.took = takes

        assert lt.gemm_gelu(x, weight.T, None, inner, out, apart) is used
        assert stage.measured == measured


class Meeting(Capturing):
    """As its last act before a launch a thread waits for the other one, in vain where it is not let in."""

    def __init__(self, library):
        super().__init__(library)
        self.both = threading.Barrier(2)

    def workspace(self, stream):
        with suppress(threading.BrokenBarrierError):
            self.both.wait(0.3)
        return super().workspace(stream)


@pytest.mark.parametrize("kind", ["bias", "gelu", "slope", "sums"])
def test_threads_that_share_a_plan_read_their_own_bias_and_write_their_own_arrays(lt, kind):
    """As ranks in threads do, whose layers have the same shapes."""

    def rank(number):
        x, weight, bias, inner, out, dweight = (  # equally aligned, or the plans would differ
            lt._stage.empty(shape, np.float32)
            for shape in ((8, 16), (24, 16), (24,), (8, 24), (8, 24), (24, 16))
        )
        for seed, array in enumerate((x, weight, bias, inner), number):
            array[...] = normal(*array.shape, seed=seed)
        exact, before = x.astype(np.float64) @ weight.astype(np.float64).T, inner.astype(np.float64)
        if kind == "sums":
            assert lt.gemm_sums(inner.T, x, dweight, bias, accumulate=False, apart=slow)
            assert_close(bias, before.sum(0))
        elif kind == "slope":
            assert lt.gemm_gelu_backward(x, weight.T, inner, out, slow)
            assert_close(out, exact * slope(before))
        elif kind == "gelu":
            assert lt.gemm_gelu(x, weight.T, bias, inner, out, slow)
            assert_close(inner, exact + bias)
        else:
            lt.gemm(x, weight.T, inner, accumulate=False, bias=bias)
            assert_close(inner, exact + bias)

    rank(0)
    lt._stage = Meeting(lt._stage.fake)
    in_threads(rank)
