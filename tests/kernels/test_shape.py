"""kernels/shape tells the truth: what kernels of the CPU read and write, what those of the GPU launch.

tests/kernels/shape_cases.py has at least one call of every kernel.
"""

import importlib
import inspect
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from shardrt.kernels import cpu, cuda, shape
from shardrt.kernels.cuda import _cudnn_documents, _launch
from shardrt.kernels.cuda._cublaslt import _takes
from shardrt.kernels.cuda._cudnn_attention import CuDNNAttention
from shardrt.kernels.cuda._cudnn_conv2d import CuDNNConv2d
from tests.combinations import told
from tests.kernels.shape_cases import CASES, Arrays

NO_KERNELS = {
    *("cast.check_kind", "cast.narrow", "reduce.power_rows"),
    *("matmul.set_blas_threads", "matmul.affine", "matmul.widened"),
}


def of(package, name):
    module, function = name.split(".")
    return getattr(importlib.import_module(f"shardrt.kernels.{package}.{module}"), function)


def test_there_is_a_call_of_every_kernel():
    functions = set()
    for name in cpu.__all__:
        for function, found in vars(getattr(cpu, name)).items():
            own = inspect.isfunction(found) and found.__module__ == f"shardrt.kernels.cpu.{name}"
            if own and not function.startswith("_"):
                functions.add(f"{name}.{function}")
    assert functions - NO_KERNELS == set(CASES)


# -- what the kernels of the CPU read and write


def on_the_cpu(name, case):
    """(arguments of a call, its cost, what it does)."""
    arguments = case(Arrays())
    return arguments, (shape.ON_CPU.get(name) or of("shape", name))(**arguments), of("cpu", name)


def arrays_of(arguments):
    """Name -> array, those of a list by its name and number."""
    found = {}
    for name, value in arguments.items():
        several = value if isinstance(value, list) else [value]
        found |= {f"{name}{i or ''}": x for i, x in enumerate(several) if isinstance(x, np.ndarray)}
    return found


def whole(x):
    """The array that x is a view of."""
    return x if x.base is None else whole(x.base)


def memory(arguments):
    """The bytes of all arrays, one behind the other."""
    return np.concatenate([whole(x).reshape(-1).view(np.uint8) for x in arrays_of(arguments).values()])


def put(arguments, data):
    """Make `data` the memory of all arrays."""
    for x in arrays_of(arguments).values():
        own, data = data[: whole(x).nbytes], data[whole(x).nbytes :]
        whole(x).reshape(-1).view(np.uint8)[:] = own


def places(arguments, arrays):
    """Which bytes of `memory` belong to these arrays."""
    before = memory(arguments)
    put(arguments, np.zeros_like(before))
    for x in arrays:
        x[...] = np.full(x.dtype.itemsize, 255, np.uint8).view(x.dtype)[0]
    found = memory(arguments) == 255
    put(arguments, before)
    return found


def called(function, arguments):
    """(what it gives, the memory behind it); the memory is then as it was before."""
    before = memory(arguments)
    given, after = function(**arguments), memory(arguments)
    put(arguments, before)
    return given, after


def same(first, second):
    return np.array_equal(np.asarray(first), np.asarray(second), equal_nan=first is not None)


def nothing(arguments):
    """A memory full of nan, and of 0 in integers."""
    before = memory(arguments)
    for x in arrays_of(arguments).values():
        whole(x)[...] = 0 if x.dtype.kind in "iu" else np.nan
    found = memory(arguments)
    put(arguments, before)
    return found


def assert_only_writes_change(arguments, cost, function):
    before, (_, after) = memory(arguments), called(function, arguments)
    assert not (before != after)[~places(arguments, cost.writes)].any()
    for x in cost.writes:
        if cost.launches and x.size:
            assert (before != after)[places(arguments, [x])].any()


def assert_what_is_not_read_changes_no_result(arguments, cost, function):
    given, after = called(function, arguments)
    read = places(arguments, cost.reads)
    put(arguments, np.where(read, memory(arguments), nothing(arguments)))
    others, found = called(function, arguments)
    written = places(arguments, cost.writes)
    assert given is arguments.get("out") or same(given, others)
    assert np.array_equal(after[written], found[written])


