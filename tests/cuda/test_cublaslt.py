"""The binding of cublasLt, against a stand-in in C that checks descriptors, layouts and alignment."""

import ctypes
import json
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from shardrt.kernels import determinism
from shardrt.kernels.cuda._algorithms import Kept
from shardrt.kernels.cuda._cublaslt import CublasLt
from shardrt.kernels.cuda._cublaslt_plan import Library, Matrix, NoSuchProduct, Plan
from tests.cuda.numbers import ELEMENTS, assert_close, dtype_of, guarded, normal


class Record(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64) for name in ("products", "algorithm", "workspace", "stream", "beta_is_one")
    ]


class Stage:
    """Says that one algorithm is the fastest. took: what something else, when measured, says that it took."""

    gpu = "none"

    def __init__(self, library, fastest=102):
        self.fastest, self.fake = fastest, library
        self.measured = 0

    def stream(self):
        return 77

    def workspace(self, stream):
        assert stream == 77
        return 1 << 20

    def empty(self, shape, dtype):
        memory = np.empty(np.prod(shape) * np.dtype(dtype).itemsize + 256, np.uint8)  # aligned, as on a GPU
        start = -memory.ctypes.data % 256
        return memory[start : len(memory) - 256 + start].view(dtype).reshape(shape)

    def seconds(self, work, rounds):
        self.measured += 1
        self.took = None
        work()
        if self.took is not None:
            return self.took
        return 1.0 if record(self.fake).algorithm == self.fastest else 2.0


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    file = tmp_path_factory.mktemp("fake") / "libcublasLt.so"
    source = Path(__file__).with_name("fake_cublaslt.c")
    subprocess.run(["gcc", "-O1", "-w", "-shared", "-fPIC", str(source), "-o", str(file), "-lm"], check=True)
    return ctypes.CDLL(str(file))


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """Where choices are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "shardrt" / "cuda" / "products"


@pytest.fixture
def lt(library):
    return CublasLt(library, Stage(library))


def slow(out):
    """The same by other products and kernels, which nobody takes."""


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
            assert lt.gemm_gelu(x, weight.T, bias, inner, out, slow)
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
                assert not lt.gemm_gelu(x, weight.T, None, inner, out, slow)
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
    assert stage.measured == 4, "two candidates, once and then as finalists"
    lt.gemm(a, a.T, out, accumulate=False)
    assert stage.measured == 8
    assert (out == 4).all(), "measuring wrote into the result"
    assert (record(library).stream, record(library).workspace) == (77, 1 << 20)


def test_measuring_takes_no_second_result_but_where_it_would_be_added_to(lt, monkeypatch):
    """Which CuPy's pool would keep: 3.3 GB for logits of 32,768 rows and 50,304 words."""
    taken, empty = [], lt._stage.empty
    monkeypatch.setattr(lt._stage, "empty", lambda *how: taken.append(how[0]) or empty(*how))
    a, out = empty((4, 4), np.float32), empty((4, 4), np.float32)
    a[...], out[...] = 1, np.nan
    lt.gemm(a, a, out, accumulate=False)
    assert taken == [] and (out == 4).all() and lt._stage.measured
    lt.gemm(a, a, out, accumulate=True)
    assert taken == [(4, 4)] and (out == 8).all()


def test_while_nothing_can_be_measured_the_first_is_taken(library):
    lt = CublasLt(library, Capturing(library))
    a, out = np.ones((4, 4), np.float32), np.zeros((4, 4), np.float32)
    lt.gemm(a, a, out, accumulate=False)
    assert record(library).algorithm == 101
    lt._stage = Stage(library)
    lt.gemm(a, a, out, accumulate=False)
    assert record(library).algorithm == 102


class Capturing(Stage):
    """Where nothing can be measured."""

    def seconds(self, work, rounds):
        return None


class Meeting(Capturing):
    """As its last act before a launch a thread waits for the other one, in vain where it is not let in."""

    def __init__(self, library):
        super().__init__(library)
        self.both = threading.Barrier(2)

    def workspace(self, stream):
        with suppress(threading.BrokenBarrierError):
            self.both.wait(0.3)
        return super().workspace(stream)


