"""kernels/onednn.py, _choice.py: products of bfloat16 and float32 against float64; who computes them."""

import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from subprocess import run

import numpy as np
import pytest

from shardrt.kernels import cpu as K
from shardrt.kernels import determinism, onednn
from shardrt.kernels.cpu import _choice
from shardrt.kernels.cpu.matmul import _by_blas, _by_onednn, matmul
from tests.kernels.bits import bits, numbers

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="oneDNN is not installed")

needs_bf16 = pytest.mark.skipif(not onednn.computes_bf16(), reason="no instructions for bfloat16 here")
kinds = pytest.mark.parametrize(
    "low", [pytest.param(True, marks=needs_bf16), False], ids=["bfloat16", "float32"]
)
SIZES = [(1, 1, 1), (1, 5, 3), (7, 1, 3), (3, 64, 1), (33, 47, 65), (128, 64, 256), (200, 300, 100)]
STEP = 2.0**-23  # of float32


def widened(x):
    """Exact."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def operands(size, turned_a, turned_b, low):
    m, k, n = size
    a, b = numbers(*((k, m) if turned_a else (m, k))), numbers(*((n, k) if turned_b else (k, n)), seed=1)
    if low:
        a, b = bits(a), bits(b)
    return a.T if turned_a else a, b.T if turned_b else b


def check(a, b, out, before, bias=None):
    """Sums of k products in float32 in any order: k roundings of at most half a step of what is added."""
    exact_a, exact_b = (np.ascontiguousarray(widened(np.ascontiguousarray(x)), np.float64) for x in (a, b))
    exact = exact_a @ exact_b + before + (0 if bias is None else bias)
    size = abs(exact_a) @ abs(exact_b) + abs(before) + (0 if bias is None else abs(bias))
    assert (abs(out - exact) <= (a.shape[1] + 2) * STEP * size).all()


@pytest.mark.parametrize("low", [True, False], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("way", [_by_onednn, _by_blas], ids=["onednn", "blas"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_agree_with_float64_within_the_rounding_of_sums(size, way, low):
    if low and way is _by_onednn and not onednn.computes_bf16():
        pytest.skip("no instructions for bfloat16 here")
    for turned_a, turned_b in product((False, True), repeat=2):
        a, b = operands(size, turned_a, turned_b, low)
        start = numbers(a.shape[0], b.shape[1], seed=2)
        bias = numbers(b.shape[1], seed=3)
        for accumulate, added in ((False, None), (True, None), (False, bias)):
            out = start.copy()
            way(a, b, added, out, accumulate)
            check(a, b, out, start if accumulate else 0 * start, added)


@needs_bf16
def test_strided_operands_and_results_are_read_and_written_where_they_lie():
    whole_a, whole_b = bits(numbers(40, 96)), bits(numbers(64, 80, seed=1))
    a, b = whole_a[4:36, 16:80], whole_b[:, 8:72]
    memory = numbers(34, 90, seed=2)
    before = memory.copy()
    out = memory[1:33, 10:74]
    onednn.product(a, b, out, accumulate=True)
    check(a, b, out, before[1:33, 10:74])
    out[...] = before[1:33, 10:74]
    np.testing.assert_array_equal(memory, before)  # nothing beside it was touched


def test_the_same_product_has_the_same_bits_each_time_and_in_each_thread():
    a, b = operands((96, 320, 160), False, True, onednn.computes_bf16())
    first = np.empty((96, 160), np.float32)
    onednn.product(a, b, first)
    both = threading.Barrier(4)

    def again(_):
        both.wait(30)
        out = np.empty_like(first)
        for _ in range(20):
            onednn.product(a, b, out)
        return out

    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(again, range(4)):
            np.testing.assert_array_equal(out, first)


def test_only_so_many_products_stay_ready(monkeypatch):
    monkeypatch.setattr(onednn, "_KEPT", 3)
    with ThreadPoolExecutor(1) as pool:  # a thread of its own has products of its own

        def several():
            for k in (2, 3, 4, 5, 2):
                a, b = operands((4, k, 4), False, False, False)
                out = np.empty((4, 4), np.float32)
                onednn.product(a, b, out)
                check(a, b, out, 0 * out)
            return len(onednn._ready.products)

        assert pool.submit(several).result() == 3


def test_errors_have_the_function_and_the_name_of_the_status():
    here = onednn.library()
    with pytest.raises(onednn.OneDNNError, match=r"dnnl_engine_create says 'invalid_arguments'"):
        here.made("dnnl_engine_create", 77, 0)
    wrong = np.empty((3, 3), np.float32)
    with pytest.raises(onednn.OneDNNError, match="dnnl_matmul_primitive_desc_create says"):
        onednn.product(bits(numbers(3, 4)), bits(numbers(5, 3)), wrong)


def test_a_library_that_does_not_load_is_told_and_counts_as_absent(monkeypatch):
    def broken(path):
        raise OSError("libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr(onednn, "Library", broken)
    with pytest.warns(UserWarning, match="installed and does not load: libgomp.*uninstall") as warned:
        monkeypatch.setattr(onednn, "library", cache(onednn.library.__wrapped__))
        assert not onednn.computes_bf16() and not onednn.computes_bf16()  # which every run asks
    assert len(warned) == 1


def test_the_number_of_threads_of_others_is_left_as_it_was():
    here = onednn.library()
    before = here._openmp.omp_get_max_threads()
    seen = here.with_threads(before + 1, here._openmp.omp_get_max_threads)
    assert (seen, here._openmp.omp_get_max_threads()) == (before + 1, before)


# -- who computes


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """An empty folder of choices, and nothing chosen yet; gives the folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _choice.forget()
    yield tmp_path / "shardrt" / "cpu" / "products"
    _choice.forget()