def assert_what_is_read_changes_a_result(arguments, cost, function):
    if not all(x.size for x in cost.reads) or not any(x.size for x in cost.writes) and cost.value is None:
        return
    given, after = called(function, arguments)
    written = places(arguments, cost.writes)
    for x in cost.reads:
        if x is arguments.get("weight") and arguments.get("dx", x) is None:
            continue  # of a norm: its input's gradient is not wanted
        before = memory(arguments)
        change(x, arguments)
        others, found = called(function, arguments)
        put(arguments, before)
        assert (found != after)[written].any() or not same(given, others)


def change(x, arguments):
    """Other numbers, with which the call has a meaning."""
    if x is arguments.get("ranges"):
        x[:, 2:] *= 1.1
    elif x is arguments.get("starts"):
        x[...] = 0
    elif x is arguments.get("targets"):
        x[...] = [*x[1:], arguments["ignore_index"]]
    elif x.dtype.kind in "iu":
        x[...] = np.roll(x, 1)
    else:
        x[...] = 0.1 - 1.3 * np.roll(x, 1)


def assert_the_value_is_what_it_gives(arguments, cost, function):
    given = function(**arguments)
    value = cost.value.usual if isinstance(cost.value, shape.Answer) else cost.value
    if isinstance(value, shape.New):
        assert (given.shape, given.dtype) == (value.shape, value.dtype)
    elif isinstance(given, np.ndarray):
        assert value is given
    else:
        assert type(value) is type(given)


# -- what the GPU's host launches


CHECKS = (
    assert_only_writes_change,
    assert_what_is_not_read_changes_no_result,
    assert_what_is_read_changes_a_result,
    assert_the_value_is_what_it_gives,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", CASES)
def test_its_shape_tells_the_truth_about_a_kernel(name, check):
    for number, case in enumerate(CASES[name]):
        with told(name, number):
            check(*on_the_cpu(name, case))


class Counted(np.ndarray):
    """An array whose copies and fills are launches."""

    backend: "Counting"

    def fill(self, value):
        self.backend.launches += self.size > 0

    def __setitem__(self, key, value):
        self.backend.launches += self.size > 0

    def copy(self):
        self.backend.launches += 1
        self.backend.scratch += self.nbytes
        return np.ascontiguousarray(self)


class Counting:
    """A backend for kernels/cuda/_launch.py that computes nothing; libraries can do what shape assumes."""

    multiprocessors, shared = 132, 227 << 10

    def __init__(self):
        self.launches, self.scratch = 0, 0
        cudnn = SimpleNamespace(
            module=SimpleNamespace(diagonal_alignment=SimpleNamespace(TOP_LEFT=0, BOTTOM_RIGHT=1)),
            versions=("1.28.0", 92600),
            architecture="sm_100",
            empty=self.empty,
            run=lambda *operation, **how: self._library(),
        )
        self._attention, self._convolution = CuDNNAttention(cudnn), CuDNNConv2d(cudnn)

    def launch(self, file, defines, function, grid, threads, args, shared):
        self.launches += 1

    def empty(self, shape, dtype):
        self.scratch += np.prod(shape) * np.dtype(dtype).itemsize
        return self.own(np.zeros(shape, dtype))

    def own(self, x):
        x = x.view(type("Counted", (Counted,), {"backend": self}))
        return x

    def upload(self, values):
        self.launches += 1
        return self.own(values)

    def gemm(self, a, b, out, *, accumulate, bias=None, varied=False):
        self.launches += 1

    def gemm_grouped(self, a, b, out, groups, *, accumulate):
        self.upload(np.empty((3, len(groups)), np.int64))
        return self._library()

    def gemm_gelu(self, a, b, bias, inner, out, apart):
        return a.dtype != np.float64 and _takes(inner, inner, out, bias) and self._library()

    def gemm_gelu_backward(self, a, b, inner, out, apart):
        return a.dtype != np.float64 and _takes(inner, inner, out) and self._library()

    def gemm_sums(self, a, b, out, sums, *, accumulate, apart):
        return a.dtype != np.float64 and _takes(None, sums) and self._library()

    def attention(self):
        return self._attention

    def convolution(self):
        return self._convolution

    def _library(self):
        self.launches += 1
        return True


class OnGPU(Arrays):
    def __init__(self, dtype, backend):
        super().__init__(dtype)
        self.lay = backend.own


@pytest.fixture
def counting():
    backend = Counting()
    before = _launch.use(backend)
    yield backend
    _launch.use(before)


# Whose bytes are not those of their arrays, each once, and of scratch, twice: a table's rows, or rows of
# tokens, as often as they are named; rows read again; partial results that are left out.
OTHER_BYTES = (
    *("embedding.", "grouped.", "route.spread", "route.collect", "route.weights_backward"),
    *("cross_entropy.forward_in_place", "linear.forward_gelu", "linear.backward_parameters"),
    *("elementwise.unscale_", "reduce.power_sums", "reduce.exact_power_sums", "reduce.abs_max"),
)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64], ids=["f32", "bf16", "f64"])
@pytest.mark.parametrize("name", CASES)
def test_launches_are_those_of_the_gpu(name, dtype, counting):
    for number, case in enumerate(CASES[name]):
        with told(name, number):
            assert_launches_are_those_of_the_gpu(name, case, dtype, counting)


