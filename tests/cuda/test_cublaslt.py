"""The binding of cublasLt, against a stand-in in C that checks descriptors, layouts and alignment."""

import numpy as np
import pytest

from shardrt.kernels.cuda._cublaslt_plan import Library, Matrix
from tests.cuda.numbers import ELEMENTS, assert_close, dtype_of, guarded, normal

pytestmark = pytest.mark.usefixtures("kept")


def operand(array, rows, columns, layout, seed):
    """A (rows, columns) matrix that lies as `layout` says."""
    if layout == "transposed":
        return array(normal(columns, rows, seed=seed)).T
    if layout == "strided":
        return array(normal(rows, columns + 3, seed=seed))[:, 1 : columns + 1]
    return array(normal(rows, columns, seed=seed))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("first", ["plain", "transposed", "strided"])
@pytest.mark.parametrize("second", ["plain", "transposed", "strided"])
@pytest.mark.parametrize("sizes", [(5, 7, 3), (1, 4, 6), (4, 1, 6), (3, 2, 1), (1, 1, 1)])
def test_products_of_every_layout(lt, element, first, second, sizes):
    m, n, k = sizes
    with guarded(element) as array:
        a, b = operand(array, m, k, first, 0), operand(array, k, n, second, 1)
        out = array(normal(m, n, seed=2))
        expected = a.astype(np.float64) @ b.astype(np.float64)
        lt.gemm(a, b, out, accumulate=False)
        assert_close(out, expected)
        lt.gemm(a, b, out, accumulate=True)
        assert_close(out, 2 * expected, 2)


@pytest.mark.parametrize("element", ["float16", "bfloat16"])
def test_a_gradient_in_float32_from_factors_of_16_bits(lt, element):
    with guarded(element) as array:
        dy, x = array(normal(9, 4)), array(normal(9, 6))
        out = array(np.ones((4, 6)), dtype=np.float32)
        lt.gemm(dy.T, x, out, accumulate=True)
        assert_close(out, 1 + dy.T.astype(np.float64) @ x.astype(np.float64))


@pytest.mark.parametrize("element", ELEMENTS)
def test_a_bias_is_added_along_the_last_axis(lt, element):
    with guarded(element) as array:
        x, weight, bias = array(normal(5, 3)), array(normal(4, 3)), array(normal(4), offset=1)
        out = array(np.full((5, 4), np.nan))
        for shift in (0, 1):  # the second time another bias goes through the same plan
            lt.gemm(x, weight.T, out, accumulate=False, bias=bias)
            exact = [values.astype(np.float64) for values in (x, weight, bias)]
            assert_close(out, exact[0] @ exact[1].T + exact[2])
            bias = array(normal(4, seed=shift + 3), offset=1)


def test_batches_with_one_that_is_repeated(lt):
    with guarded("float32") as array:
        a, b = array(normal(3, 4, 5)), np.broadcast_to(array(normal(5, 2)), (3, 5, 2))
        out = array(np.full((3, 4, 2), np.nan))
        lt.gemm(a, b, out, accumulate=False)
        assert_close(out, a.astype(np.float64) @ b.astype(np.float64))


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_alignment_is_what_the_addresses_have(lt, offset):
    """The stand-in refuses an algorithm that was promised more than it gets."""
    with guarded("bfloat16") as array:
        a, b, out = (array(normal(4, 4, seed=i), offset if i == 0 else 0) for i in range(3))
        lt.gemm(a, b, out, accumulate=False)
        assert_close(out, a.astype(np.float64) @ b.astype(np.float64))


def test_operands_of_16_bytes_alignment_and_more_share_a_plan(lt):
    for offset in (0, 8, 16, 24, 32):  # elements of bfloat16 behind 256 bytes
        with guarded("bfloat16") as array:
            a, b, out = array(normal(4, 4), offset), array(normal(4, 4, seed=1)), array(normal(4, 4, seed=2))
            lt.gemm(a, b, out, accumulate=False)
    assert len(lt._plans) == 1


def test_what_it_cannot_read_is_refused(lt):
    a = np.ones((6, 6), np.float32)
    with pytest.raises(ValueError, match="contiguous"):
        lt.gemm(a[::2, ::2], a[:3, :3], a[:3, :3].copy(), accumulate=False)
    with pytest.raises(ValueError, match="contiguous"):
        lt.gemm(a, a, np.zeros((6, 6), np.float32).T[::1, :], accumulate=False)
    with pytest.raises(RuntimeError, match=r"cublasLtMatmulAlgoGetHeuristic: invalid value \(7\)"):
        lt.gemm(a, a.astype(np.float64), a.copy(), accumulate=False)


def test_a_matrix_is_described_as_its_transpose():
    x = np.zeros((3, 8), dtype_of("bfloat16"))
    described = Matrix.of(x[:, :5])
    assert (described.transposed, described.rows, described.columns, described.leading) == (False, 5, 3, 8)
    described = Matrix.of(x[:, :5].T)
    assert (described.transposed, described.rows, described.columns, described.leading) == (True, 5, 3, 8)
    assert Matrix.of(x[::2, ::2]) is None


def test_a_kind_of_product_is_described_once(lt, monkeypatch):
    """What it costs the host: a tuple as the key, and nothing made anew."""
    a, out, bias = np.ones((4, 4), np.float32), np.zeros((4, 4), np.float32), np.ones(4, np.float32)
    for _ in range(2):
        lt.gemm(a, a, out, accumulate=False, bias=bias)
        monkeypatch.setattr(Matrix, "of", None)
        monkeypatch.setattr(Library, "call", None)
