"""Attention by cuDNN: what its graphs are told and given, and when the reference kernels stay."""

import configparser
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from packaging.requirements import Requirement

from shardrt import Tensor, device
from shardrt import functional as F
from shardrt.comm import init_device_mesh, thread, world
from shardrt.functional.context import context_attention
from shardrt.kernels.cuda import _cudnn_attention, _cudnn_documents, _launch, attention
from shardrt.kernels.cuda._cudnn import CuDNN
from shardrt.kernels.cuda._cudnn_attention import CuDNNAttention
from shardrt.kernels.determinism import use_deterministic_algorithms
from tests.contracts.attention import attention as attention_of
from tests.contracts.attention import gradients as gradients_of
from tests.contracts.attention import heads_of
from tests.cuda import fake_cudnn
from tests.cuda.numbers import assert_close, guarded, in_double, normal
from tests.softgpu.cuda import Work


@pytest.fixture
def cudnn(emulated):
    """The stand-in; the emulator uses it."""
    return played(emulated)


def played(emulated, **versions):
    module = fake_cudnn.module(**versions)
    emulated.stream, emulated.architecture = lambda: module.stream, module.architecture
    fused = CuDNNAttention(CuDNN(module, emulated))
    emulated.attention = lambda: fused
    return module


@contextmanager
def packed(element, batch=2, heads=3, time=9, width=16, kv_heads=None):
    """q, k, v in one array, y in another, lse, dy and the gradients in one array; all outputs poisoned."""
    kv_heads = kv_heads or heads
    with guarded(element) as array:

        def split(values):
            x = array(values).reshape(batch, time, heads + 2 * kv_heads, width).transpose(0, 2, 1, 3)
            return x[:, :heads], x[:, heads:-kv_heads], x[:, -kv_heads:]

        shapes = [(batch, time, count * width) for count in (heads + 2 * kv_heads, heads)]
        (y,) = heads_of(array(np.full(shapes[1], np.nan)), 1, heads)
        (dy,) = heads_of(array(normal(*shapes[1], seed=1)), 1, heads)
        lse = array(np.full((batch, heads, time), np.nan), dtype=np.float32)
        yield *split(normal(*shapes[0])), y, lse, dy, split(np.full(shapes[0], np.nan))


def run(q, k, v, y, lse, dy, gradients, starts=None, **how):
    how = {"causal": True, "scale": 0.1} | ({} if starts is None else {"starts": starts}) | how
    attention.forward(q, k, v, y, lse, **how)
    attention.backward(dy, q, k, v, y, lse, *gradients, **how)


def exact(q, k, v, dy=None, y=None, lse=None, **how):
    """y and lse in float64; with dy the gradients too, from y and lse as they are given."""
    how = {"causal": True, "scale": 0.1} | how
    q, k, v = in_double(q, k, v)
    found = attention_of(q, k, v, **how)
    if dy is None:
        return found
    return *found, *gradients_of(*in_double(dy), q, k, v, *(found if y is None else in_double(y, lse)), **how)


def assert_exact(q, k, v, y, lse, dy, gradients, starts=None, factor=1, **how):
    expected = exact(q, k, v, dy, y, lse, starts=starts, **how)
    for found, exactly in zip((y, lse, *gradients), expected, strict=True):
        assert_close(found, exactly, factor)