def assert_launches_are_those_of_the_gpu(name, case, dtype, counting):
    arguments = case(OnGPU(dtype, counting))
    cost = of("shape", name)(**arguments)
    counting.launches = counting.scratch = 0
    of("cuda", name)(**arguments)
    assert cost.launches == counting.launches
    patches = name.startswith("conv2d.") and dtype is np.float64
    if not name.startswith(OTHER_BYTES) and not patches:
        once = sum(x.nbytes for x in (*cost.reads, *cost.writes))
        assert cost.nbytes == once + 2 * counting.scratch


@pytest.mark.parametrize("function", ["forward", "backward_input", "backward_weight"])
def test_experts_of_many_rows_are_launched_one_by_one(function, counting):
    assert shape.grouped.FEW == cuda.grouped.FEW
    counts, sizes = [700, 0, 3, 690, 9], (256, 1024)  # 2 * 512 * 256 * 1024 is the most
    x, y = (counting.own(np.empty((1500, size), np.float32)) for size in sizes[::-1])
    weight = counting.own(np.empty((5, *sizes), np.float32))
    arguments = {"forward": (x, weight, counts, y), "backward_input": (y, weight, counts, x)}
    given = arguments.get(function, (x, y, counts, weight, True))
    getattr(cuda.grouped, function)(*given)
    assert getattr(shape.grouped, function)(*given).launches == counting.launches
    assert counting.launches == 2 + 2 + (function != "backward_weight")


def test_as_many_documents_are_counted_on_as_cudnn_is_told_of():
    assert shape.attention.MEAN == _cudnn_documents.MEAN


def test_many_parts_of_many_elements_are_summed_some_at_a_time(counting):
    parts = [counting.own(empty((1 << 20) + 9)) for _ in range(9)]
    cost = shape.reduce.sum_into(parts[0], parts, 1.0, False)
    of("cuda", "reduce.sum_into")(parts[0], parts, 1.0, False)
    assert cost.launches == counting.launches == 2 * (2 + 1)
    assert cost.nbytes == 10 * parts[0].nbytes + 2 * counting.scratch


# -- numbers


def empty(*shape):
    return np.empty(shape, np.float32)


def test_products_have_two_operations_for_each_inner_element():
    x, weight, y = empty(70, 24), empty(32, 24), empty(70, 32)
    forward = shape.linear.forward(x, weight, None, y)
    assert forward.flops == 2 * 70 * 24 * 32 and forward.sizes == (70, 32, 24)
    assert forward.nbytes == 4 * (70 * 24 + 32 * 24 + 70 * 32)
    dinput, dweight = (
        shape.linear.backward_input(y, weight, x),
        shape.linear.backward_weight(x, y, weight, True),
    )
    assert dinput.flops == dweight.flops == forward.flops
    assert dinput.sizes == (70, 24, 32) and dweight.sizes == (32, 24, 70)
    assert dweight.nbytes == 4 * (70 * 24 + 70 * 32 + 2 * 32 * 24)
    batch = shape.matmul.matmul(empty(3, 9, 12), empty(3, 12, 7), empty(3, 9, 7))
    assert batch.flops == 3 * 2 * 9 * 12 * 7 and batch.sizes == (9, 7, 12, 3)
    experts = shape.grouped.forward(empty(20, 24), empty(3, 32, 24), [5, 0, 9], empty(20, 32))
    assert experts.flops == 2 * 14 * 24 * 32 and experts.sizes == (14, 32, 24, 2)
    assert experts.nbytes == 4 * (14 * 24 + 2 * 32 * 24 + 20 * 32)
    how = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 2}
    convolved = shape.conv2d.forward(empty(3, 4, 9, 8), empty(6, 2, 3, 2), None, empty(3, 6, 7, 7), **how)
    assert convolved.flops == 2 * 3 * 6 * 7 * 7 * 2 * 3 * 2