def measured(monkeypatch, seconds):
    """Have `seconds` by way in place of measurements; gives the list of what was asked for."""
    asked = []

    def faster(ways, rule, *product):
        asked.append(rule)
        return min(ways, key=seconds.get)

    monkeypatch.setattr(_choice, "_faster", faster)
    return asked


def compute(low, m=256):
    """Who computes a product: by what has called it."""
    a, b = operands((m, 256, 256), False, False, low)
    out = np.empty((m, 256), np.float32)
    ways = {}
    for name in ("blas", "onednn"):
        ways[name] = lambda *given, name=name: None
    matmul(a, b, out)
    return _choice.choose(ways, a, b, None, out, False)


@kinds
def test_a_choice_is_measured_once_and_kept_for_other_processes(kept, monkeypatch, low):
    asked = measured(monkeypatch, {"blas": 2.0, "onednn": 1.0})
    assert compute(low) == "onednn" and compute(low) == "onednn" and len(asked) == 1
    (file,) = kept.iterdir()
    content = json.loads(file.read_text())
    assert content["way"] == "onednn" and content["processor"] == _choice.processor()
    _choice.forget()
    asked = measured(monkeypatch, {"blas": 1.0, "onednn": 2.0})  # the other would win now
    assert compute(low) == "onednn" and not asked


def test_processes_that_measure_differently_agree(kept):
    """Four that begin together, each with measurements of its own; the first decides for all."""
    code = """if True:
        import os
        from tests.kernels.test_onednn import compute
        from shardrt.kernels.cpu import _choice
        for way in ("blas", "onednn") * 2:
            if os.fork() == 0:
                _choice._faster = lambda ways, rule, *product: way
                told = " ".join(compute(False, m) for m in (128, 160, 192, 256))
                os.write(1, f"{told}\\n".encode())
                os._exit(0)
        assert all(os.wait()[1] == 0 for _ in range(4))
    """
    environment = {**os.environ, "XDG_CACHE_HOME": str(kept.parents[2])}
    done = run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    message = done.stdout.splitlines()
    assert len(message) == 4 and len(set(message)) == 1 and len(list(kept.iterdir())) == 4


def test_sizes_that_are_about_the_same_have_one_choice(kept, monkeypatch):
    """Experts have other numbers of rows at each step, in the inner size of their weights' gradients too."""
    asked = measured(monkeypatch, {"blas": 2.0, "onednn": 1.0})
    for m in range(225, 257):
        assert compute(False, m) == "onednn"
    assert len(asked) == 1 and len(list(kept.iterdir())) == 1
    compute(False, 224)
    assert len(asked) == 2
    sizes = [m.rows for m in (_choice._about(np.empty((n, 7), np.float32)) for n in (1, 7, 9, 384, 385, 768))]
    assert sizes == [1, 7, 10, 384, 448, 768]