def in_threads(function):
    """function(0) and function(1), as two ranks."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, range(2)))


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


def test_threads_that_measure_at_once_keep_one_algorithm(library, monkeypatch):
    """Else they would differ in bits until both take what the later one has found."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")  # or they would agree by the file

    class Measuring(Stage):
        """Each thread finds another algorithm to be the fastest."""

        def seconds(self, work, rounds):
            if not hasattr(here, "fastest"):
                here.fastest = 101 + both.wait(10)
            work()
            return 1.0 if here.ran == here.fastest else 2.0

    def run(plan, stage, chosen, *places):
        here.ran = chosen[0]

    here, both, lt = threading.local(), threading.Barrier(2), CublasLt(library, Measuring(library))
    monkeypatch.setattr(Plan, "run", run)
    a, out = np.ones((4, 4), np.float32), np.zeros((4, 4), np.float32)

    def rank(number):
        lt.gemm(a, a, out, accumulate=False)
        both.wait(10)
        return here.ran

    assert len(set(in_threads(rank))) == 1


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


# -- GELU's backward and the gradient of a bias, in the product


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


# -- which algorithm it is


A, OUT = np.ones((4, 4), np.float32), np.zeros((4, 4), np.float32)


def chosen(library, stage):
    """By a process that begins."""
    CublasLt(library, stage).gemm(A, A, OUT, accumulate=False)
    assert (OUT == 4).all()
    return record(library).algorithm


def test_a_choice_holds_in_later_processes_whatever_they_would_measure(library, kept):
    assert chosen(library, Stage(library, fastest=102)) == 102
    later = Stage(library, fastest=101)
    assert chosen(library, later) == 102 and later.measured == 0
    assert len(list(kept.iterdir())) == 1, "a file for each kind, and nothing left behind"


def test_another_gpu_or_cublaslt_has_choices_of_its_own(library, monkeypatch):
    assert chosen(library, Stage(library, fastest=102)) == 102
    other = Stage(library, fastest=101)
    other.gpu = "another"
    assert chosen(library, other) == 101
    monkeypatch.setattr(Library, "version", 999)
    assert chosen(library, Stage(library, fastest=101)) == 101
    assert chosen(library, other) == 101 and other.measured == 8


def damaged(kind, file):
    found = json.loads(file.read_text())
    if kind == "cut":
        file.write_bytes(file.read_bytes()[:200])
    elif kind == "another choice":
        file.write_text(json.dumps(found | {"algorithm": found["algorithm"].replace("66", "65", 1)}))
    elif kind == "another product":
        file.write_text(json.dumps(found | {"product": "What"}))
    elif kind == "deep":
        file.write_text("[" * 4000)
    elif kind == "long":
        file.write_bytes(b" " * (1 << 20) + file.read_bytes())
    else:
        file.write_text(json.dumps(["algorithm"]))


@pytest.mark.parametrize("kind", ["cut", "another choice", "another product", "deep", "long", "a list"])
def test_a_damaged_file_is_measured_anew_with_one_warning_and_mended(library, kept, kind):
    lt = CublasLt(library, Stage(library, fastest=102))
    for b in (A, A.T):
        lt.gemm(A, b, OUT, accumulate=False)
    assert len(list(kept.iterdir())) == 2
    for file in kept.iterdir():
        damaged(kind, file)
    stage = Stage(library, fastest=101)
    with pytest.warns(UserWarning, match="damaged or of another cublasLt") as told:
        lt = CublasLt(library, stage)
        for b in (A, A, A.T, A.T):
            lt.gemm(A, b, OUT, accumulate=False)
            assert record(library).algorithm == 101
    assert len(told) == 1 and str(kept) in str(told[0].message)
    assert stage.measured == 8
    later = Stage(library, fastest=102)
    assert chosen(library, later) == 101 and later.measured == 0


def test_an_algorithm_that_cublaslt_refuses_is_not_used(library, kept):
    """A file whose sums are right, but which says what is none of this library's, or of another product."""
    chosen(library, Stage(library, fastest=102))
    (file,) = kept.iterdir()
    lt = CublasLt(library, Stage(library))
    lt.gemm(A, A, OUT, accumulate=True)
    foreign = next(json.loads(f.read_text())["algorithm"] for f in kept.iterdir() if f != file)
    product = json.loads(file.read_text())["product"]
    for text in (foreign[:16] + "0" * 112, "00" * 64, foreign[:40], "apart", "zz"):
        file.unlink()
        Kept(lambda: ("none", 131000)).write(product, text)
        with pytest.warns(UserWarning, match="damaged or of another cublasLt"):
            assert chosen(library, Stage(library, fastest=101)) == 101
        later = Stage(library, fastest=102)
        assert chosen(library, later) == 101 and later.measured == 0