@pytest.mark.parametrize("time, keys, how", [(8, 8, {}), (8, 5, {}), (8, 12, {"offsets": (2, 8)})])
def test_attention_counts_the_pairs_that_see_each_other(time, keys, how):
    q, k = empty(2, 4, time, 16), empty(2, 2, keys, 16)
    offsets = how.get("offsets", (0,))
    each = time // len(offsets)
    last = [offset + i for offset in offsets for i in range(each)]
    pairs = 2 * 4 * sum(key <= at for at in last for key in range(keys))
    how = {"causal": True, "scale": 1.0} | how
    lse = empty(2, 4, time)
    assert shape.attention.forward(q, k, k, q, lse, **how).flops == 2 * 2 * 16 * pairs
    assert shape.attention.backward(q, q, k, k, q, lse, q, k, k, **how).flops == 5 * 2 * 16 * pairs
    full = shape.attention.forward(q, k, k, q, lse, causal=False, scale=1.0)
    assert full.flops == 2 * 2 * 16 * 2 * 4 * time * keys


def test_norms_read_and_write_their_rows_once():
    x, vector, rows = empty(1000, 64), empty(64), empty(1000)
    forward = shape.layer_norm.forward(x, vector, vector, x, rows, rows, 1e-5)
    assert forward.nbytes == 4 * (2 * 1000 * 64 + 2 * 64 + 2 * 1000) and forward.flops == 8 * 1000 * 64
    added = shape.rms_norm.forward(x, vector, x, rows, 1e-5, x, x)
    assert added.nbytes == 4 * (4 * 1000 * 64 + 64 + 1000)
    backward = shape.rms_norm.backward(x, x, vector, rows, x, vector, True)
    partials = 125 * 64  # of 8 rows each
    assert backward.nbytes == 4 * (3 * 1000 * 64 + 3 * 64 + 1000 + 2 * partials)


def test_rows_move_as_often_as_they_are_named():
    indices, table, y = np.empty(50, np.int64), empty(300, 24), empty(50, 24)
    assert shape.embedding.forward(indices, table, y).nbytes == 8 * 50 + 4 * 2 * 50 * 24
    many, out = np.empty(5000, np.int64), empty(5000, 24)
    assert shape.embedding.forward(many, table, out).nbytes == 8 * 5000 + 4 * (300 * 24 + 5000 * 24)
    backward = shape.embedding.backward(indices, y, table)
    assert backward.nbytes - backward.scratch == 8 * 50 + 4 * 3 * 50 * 24
    places, rows, tokens = np.empty((30, 2), np.int64), empty(64, 24), empty(30, 24)
    collected = shape.route.collect(rows, None, places, tokens)
    assert collected.nbytes == 8 * 60 + 4 * (60 * 24 + 30 * 24) and collected.flops == 2 * 60 * 24
    spread = shape.route.spread(tokens, None, places.reshape(-1), 2, rows[:60])
    assert spread.nbytes == 8 * 60 + 4 * 2 * 60 * 24
    weights = shape.route.weights_backward(tokens, rows, places, empty(30, 2))
    assert weights.nbytes == 8 * 60 + 4 * (60 * 24 + 30 * 24 + 60)


def test_rows_that_are_read_again_count_twice():
    x, weight, inner = empty(70, 24), empty(32, 24), empty(70, 32)
    fused = shape.linear.forward_gelu(x, weight, None, inner, inner)
    assert fused.nbytes == 4 * (70 * 24 + 32 * 24 + 2 * 70 * 32)
    weight, inner = empty(33, 24), empty(70, 33)
    apart = shape.linear.forward_gelu(x, weight, None, inner, inner)
    assert apart.nbytes == 4 * (70 * 24 + 33 * 24 + 3 * 70 * 33)
    targets, numbers = np.empty(9, np.int64), empty(9)
    for vocab, passes in ((1000, 2), (60_000, 3)):
        loss = shape.cross_entropy.forward_in_place(empty(9, vocab), targets, numbers, numbers, -100)
        assert loss.nbytes == 4 * passes * 9 * vocab + 9 * (8 + 2 * 4)


def test_no_element_is_touched_and_neither_numba_nor_cupy_is_loaded():
    told = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.kernels.shape_cases"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.split() == [str(len(CASES))]
