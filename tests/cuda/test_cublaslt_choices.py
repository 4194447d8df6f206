"""Which algorithm of cublasLt's computes a product: measured once, kept on disk, the same for all."""

import ctypes
import gc
import json
import threading

import numpy as np
import pytest

from shardrt.kernels import determinism
from shardrt.kernels.cuda import _cublaslt
from shardrt.kernels.cuda._algorithms import Kept
from shardrt.kernels.cuda._cublaslt import CublasLt
from shardrt.kernels.cuda._cublaslt_plan import Library, NoSuchProduct, Plan
from tests.cuda.played_cublaslt import Capturing, Stage, in_threads, record, slow

pytestmark = pytest.mark.usefixtures("kept")

A, OUT = np.ones((4, 4), np.float32), np.zeros((4, 4), np.float32)


def multiplied(lt, a=A, b=A, **how):
    """The algorithm that computed a @ b, of ones."""
    out = np.zeros((len(a), 4), np.float32)
    lt.gemm(a, b, out, accumulate=False, **how)
    assert (out == 4).all(), "measuring wrote into the result"
    return record(lt._stage.fake).algorithm


def test_the_fastest_algorithm_is_found_once_for_each_kind(lt, library):
    assert [multiplied(lt) for _ in range(3)] == [102] * 3
    assert lt._stage.measured == 4, "two candidates, once and then as finalists"
    multiplied(lt, b=A.T)
    assert lt._stage.measured == 8
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
    assert multiplied(lt) == 101
    lt._stage = Stage(library)
    assert multiplied(lt) == 102


def test_products_of_ever_new_sizes_take_the_first_and_leave_no_files(lt, library, kept):
    """Those of experts: as many as there are numbers of rows."""
    for rows in range(2, 6):
        assert multiplied(lt, np.ones((rows, 4), np.float32), varied=True) == 101
    assert lt._stage.measured == 0 and not kept.exists()
    multiplied(lt)
    assert lt._stage.measured > 0, "an ordinary one of the same size is measured"


def test_plans_of_ever_new_sizes_do_not_pile_up(lt, library, monkeypatch):
    monkeypatch.setattr(_cublaslt, "VARIED", 3)
    destroyed = ctypes.c_int64.in_dll(library, "fake_destroyed")
    gc.collect()  # or plans of other tests would go by now
    before = destroyed.value
    for rows in range(2, 12):
        multiplied(lt, np.ones((rows, 4), np.float32), varied=True)
        assert len(lt._varied) <= 3
    assert destroyed.value - before == 4 * 9, "a product and three layouts of each that is gone"


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


def chosen(library, stage):
    """By a process that begins."""
    return multiplied(CublasLt(library, stage))


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
        multiplied(lt, b=b)
    assert len(list(kept.iterdir())) == 2
    for file in kept.iterdir():
        damaged(kind, file)
    stage = Stage(library, fastest=101)
    with pytest.warns(UserWarning, match="damaged or of another cublasLt") as report:
        lt = CublasLt(library, stage)
        for b in (A, A, A.T, A.T):
            assert multiplied(lt, b=b) == 101
    assert len(report) == 1 and str(kept) in str(report[0].message)
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
        assert multiplied(lt) == expected
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
    algorithm = chosen(library, Timing(library))
    once = [number for number, rounds in runs if rounds == 1]
    assert once == [101, 102, 104, 105, 106, 107, 108], "103 says that it can't"
    assert [number for number, rounds in runs if rounds > 1] == [108, 105, 101]
    assert algorithm == 105


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
    assert multiplied(lt) == 101 and stage.measured == 2, "the first one alone, twice"
    monkeypatch.setattr("shardrt.kernels.cuda._algorithms.BUDGET", 0.0)
    assert multiplied(lt, b=A.T) == 101 and stage.measured == 2
    later = Stage(library, fastest=102)
    monkeypatch.setattr("shardrt.kernels.cuda._algorithms.BUDGET", 20.0)
    multiplied(CublasLt(library, later), b=A.T)
    assert later.measured == 0, "what was not measured is kept as well, or the next run would differ"