@pytest.mark.parametrize("element", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_heads_are_read_and_written_where_they_lie(cudnn, emulated, element, causal):
    with packed(element) as arrays:
        run(*arrays, causal=causal)
        assert_exact(*arrays, causal=causal)
        assert emulated.launches == []


def test_keys_may_have_another_time_and_fewer_heads(cudnn, emulated):
    with guarded("bfloat16") as array:
        q, dy = (array(normal(1, 2, 5, 8, seed=seed)) for seed in (0, 1))
        k, v = (array(normal(1, 1, 12, 8, seed=seed)) for seed in (2, 3))
        y, lse = array(np.full(q.shape, np.nan)), array(np.full(q.shape[:3], np.nan), dtype=np.float32)
        gradients = [array(np.full(x.shape, np.nan)) for x in (q, k, v)]
        run(q, k, v, y, lse, dy, gradients, causal=False)
        assert_exact(q, k, v, y, lse, dy, gradients, causal=False)
        assert len(cudnn.graphs) == 2 and emulated.launches == []


@pytest.mark.parametrize("heads", [1, 2])
def test_queries_may_go_in_groups(cudnn, emulated, heads):
    """Six heads of q share one head of k and v, or two do."""
    with packed("bfloat16", heads=6, time=7, kv_heads=heads) as arrays:
        run(*arrays)
        assert_exact(*arrays)
        assert cudnn.graphs[0].tensors[1].dim == [2, heads, 7, 16] and emulated.launches == []


def test_heads_that_make_no_whole_groups_are_left_to_others(cudnn, emulated):
    with guarded("bfloat16") as array:
        q, y = (array(normal(1, 6, 3, 8)) for _ in range(2))
        k, lse = array(normal(1, 4, 3, 8)), array(np.zeros((1, 6, 3)), dtype=np.float32)
        assert not emulated.attention().forward(q, k, k, y, lse, causal=True, scale=1.0)
        assert cudnn.graphs == []


def test_a_graph_is_built_once_for_each_kind_of_attention(cudnn):
    for _ in range(3):
        with packed("bfloat16") as arrays:
            run(*arrays)
    assert [(graph.kind, graph.runs) for graph in cudnn.graphs] == [("forward", 3), ("backward", 3)]
    others = [{"causal": False}, {"scale": 0.5}]
    for how in others:
        with packed("bfloat16") as arrays:
            run(*arrays, **how)
    for shape in ({"time": 10}, {"width": 32}):
        with packed("bfloat16", **shape) as arrays:
            run(*arrays)
    with packed("float16") as arrays:
        run(*arrays)
    with packed("bfloat16") as (q, k, v, *rest):
        run(q, k.copy(), v, *rest)  # other strides
    assert len(cudnn.graphs) == 2 * (1 + len(others) + 2 + 1 + 1)


def test_each_stream_has_a_handle(cudnn):
    with packed("bfloat16") as arrays:
        for cudnn.stream in (7, 8, 7):
            run(*arrays)
        assert sorted(cudnn.handles.values()) == [7, 8]
        assert len(cudnn.graphs) == 2


def test_threads_that_share_a_graph_run_it_one_after_the_other(cudnn, monkeypatch):
    """As ranks in threads; cuDNN does not say that they may run it at once."""
    execute, both, met = fake_cudnn.Graph.execute, threading.Barrier(2), []

    def wait_for_the_other(graph, *args, **kwargs):
        with suppress(threading.BrokenBarrierError):
            met.append(both.wait(0.3))
        execute(graph, *args, **kwargs)

    with packed("bfloat16") as (q, k, v, y, lse, *_), ThreadPoolExecutor(2) as pool:
        attention.forward(q, k, v, y, lse, causal=True, scale=0.3)
        monkeypatch.setattr(fake_cudnn.Graph, "execute", wait_for_the_other)
        for _ in pool.map(lambda _: attention.forward(q, k, v, y, lse, causal=True, scale=0.3), range(2)):
            pass
    assert not met and cudnn.graphs[0].runs == 3


def test_a_workspace_is_taken_anew_for_each_call(cudnn, emulated, monkeypatch):
    """One that was kept and outgrown would be missing in captured graphs."""
    taken, empty = [], emulated.empty
    monkeypatch.setattr(emulated, "empty", lambda *how: taken.append(how) or empty(*how))
    for cudnn.workspace in (1000, 5000, 0):
        with packed("bfloat16") as arrays:
            run(*arrays)
    assert taken == [((size,), np.uint8) for size in (1000, 1000, 5000, 5000, 1, 1)]


@pytest.mark.parametrize(
    "unfit",
    [
        {"element": "float32"},
        {"element": "bfloat16", "width": 12},
        {"element": "bfloat16", "width": 136, "time": 3, "heads": 1},
    ],
    ids=str,
)
def test_what_does_not_suit_runs_by_the_reference_kernels(cudnn, emulated, unfit):
    with packed(**unfit) as arrays:
        run(*arrays)
    assert cudnn.graphs == [] and "forward" in emulated.launches and "backward_keys" in emulated.launches


def test_what_does_not_begin_at_16_bytes_runs_by_the_reference_kernels(cudnn, emulated):
    with guarded("bfloat16") as array:
        q, k, v, y = (array(normal(1, 1, 3, 8), offset) for offset in (0, 1, 0, 0))
        attention.forward(q, k, v, y, array(np.zeros((1, 1, 3)), dtype=np.float32), causal=True, scale=1.0)
        wide = array(normal(1, 1, 3, 12))[..., :8]  # rows of 24 bytes
        attention.forward(wide, q, q, y, array(np.zeros((1, 1, 3)), dtype=np.float32), causal=True, scale=1.0)
    assert cudnn.graphs == [] and emulated.launches == ["forward"] * 2


def test_what_cudnn_refuses_runs_by_the_reference_kernels_and_is_said_once(cudnn, emulated):
    cudnn.refuses = lambda graph: True
    with packed("bfloat16") as arrays:
        with pytest.warns(UserWarning, match=r"cuDNN refuses q \(2, 3, 9, 16\), .* of bfloat16; slower"):
            run(*arrays)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(*arrays)
        assert len(cudnn.graphs) == 2
        assert_close(arrays[3], exact(*arrays[:3])[0], 2)


def test_backward_is_deterministic_only_where_it_is_asked_for(cudnn):
    with packed("bfloat16") as arrays:
        for mode in (False, True, False):
            use_deterministic_algorithms(mode)
            run(*arrays)
    assert [(graph.kind, getattr(graph, "deterministic", None), graph.runs) for graph in cudnn.graphs] == [
        ("forward", None, 3),
        ("backward", False, 2),
        ("backward", True, 1),
    ]


@pytest.mark.parametrize("limit, parts", [(2 * 8 * 144, 1), (2 * 4 * 144, 2), (2 * 2 * 144, 4)])
def test_deterministic_backward_goes_in_parts_that_bound_its_memory(
    cudnn, emulated, monkeypatch, limit, parts
):
    """2 samples of 4 heads, 2 of them with one of k: whole, by samples, and by heads of k."""
    monkeypatch.setattr(_cudnn_attention, "_WORKSPACE", limit)
    cudnn.workspace = 1
    use_deterministic_algorithms(True)
    taken, empty = [], emulated.empty
    monkeypatch.setattr(emulated, "empty", lambda *how: taken.append(how[0][0]) or empty(*how))
    with packed("bfloat16", heads=4, time=12, kv_heads=2) as (*arrays, made):
        run(*arrays, made)
        assert taken == [1] + parts * [limit] and emulated.launches == []
        fixed = [x.copy() for x in made]
        use_deterministic_algorithms(False)
        run(*arrays, made)
        for found, expected in zip(fixed, made, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_deterministic_backward_that_does_not_fit_even_by_heads_runs_by_the_reference_kernels(
    cudnn, emulated, monkeypatch
):
    monkeypatch.setattr(_cudnn_attention, "_WORKSPACE", 287)
    use_deterministic_algorithms(True)
    with packed("bfloat16", time=12) as arrays:
        with pytest.warns(
            UserWarning, match=r"deterministic attention of \(1, 1, 12, 16\) would take 288 bytes"
        ):
            run(*arrays)
    assert "backward_keys" in emulated.launches


@pytest.mark.parametrize(
    "queries, keys, causal, architecture, refused",
    [
        (5, 64, False, "sm_90", True),
        (5, 192, False, "sm_90", True),
        (200, 192, True, "sm_90", True),  # the last queries see all keys, and what is beyond them
        (1, 128, False, "sm_90", True),
        (192, 192, True, "sm_90", False),
        (5, 128, False, "sm_90", False),
        (5, 100, False, "sm_90", False),
        (5, 64, False, "sm_80", False),
        (5, 64, False, "sm_100", False),
    ],
)
def test_lengths_for_which_cudnn_gives_nan_are_left_to_others(
    cudnn, emulated, queries, keys, causal, architecture, refused
):
    emulated.architecture = architecture
    with guarded("bfloat16") as array:
        q, k = array(np.zeros((1, 1, queries, 8))), array(np.zeros((1, 1, keys, 8)))
        lse, dq, dk = array(np.zeros((1, 1, queries)), dtype=np.float32), array(q), array(k)
        arrays = q, q, k, k, q, lse, dq, dk, array(k)
        with warnings.catch_warnings(record=True) as report:
            warnings.simplefilter("always")
            for _ in range(2):
                done = emulated.attention().backward(*arrays, causal=causal, scale=1.0)
                assert done is not refused
    assert len(report) == refused and len(cudnn.graphs) == (not refused)


@pytest.mark.parametrize("queries, keys", [(5, 64), (1, 100)])
def test_rows_far_below_have_finite_gradients_where_cudnn_gives_nan(cudnn, emulated, queries, keys):
    """Each product is -128, so that lse is below -88."""
    with guarded("bfloat16") as array, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q, k = array(np.full((1, 1, queries, 8), 4.0)), array(np.full((1, 1, keys, 8), -4.0))
        v, y = array(normal(*k.shape)), array(np.full(q.shape, np.nan))
        dy, lse = array(normal(*q.shape, seed=1)), array(np.full(q.shape[:3], np.nan), dtype=np.float32)
        gradients = [array(np.full(x.shape, np.nan)) for x in (q, k, v)]
        run(q, k, v, y, lse, dy, gradients, causal=False, scale=1.0)
        assert lse.max() < -89 and all(np.isfinite(x.astype(np.float32)).all() for x in gradients)


@pytest.mark.parametrize("window", [1, 4, 8])
def test_a_window_is_a_left_bound(cudnn, emulated, window):
    with packed("bfloat16", heads=4, kv_heads=2) as arrays:
        run(*arrays, window=window)
        assert_exact(*arrays, window=window)
        assert len(cudnn.graphs) == 2 and emulated.launches == []
        run(*arrays, window=None)
        assert len(cudnn.graphs) == 4, "a window has a graph of its own"


def test_a_version_without_windows_leaves_them_to_the_reference_kernels(emulated):
    module = played(emulated, backend=90102)
    with packed("bfloat16") as arrays, warnings.catch_warnings():
        warnings.simplefilter("error")
        run(*arrays, window=4)
        assert_exact(*arrays, window=4, factor=2)
        assert module.graphs == [] and "forward" in emulated.launches
        run(*arrays)
        assert len(module.graphs) == 2


@contextmanager
def chunks_of(element, offsets, batch=2, heads=4, kv_heads=2, each=26, keys=104, width=64):
    """Queries in one array with dy and y, keys and values in another; as context parallelism has them."""
    time = each * len(offsets)
    with guarded(element) as array:
        (q,) = heads_of(array(normal(batch, time, heads * width)), 1, heads)
        (dy,) = heads_of(array(normal(batch, time, heads * width, seed=1)), 1, heads)
        k, v = array(normal(2, batch, kv_heads, keys, width))
        y, dq = (heads_of(array(np.full((batch, time, heads * width), np.nan)), 1, heads)[0] for _ in "yq")
        dk, dv = array(np.full((2, *k.shape), np.nan))
        lse = array(np.full((batch, heads, time), np.nan), dtype=np.float32)
        yield q, k, v, y, lse, dy, (dq, dk, dv)


@pytest.mark.parametrize("offsets, width", [((0, 78), 64), ((26, 52), 128), ((39,), 64)], ids=str)
def test_chunks_of_queries_at_their_places_among_the_keys(cudnn, emulated, offsets, width):
    """A call for each chunk; what it gives is as near to float64 as what our own kernels give."""
    with chunks_of("bfloat16", offsets, width=width) as arrays:
        run(*arrays, offsets=offsets)
        assert sum(graph.runs for graph in cudnn.graphs) == 2 * len(offsets)
        assert emulated.launches == ["complete"]
        assert_exact(*arrays, offsets=offsets)
        *_, y, lse, _, gradients = arrays
        found = [x.copy() for x in (y, lse, *gradients)]
        emulated.attention = lambda: None
        run(*arrays, offsets=offsets)
        assert_exact(*arrays, factor=2, offsets=offsets)
        for one, other in zip(found, (y, lse, *gradients), strict=True):
            assert_close(one, other.astype(np.float64), 2)


@pytest.mark.parametrize(
    "element, offsets, shape",
    [
        ("float32", (0, 78), {}),
        ("bfloat16", (0, 78), {"width": 12}),
        ("bfloat16", (0, 1), {"each": 1}),  # one query and one key, which cuDNN's backward refuses
    ],
    ids=str,
)
def test_chunks_that_do_not_suit_run_by_the_reference_kernels(cudnn, emulated, element, offsets, shape):
    with chunks_of(element, offsets, **{"width": 16} | shape) as (*arrays, gradients):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(*arrays, gradients, offsets=offsets)
        assert emulated.launches[-3:] == ["dots", "backward_queries", "backward_keys"]
        q, k, v, y, lse, dy = arrays
        expected = exact(q, k, v, dy, y, lse, offsets=offsets)
        for found, exactly in zip(gradients[1:], expected[3:], strict=True):
            assert_close(found, exactly, 4)


@pytest.mark.parametrize("backend, fits", [(90500, False), (90600, True), (91000, False), (91900, True)])
def test_versions_that_refuse_such_a_mask_leave_chunks_to_the_reference_kernels(emulated, backend, fits):
    """Before 9.6 lengths must be multiples of 64; 9.10.0 has no attention."""
    played(emulated, backend=backend)
    with chunks_of("bfloat16", (26, 52), width=16) as (q, k, v, y, lse, *_), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attention.forward(q, k, v, y, lse, causal=True, scale=0.1, offsets=(26, 52))
    assert (emulated.launches == []) is fits


@contextmanager
def documents_of(element, lengths, width=64):
    """As `packed`, then where documents begin: in the first row of these lengths, in the second is one."""
    starts = np.zeros((2, sum(lengths)), np.int64)
    starts[0] = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    with packed(element, 2, 4, sum(lengths), width, kv_heads=2) as arrays:
        yield *arrays, starts


REFERENCE = ["forward", "dots", "backward_queries", "backward_keys"]


@pytest.mark.parametrize("lengths, width", [((69, 1), 64), ((70,), 128), ((130, 33, 1, 40), 64)], ids=str)
def test_documents_are_sequences_of_cudnn(cudnn, emulated, lengths, width):
    """Our own kernels find that all was done; what they would give is as near to float64."""
    with documents_of("bfloat16", lengths, width=width) as arrays:
        run(*arrays)
        y, lse, gradients = arrays[3], arrays[4], arrays[6]
        assert [(graph.kind, graph.runs) for graph in cudnn.graphs] == [("forward", 1), ("backward", 1)]
        assert cudnn.graphs[1].bounded == (2 * sum(lengths),) * 2
        assert emulated.launches == ["documents", *REFERENCE[:1], "documents", *REFERENCE[1:]]
        assert_exact(*arrays)
        found = [x.copy() for x in (y, lse, *gradients)]
        emulated.attention = lambda: None
        run(*arrays)
        for one, other in zip(found, (y, lse, *gradients), strict=True):
            assert_close(one, other.astype(np.float64), 2)
            assert one.tobytes() != other.tobytes()  # so they were not what our own kernels had given


@pytest.mark.parametrize("lengths, sequences", [((8,) * 5, 6), ((8,) * 4 + (4, 4), 0)])
def test_more_documents_than_a_plan_is_for_are_left_to_the_reference_kernels(
    cudnn, emulated, monkeypatch, lengths, sequences
):
    """The GPU alone knows how many there are: cuDNN then has no sequence. A plan for 2 + 80 / 20."""
    monkeypatch.setattr(_cudnn_documents, "MEAN", 20)
    runs, run_one = [], fake_cudnn.Graph._run
    monkeypatch.setattr(fake_cudnn.Graph, "_run", lambda self, *how: runs.append(self) or run_one(self, *how))
    with documents_of("bfloat16", lengths, width=16) as arrays:
        run(*arrays)
        assert_exact(*arrays, factor=2)
    assert len(runs) == 2 * sequences


def test_a_plan_for_documents_is_made_once_for_all_lengths_of_documents(cudnn):
    for lengths in ((40,), (1, 39), (20, 3, 17)):
        with documents_of("bfloat16", lengths, width=16) as arrays:
            run(*arrays)
    assert [(graph.kind, graph.runs) for graph in cudnn.graphs] == [("forward", 3), ("backward", 3)]


@pytest.mark.parametrize(
    "how, versions",
    [
        ({"element": "float32"}, {}),
        ({"width": 8}, {}),
        ({}, {"architecture": "sm_80"}),
        ({}, {"architecture": "sm_120"}),
        ({}, {"backend": 90500}),
    ],
    ids=str,
)
def test_documents_that_do_not_suit_run_by_the_reference_kernels(emulated, how, versions):
    module = played(emulated, **versions)
    with documents_of(**{"element": "bfloat16", "lengths": (30, 10), "width": 16} | how) as arrays:
        run(*arrays)
        assert_exact(*arrays, factor=2)
    assert module.graphs == [] and emulated.launches == REFERENCE


def test_documents_of_which_cudnn_has_no_plan_run_by_the_reference_kernels(cudnn, emulated):
    cudnn.refuses = lambda graph: True
    with documents_of("bfloat16", (30, 10), width=16) as arrays:
        with pytest.warns(UserWarning, match=r"cuDNN refuses documents of \(2, 4, 40, 16\) of bfloat16"):
            run(*arrays)
        assert_exact(*arrays, factor=2)


def test_rows_of_documents_that_lie_apart_run_by_the_reference_kernels(cudnn, emulated):
    """Tokens of the second row do not follow those of the first evenly."""
    with documents_of("bfloat16", (30, 10), width=16) as (q, k, v, y, lse, dy, gradients, starts):
        apart = np.zeros((2, 41, 4, 16), q.dtype).transpose(0, 2, 1, 3)[:, :, :40]
        attention.forward(q, k, v, apart, lse, causal=True, scale=0.1, starts=starts)
    assert cudnn.graphs == [] and emulated.launches == ["forward"]


def test_deterministic_attention_of_documents_is_that_of_the_reference_kernels(cudnn, emulated):
    """Else the number of documents in one row would decide which kernels compute another."""
    use_deterministic_algorithms(True)
    with documents_of("bfloat16", (30, 10), width=16) as arrays:
        run(*arrays)
        assert_exact(*arrays, factor=2)
    assert cudnn.graphs == [] and emulated.launches == REFERENCE


VERSIONS = {  # frontend, cuDNN -> whether attention's backward can be built, as tried with the real ones
    ("1.22.0", 91900): True,
    ("1.22.0", 91200): True,
    ("1.23.0", 91900): True,
    ("1.24.0", 91200): False,
    ("1.24.0", 91900): False,
    ("1.24.1", 91900): False,
    ("1.25.0", 91900): False,
    ("1.26.0", 91701): False,
    ("1.26.0", 92101): False,
    ("1.24.0", 92200): True,
    ("1.26.0", 92200): True,
    ("1.27.0", 91900): True,
    ("1.28.0", 91900): True,
}


@pytest.mark.parametrize("frontend, backend", VERSIONS)
def test_versions_that_can_not_build_backward_leave_it_to_others_and_say_so_once(emulated, frontend, backend):
    """Forward stays cuDNN's; nothing is tried in vain for each shape."""
    cudnn, builds = played(emulated, frontend=frontend, backend=backend), VERSIONS[frontend, backend]
    with warnings.catch_warnings(record=True) as report:
        warnings.simplefilter("always")
        for time in (9, 10):
            with packed("bfloat16", heads=1, batch=1, time=time) as arrays:
                run(*arrays)
                assert_exact(*arrays)
    kinds = [graph.kind for graph in cudnn.graphs if graph.runs]
    assert kinds == (["forward", "backward"] if builds else ["forward"]) * 2 and len(kinds) == len(
        cudnn.graphs
    )
    assert ("backward_keys" in emulated.launches) is not builds
    assert len(report) == (not builds)
    for each in report:
        assert f"frontend {frontend} can't build" in str(each.message) and "slower" in str(each.message)


def test_the_extra_takes_the_versions_that_can_build_backward_on_every_cudnn():
    config = configparser.ConfigParser()
    config.read(Path(__file__).parents[2] / "setup.cfg")
    wanted = Requirement(config["options.extras_require"]["cudnn"].strip()).specifier
    for frontend in {frontend for frontend, _ in VERSIONS}:
        builds = all(fine for (other, _), fine in VERSIONS.items() if other == frontend)
        assert (frontend in wanted) is builds, frontend


@pytest.mark.parametrize(
    "frontend, backend, architecture, bytes_taken",
    [("1.28.0", 91900, "sm_90", 2 * 9 * 9), ("1.28.0", 92501, "sm_90", 5), ("1.28.0", 91900, "sm_80", 5)],
)
def test_a_fixed_order_takes_memory_for_the_weights_only_where_cudnn_writes_them(
    emulated, monkeypatch, frontend, backend, architecture, bytes_taken
):
    """What is asked for is the plan's, so a later cuDNN costs nothing, and no part of it is split."""
    cudnn = played(emulated, frontend=frontend, backend=backend, architecture=architecture)
    cudnn.workspace = 5
    use_deterministic_algorithms(True)
    taken, empty = [], emulated.empty
    monkeypatch.setattr(emulated, "empty", lambda *how: taken.append(how[0][0]) or empty(*how))
    with packed("bfloat16", heads=1, batch=1) as arrays:
        run(*arrays)
    assert taken == [5, bytes_taken]


@pytest.fixture
def backend(software, gpu, without_cudnn, monkeypatch):
    """A backend on the GPU emulator, where graphs run late; it finds the stand-in."""

    def issue(stream, work):
        software.issue("cudnn", stream, Work(work))

    monkeypatch.setitem(sys.modules, "cudnn", fake_cudnn.module(issue))
    (real,) = without_cudnn.__bases__  # which may have cuDNN
    made = real()
    before = _launch.use(made)
    yield made
    _launch.use(before)


def test_without_the_extra_there_is_only_the_reference(backend, monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.warns(UserWarning, match="no nvidia-cudnn-frontend, so slower kernels do"):
        assert backend.attention() is None
    assert backend.convolution() is None


def test_without_the_library_there_is_only_the_reference_and_a_warning(backend, monkeypatch):
    def create_handle():
        raise RuntimeError("Unable to find symbol cudnnCreate")

    monkeypatch.setattr(sys.modules["cudnn"], "create_handle", create_handle)
    with pytest.warns(UserWarning, match="cuDNN is not available, so slower kernels .*cudnnCreate"):
        assert backend.attention() is None
    assert backend.attention() is None and backend.convolution() is None


def test_each_gpu_has_handles_and_graphs_of_its_own(software, without_cudnn, monkeypatch):
    def issue(stream, work):
        software.issue("cudnn", stream, Work(work))

    played = fake_cudnn.module(issue, device=software.getDevice)
    monkeypatch.setitem(sys.modules, "cudnn", played)
    monkeypatch.setattr("shardrt.kernels.cuda._cupy.CuPyBackend", *without_cudnn.__bases__)
    monkeypatch.setattr(_launch, "_of_gpus", {})

    def rank():
        with device.use(device.get(f"cuda:{world.current().rank}")) as here, packed("bfloat16") as arrays:
            q, k, v, y, lse = (here.asarray(np.ascontiguousarray(x)) for x in arrays[:5])
            attention.forward(q, k, v, y, lse, causal=True, scale=0.3)
            return here.to_numpy(y).astype(np.float32)

    first, second = thread.run(2, rank)
    np.testing.assert_array_equal(first, second)
    assert sorted(played.owners.values()) == [0, 1] == sorted(graph.device for graph in played.graphs)


ON_THE_DEVICE = {  # arrays, more of a call, graphs that run
    "heads": (partial(packed, heads=4, kv_heads=2), {}, 2),
    "chunks": (partial(chunks_of, offsets=(26, 52)), {"offsets": (26, 52)}, 4),
    "documents": (partial(documents_of, lengths=(30, 10, 12)), {}, 2),
}


@pytest.mark.parametrize("kind", ON_THE_DEVICE)
def test_on_the_device_it_runs_in_the_current_stream_and_waits_for_nobody(gpu, backend, kind):
    """Late, after what the stream has before it, on arrays of CuPy; the host reads nothing in between."""
    side, given = gpu.new_stream("side"), gpu.new_event()
    made, how, runs = ON_THE_DEVICE[kind]
    with made("bfloat16") as (q, k, v, y, lse, dy, gradients, *starts):
        how = how | ({"starts": starts[0]} if starts else {})
        expected = exact(q, k, v, dy, **how)
        rows = [gpu.asarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, y, dy, gradients[0])]
        if kind != "chunks":  # side by side in one array
            packed = [np.concatenate(x, axis=1).transpose(0, 2, 1, 3) for x in ((q, k, v), gradients)]
            whole = [gpu.asarray(np.ascontiguousarray(x)).transpose(0, 2, 1, 3) for x in packed]
            (q, k, v), gradients = ((x[:, :4], x[:, 4:6], x[:, 6:]) for x in whole)
            how |= {"starts": gpu.asarray(starts[0])} if starts else {}
        else:
            q, (k, v) = rows[0], map(gpu.asarray, (k, v))
            gradients = rows[3], *map(gpu.asarray, gradients[1:])
        y, dy, lse = rows[1], rows[2], gpu.asarray(lse)
        gpu.current_stream.record(given)
        side.wait(given)
        side.submit(lambda: run(q, k, v, y, lse, dy, gradients, **how))
        side.synchronize()
        for found, exactly in zip((y, lse, *gradients), expected, strict=True):
            assert_close(gpu.to_numpy(found), exactly, 2)
    assert list(sys.modules["cudnn"].handles.values()) == [side.handle.ptr]
    assert sum(graph.runs for graph in sys.modules["cudnn"].graphs) == runs
    assert backend.attention() is backend.attention()


def test_layers_give_documents_as_cudnn_takes_them(gpu, backend):
    """Queries, keys, values and their gradients in one array each, and dy as a linear layer gives it."""
    qkv, weight = normal(2, 40, 8 * 16), normal(64, 64)
    qkv = Tensor(gpu.asarray(qkv.astype(ml_dtypes.bfloat16)), requires_grad=True)
    starts = F.document_starts(np.repeat([[0, 1], [3, 3]], [15, 25], axis=1))
    y = F.self_attention(qkv, 4, kv_heads=2, starts=starts)
    F.linear(y, Tensor(gpu.asarray(weight.astype(ml_dtypes.bfloat16)))).sum().backward()
    assert np.isfinite(gpu.to_numpy(qkv.grad).astype(np.float32)).all()
    assert [(graph.kind, graph.runs) for graph in sys.modules["cudnn"].graphs] == [
        ("forward", 1),
        ("backward", 1),
    ]


def test_context_parallelism_gives_chunks_as_cudnn_takes_them(gpu, backend):
    """A rank alone has both chunks; each of two heads of keys has a call for each."""
    mesh = init_device_mesh("cuda", (1,), ("cp",))
    x, dy = (normal(2, 40, parts * 16, seed=parts).astype(ml_dtypes.bfloat16) for parts in (8, 4))
    found = []
    for attend in (F.self_attention, lambda *how, **more: context_attention(*how, mesh, **more)):
        qkv = Tensor(gpu.asarray(x), requires_grad=True)
        y = attend(qkv, 4, kv_heads=2)
        y.backward(gpu.asarray(dy))
        found.append([gpu.to_numpy(each).astype(np.float64) for each in (y.data, qkv.grad)])
    kinds = [(graph.kind, graph.runs) for graph in sys.modules["cudnn"].graphs]
    assert sum(runs for kind, runs in kinds if kind == "forward") == 1 + 2 * 2
    assert sum(runs for kind, runs in kinds if kind == "backward") == 1 + 2 * 2
    for one, other in zip(*found, strict=True):
        assert np.linalg.norm(one - other) < 8e-3 * np.linalg.norm(one)


def test_convolution_there_shares_the_library(gpu, backend):
    x, weight = (gpu.asarray(np.ones(shape, np.float32)) for shape in ((2, 3, 5, 4), (8, 3, 2, 2)))
    y, dx, dweight = (
        gpu.asarray(np.full(shape, np.nan, np.float32)) for shape in ((2, 8, 4, 3), x.shape, weight.shape)
    )
    geometry, fused = ((1, 1), (0, 0), (1, 1)), backend.convolution()
    assert fused.forward(x, weight, y, *geometry)
    assert fused.backward_input(y, weight, dx, *geometry)
    assert fused.backward_weight(x, y, dweight, False, *geometry)
    np.testing.assert_array_equal(gpu.to_numpy(y), 12)  # of ones
    np.testing.assert_array_equal(gpu.to_numpy(dweight), 12 * 2 * 4 * 3)
    assert gpu.to_numpy(dx).sum() == 12 * 12 * y.size  # each number of y, 12, goes to 12 pixels
    assert backend.attention() is not None and len(sys.modules["cudnn"].handles) == 1