@kinds
def test_what_there_was_no_time_to_measure_goes_by_the_type_for_good(kept, monkeypatch, low):
    rule, other = ("onednn", "blas") if low else ("blas", "onednn")
    asked = measured(monkeypatch, {rule: 2.0, other: 1.0})
    monkeypatch.setattr(_choice, "_spent", 2 * _choice.BUDGET)
    assert compute(low) == rule and not asked
    _choice.forget()  # another process, with all the time
    assert compute(low) == rule and not asked


def test_a_damaged_file_is_measured_anew_with_a_warning(kept, monkeypatch):
    measured(monkeypatch, {"blas": 2.0, "onednn": 1.0})
    compute(False)
    (file,) = kept.iterdir()
    file.write_text(file.read_text().replace("onednn", "twodnn"))
    _choice.forget()
    with pytest.warns(UserWarning, match="damaged"):
        assert compute(False) == "onednn"
    _choice.forget()
    assert measured(monkeypatch, {"blas": 1.0, "onednn": 2.0}) == [] and compute(False) == "onednn"


@kinds
def test_without_a_folder_and_where_bits_must_not_depend_on_time_the_type_decides(
    kept, monkeypatch, tmp_path, low
):
    rule, other = ("onednn", "blas") if low else ("blas", "onednn")
    asked = measured(monkeypatch, {rule: 2.0, other: 1.0})
    determinism.use_deterministic_algorithms(True)
    assert compute(low) == rule and not asked and not kept.exists()
    determinism.use_deterministic_algorithms(False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    _choice.forget()
    assert compute(low) == rule and asked  # it measured the other, which no other process would know


def test_without_instructions_bits_are_widened_for_blas(monkeypatch):
    """oneDNN says 'unimplemented' to bfloat16 on a processor with AVX2 alone."""
    monkeypatch.setattr(onednn.Library, "computes_bf16", False)
    a, b = operands((96, 320, 160), False, True, True)
    out, expected = np.empty((2, 96, 160), np.float32)
    matmul(a, b, out)
    _by_blas(widened(a), widened(b), None, expected, False)
    np.testing.assert_array_equal(out, expected)
    qkv = bits(numbers(3, 2, 3, 20, 48))
    y, wide = np.empty((2, 2, 3, 20, 48), np.float32)
    lse = np.empty((2, 3, 20), np.float32)
    K.attention.forward(*qkv, y, lse, causal=True, scale=0.2)
    K.attention.forward(*widened(qkv), wide, lse, causal=True, scale=0.2)
    np.testing.assert_array_equal(y, wide)


def test_small_products_and_float64_stay_with_blas():
    library, out = onednn.library(), np.empty((8, 8), np.float32)
    small = numbers(8, 8)
    assert not _choice.open_to(small, small, out, library)
    large = np.zeros((512, 512))
    assert not _choice.open_to(large, large, large, library)
    assert _choice.open_to(*[large.astype(np.float32)] * 3, library)
    assert not _choice.open_to(*[large.astype(np.float32)] * 3, None)


def test_the_faster_is_found_by_turns_and_a_tie_goes_by_the_type():
    clock = iter(np.cumsum([0, 3, 0, 1] * _choice.ROUNDS).tolist())
    pause = {"blas": lambda *_: None, "onednn": lambda *_: None}
    a = b = numbers(4, 4)
    real, _choice.thread_time = _choice.thread_time, lambda: next(clock)
    try:
        assert _choice._faster(pause, "blas", 3, a, b, None, np.empty((4, 4), np.float32), False) == "onednn"
        clock = iter(np.cumsum([0, 100, 0, 97] * _choice.ROUNDS).tolist())
        assert _choice._faster(pause, "blas", 3, a, b, None, np.empty((4, 4), np.float32), False) == "blas"
    finally:
        _choice.thread_time = real