def test_of_processes_that_measure_at_once_the_first_decides_for_all(kept):
    both = threading.Barrier(8)

    def write(number):
        store = Kept(lambda: ("gpu", 1))
        both.wait(10)
        return store.write("product", f"choice {number}")

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(write, range(8)))) == 1
    assert len(list(kept.iterdir())) == 1


def test_where_nothing_can_be_kept_each_process_measures(library, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for fastest in (101, 102):
        assert chosen(library, Stage(library, fastest)) == fastest


def test_deterministic_products_are_computed_by_the_first_algorithm(library, kept):
    stage = Stage(library, fastest=102)
    lt = CublasLt(library, stage)
    for deterministic, expected in ((True, 101), (False, 102), (True, 101)):
        determinism.use_deterministic_algorithms(deterministic)
        lt.gemm(A, A, OUT, accumulate=False)
        assert record(library).algorithm == expected
        assert stage.measured == (0 if not kept.exists() else 4), "nothing is measured for the first"


@pytest.fixture
def many(library):
    """Eight algorithms that can be used; 103 turns out not to."""
    proposals = ctypes.c_int.in_dll(library, "fake_proposals")
    unable = ctypes.c_int64.in_dll(library, "fake_unable")
    proposals.value, unable.value = 9, 103
    yield unable
    proposals.value, unable.value = 3, 0


@pytest.mark.usefixtures("many")
def test_all_candidates_are_measured_and_the_best_again(library, monkeypatch):
    runs = []

    class Timing(Stage):
        def seconds(self, work, rounds):
            work()
            number = record(library).algorithm
            runs.append((number, rounds))
            noise = 0.0 if rounds > 1 or number != 108 else -5.5  # 108 was lucky once
            return {105: 1.0, 108: 6.0}.get(number, 2.0 + number / 1000) + noise

    monkeypatch.setattr("shardrt.kernels.cuda._algorithms.FINALISTS", 3)
    lt = CublasLt(library, Timing(library))
    lt.gemm(A, A, OUT, accumulate=False)
    once = [number for number, rounds in runs if rounds == 1]
    assert once == [101, 102, 104, 105, 106, 107, 108], "103 says that it can't"
    assert [number for number, rounds in runs if rounds > 1] == [108, 105, 101]
    assert record(library).algorithm == 105


def test_no_algorithm_that_can(library, many):
    many.value = 101
    ctypes.c_int.in_dll(library, "fake_proposals").value = 2
    lt = CublasLt(library, Stage(library))
    with pytest.raises(NoSuchProduct, match=r"cublasLtMatmul: not supported|none of the algorithms"):
        lt.gemm(A, A, OUT, accumulate=False)
    inner, out = (lt._stage.empty((8, 24), np.float32) for _ in range(2))
    x, weight = np.ones((8, 16), np.float32), np.ones((24, 16), np.float32)
    assert not lt.gemm_gelu(x, weight.T, None, inner, out, slow)


def test_measuring_ends(library, many, monkeypatch):
    """Many shapes, as of texts that grow, or slow products must not be measured for minutes."""
    monkeypatch.setattr("shardrt.kernels.cuda._algorithms.LIMIT", 0.0)
    stage = Stage(library, fastest=102)
    lt = CublasLt(library, stage)
    lt.gemm(A, A, OUT, accumulate=False)
    assert stage.measured == 2 and record(library).algorithm == 101, "the first one alone, twice"
    monkeypatch.setattr("shardrt.kernels.cuda._algorithms.BUDGET", 0.0)
    lt.gemm(A, A.T, OUT, accumulate=False)
    assert stage.measured == 2 and record(library).algorithm == 101
    later = Stage(library, fastest=102)
    monkeypatch.setattr("shardrt.kernels.cuda._algorithms.BUDGET", 20.0)
    CublasLt(library, later).gemm(A, A.T, OUT, accumulate=False)
    assert later.measured == 0, "what was not measured is kept as well, or the next run would differ"


def test_a_kind_of_product_is_described_once(lt, monkeypatch):
    """What it costs the host: a tuple as the key, and nothing made anew."""
    bias = np.ones(4, np.float32)
    for _ in range(2):
        lt.gemm(A, A, OUT, accumulate=False, bias=bias)
        monkeypatch.setattr(Matrix, "of", None)
        monkeypatch.setattr(Library, "call", None)
