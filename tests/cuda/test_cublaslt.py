"""The binding of cublasLt, against a stand-in in C that checks descriptors, layouts and alignment."""

import ctypes
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from shardrt.kernels.cuda._cublaslt import CublasLt, Matrix, Plan
from tests.cuda.numbers import ELEMENTS, assert_close, dtype_of, guarded, normal


class Record(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64) for name in ("products", "algorithm", "workspace", "stream", "beta_is_one")
    ]


class Stage:
    """Says that the second usable algorithm is the fastest."""

    times = (2.0, 1.0)

    def __init__(self):
        self.measured = 0

    def stream(self):
        return 77

    def workspace(self):
        return 1 << 20

    def empty(self, shape, dtype):
        memory = np.empty(np.prod(shape) * np.dtype(dtype).itemsize + 256, np.uint8)  # aligned, as on a GPU
        start = -memory.ctypes.data % 256
        return memory[start : len(memory) - 256 + start].view(dtype).reshape(shape)

    def seconds(self, work):
        work()
        self.measured += 1
        return self.times[(self.measured - 1) % 2] if self.times else None


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    file = tmp_path_factory.mktemp("fake") / "libcublasLt.so"
    source = Path(__file__).with_name("fake_cublaslt.c")
    subprocess.run(["gcc", "-O1", "-w", "-shared", "-fPIC", str(source), "-o", str(file), "-lm"], check=True)
    return ctypes.CDLL(str(file))


@pytest.fixture
def lt(library):
    return CublasLt(library, Stage())


def record(library):
    return Record.in_dll(library, "fake_record")


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


@pytest.mark.parametrize("element", ["float32", "float16", "bfloat16"])
def test_gelu_in_the_product_keeps_what_was_before_it(lt, element):
    with guarded(element) as array:
        x, weight = array(normal(5, 16)), array(normal(24, 16))
        for bias in (array(normal(24)), None, array(normal(24, seed=3))):
            inner, out = (array(np.full((5, 24), np.nan)) for _ in range(2))
            assert lt.gemm_gelu(x, weight.T, bias, inner, out)
            exact = x.astype(np.float64) @ weight.astype(np.float64).T
            exact += 0 if bias is None else bias.astype(np.float64)
            assert_close(inner, exact)
            assert_close(out, exact / (1 + np.exp(-2 * 0.7978845608028654 * (exact + 0.044715 * exact**3))))


def test_gelu_that_cublaslt_has_not_is_refused_before_anything_is_written(lt, library):
    def refused(element, columns, offset=0):
        with guarded(element) as array:
            inner, out = (array(np.full((5, columns), 7.0), offset=offset) for _ in range(2))
            x, weight = array(normal(5, 16)), array(normal(columns, 16))
            for _ in range(2):  # the second time it is known
                assert not lt.gemm_gelu(x, weight.T, None, inner, out)
            assert (inner == 7).all() and (out == 7).all()

    before = record(library).products
    refused("float64", 24)
    refused("float32", 12)
    refused("bfloat16", 24, offset=1)
    assert record(library).products == before


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


def test_the_fastest_algorithm_is_found_once_for_each_kind(lt, library):
    a, out = np.ones((4, 4), np.float32), np.zeros((4, 4), np.float32)
    stage = lt._stage
    for _ in range(3):
        lt.gemm(a, a, out, accumulate=False)
        assert record(library).algorithm == 102
    assert stage.measured == 2
    lt.gemm(a, a.T, out, accumulate=False)
    assert stage.measured == 4
    assert (out == 4).all(), "measuring wrote into the result"
    assert (record(library).stream, record(library).workspace) == (77, 1 << 20)


def test_while_nothing_can_be_measured_the_first_is_taken(library):
    stage = Stage()
    stage.times = ()
    lt = CublasLt(library, stage)
    a, out = np.ones((4, 4), np.float32), np.zeros((4, 4), np.float32)
    lt.gemm(a, a, out, accumulate=False)
    assert record(library).algorithm == 101
    stage.times = (2.0, 1.0)
    stage.measured = 0
    lt.gemm(a, a, out, accumulate=False)
    assert record(library).algorithm == 102


class Meeting(Stage):
    """As its last act before a launch a thread waits for the other one, in vain where it is not let in."""

    times = ()

    def __init__(self):
        super().__init__()
        self.both = threading.Barrier(2)

    def stream(self):
        with suppress(threading.BrokenBarrierError):
            self.both.wait(0.3)
        return super().stream()


def in_threads(function):
    """function(0) and function(1), as two ranks."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, range(2)))


@pytest.mark.parametrize("gelu", [False, True])
def test_threads_that_share_a_plan_read_their_own_bias_and_write_their_own_arrays(lt, gelu):
    """As ranks in threads do, whose layers have the same shapes."""

    def rank(number):
        x, weight, bias, inner, out = (  # equally aligned, or the plans would differ
            lt._stage.empty(shape, np.float32) for shape in ((8, 16), (24, 16), (24,), (8, 24), (8, 24))
        )
        for seed, array in enumerate((x, weight, bias), number):
            array[...] = normal(*array.shape, seed=seed)
        if gelu:
            assert lt.gemm_gelu(x, weight.T, bias, inner, out)
        else:
            lt.gemm(x, weight.T, inner, accumulate=False, bias=bias)
        assert_close(inner, x.astype(np.float64) @ weight.astype(np.float64).T + bias)

    rank(0)
    lt._stage = Meeting()
    in_threads(rank)


def test_threads_that_measure_at_once_keep_one_algorithm(library, monkeypatch):
    """Else they would differ in bits until both take what the later one has found."""
    found, used = [[2.0, 1.0], [1.0, 2.0]], []

    class Measuring(Meeting):
        """Each thread finds another algorithm to be the fastest."""

        def seconds(self, work):
            turn = self.both.wait(10) if not hasattr(here, "times") else None
            here.times = getattr(here, "times", None) or found[turn].copy()
            return here.times.pop()

    here, lt = threading.local(), CublasLt(library, Measuring())
    monkeypatch.setattr(Plan, "run", lambda plan, stage, chosen, *arrays: used.append(chosen.algorithm[0]))

    a, out = np.ones((4, 4), np.float32), np.zeros((4, 4), np.float32)
    in_threads(lambda number: lt.gemm(a, a, out, accumulate=False))
    assert len(used) == 2 and len(set(used)) == 1


def test_what_it_cannot_read_is_refused(lt):
    a = np.ones((6, 6), np.float32)
    with pytest.raises(ValueError, match="dense"):
        lt.gemm(a[::2, ::2], a[:3, :3], a[:3, :3].copy(), accumulate=False)
    with pytest.raises(ValueError, match="dense"):
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
