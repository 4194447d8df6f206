"""What kernels declare is what they do: which arrays they read and write; and what a GPU's host launches.

Calls are those of tests/contracts.
"""

import inspect
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from shardrt.device.cpu import CPUDevice
from shardrt.device.cuda import CUDADevice
from shardrt.device.program import HostRead, HostWait, Record, Work
from shardrt.device.simulated import SimulatedDevice
from shardrt.kernels import cpu
from shardrt.kernels.cost import Answer, New
from shardrt.kernels.costs import ON_CPU, ON_GPU
from shardrt.kernels.cuda import _launch
from tests.combinations import noting
from tests.contracts import Call, Out, Wide, attention, lay, products
from tests.contracts.all import CONTRACTS
from tests.contracts.optimizers import COUNT, adamw
from tests.cuda.numbers import dtype_of, normal

NO_KERNELS = {
    *("cast.check_kind", "cast.narrow", "reduce.power_rows"),
    *("matmul.affine", "matmul.widened"),
}


def of(package, name):
    module, function = name.split(".")
    return getattr(getattr(package, module), function)


# -- calls


def in_16_bits():
    """AdamW with a first moment of 16 bits, and with weights that it rounds."""
    call, *_ = adamw()
    param, grad, m, v, ranges = call.args
    bits = Out(np.random.default_rng(3).integers(0, 1 << 14, COUNT, np.uint16))
    yield Call((param, grad, bits, v, ranges), lambda param, grad, m, v, ranges: (param, m, v))
    args = param, grad, m, v, ranges, Out(np.ones(COUNT), wide=True), "bfloat16"
    yield Call(args, lambda param, grad, m, v, ranges, rounded: (param, m, v, rounded))


def through_gelu():
    """The product that goes on through GELU, which only a GPU has, and none of an odd width."""
    for inputs, outputs in ((24, 32), (25, 33)):
        args = normal(70, outputs), normal(outputs, inputs), normal(70, inputs), Out()
        yield Call(args, lambda dy, weight, inner: 0 * inner)


MORE = {"adamw.step": in_16_bits, "linear.backward_input_gelu": through_gelu}
NAMES = [*CONTRACTS, *(name for name in MORE if name not in CONTRACTS)]


def kind_of(call):
    """What calls differ in but for their sizes and numbers: which arguments are there, and how."""

    def kind(arg):
        if isinstance(arg, Wide | Out | np.ndarray | list):
            values = getattr(arg, "values", arg)
            return type(arg), min(len(arg), 4) if isinstance(arg, list) else values is None
        return (type(arg), arg > (0 if isinstance(arg, bool) else 1)) if isinstance(arg, int) else type(arg)

    return tuple(map(kind, call.args)), tuple((name, kind(value)) for name, value in call.how.items())


@cache
def calls(name, most=100_000):
    """Of each kind the largest of at most so many elements, or else the smallest; and MORE."""

    def rank(call):
        values = [getattr(arg, "values", arg) for arg in call.args]
        size = sum(x.size for x in values if isinstance(x, np.ndarray))
        return (1, size) if size <= most else (0, -size)

    found = {}
    for call in CONTRACTS[name]() if name in CONTRACTS else ():
        found.setdefault(kind_of(call), []).append(call)
    return [*(max(same, key=rank) for same in found.values()), *(MORE[name]() if name in MORE else ())]


def made(values, offset=0, dtype=None, element="float32"):
    return np.asarray(values).astype(dtype_of(element) if dtype is None else dtype, order="C")


def arguments_of(name, call, element="float32"):
    """By name. Views are views, of an array that no other has."""
    args = lay(call, partial(made, element=element), element).args
    bound = inspect.signature(of(cpu, name)).bind(*args, **call.how)
    bound.apply_defaults()
    return dict(bound.arguments)


def test_there_is_a_call_of_every_kernel():
    functions = set()
    for name in (name for name, value in vars(cpu).items() if inspect.ismodule(value) and name[0] != "_"):
        for function, found in vars(getattr(cpu, name)).items():
            own = inspect.isfunction(found) and found.__module__ == f"shardrt.kernels.cpu.{name}"
            if own and not function.startswith("_"):
                functions.add(f"{name}.{function}")
    assert functions - NO_KERNELS == set(NAMES)


# -- what the kernels of the CPU read and write


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
    assert cost.writes or cost.value is not None or not cost.reads
    if not all(x.size for x in cost.reads) or not any(x.size for x in cost.writes) and cost.value is None:
        return
    given, after = called(function, arguments)
    written = places(arguments, cost.writes)
    for x in cost.reads:
        if is_idle(x, arguments):
            continue
        before = memory(arguments)
        change(x, arguments)
        others, found = called(function, arguments)
        put(arguments, before)
        assert (found != after)[written].any() or not same(given, others)


def is_idle(x, arguments):
    """Whether x, though it is read, is for what is not wanted, of a norm, or for whom there is no room."""
    if arguments.get("dx", x) is None:
        return x is arguments["weight"] or arguments["dweight"] is None
    return arguments.get("priority") is not None and arguments["capacity"] == 0


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
    value = cost.value.usual if isinstance(cost.value, Answer) else cost.value
    if isinstance(value, New):
        assert (given.shape, given.dtype) == (value.shape, value.dtype)
    elif isinstance(given, np.ndarray):
        assert value is given
    else:
        assert type(value) is type(given)


CHECKS = (
    assert_only_writes_change,
    assert_what_is_not_read_changes_no_result,
    assert_what_is_read_changes_a_result,
    assert_the_value_is_what_it_gives,
)


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_reads_and_writes_what_it_declares(name):
    for number, call in enumerate(calls(name)):
        for check in CHECKS:
            with noting(name, number, check.__name__):
                arguments = arguments_of(name, call)
                check(arguments, of(ON_CPU, name)(**arguments), of(cpu, name))


def without_elements(here, value):
    if isinstance(value, list):
        return [without_elements(here, each) for each in value]
    return here.empty(value.shape, value.dtype) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("element", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("like", [CPUDevice, CUDADevice])
def test_of_arrays_without_elements_a_call_is_one_item_of_work(like, element):
    """And no element is looked at, which would end the process."""
    here = SimulatedDevice(like)
    for name in NAMES:
        for call in calls(name):
            arguments = arguments_of(name, call, element)
            begin = len(here.program.items)
            of(here.kernels, name)(**{key: without_elements(here, x) for key, x in arguments.items()})
            new = here.program.items[begin:]
            works = [item.name for item in new if isinstance(item, Work)]
            assert works in ([], [name]), name
            others = [item for item in new if isinstance(item, Record | HostWait | HostRead)]
            assert not others or name in ("elementwise.unscale_", "reduce.abs_max"), name


def test_a_kernel_that_declares_nothing_is_not_called_and_a_question_is():
    with pytest.raises(TypeError, match="cast.narrow declares no cost"):
        ON_CPU.cast.narrow(empty(3), empty(3), "bfloat16")
    assert ON_CPU.reduce.power_rows(65537) == ON_GPU.reduce.power_rows(65537) == 2


# -- what a GPU's host launches


def test_heads_that_a_gpu_can_not_have_are_refused_there_alone():
    q, lse, how = empty(1, 2, 8, 512), empty(1, 2, 8), {"causal": True, "scale": 1.0}
    assert ON_CPU.attention.forward(q, q, q, q, lse, **how).launches == 1
    with pytest.raises(ValueError, match="head_dim must be at most 256 on CUDA, got 512"):
        ON_GPU.attention.forward(q, q, q, q, lse, **how)


def layer(kernel, *sizes, number=0):
    return list(products.LINEAR[f"linear.{kernel}"](*sizes))[number]


HOW = {"causal": True, "scale": 0.3}
STARTS = HOW | {"starts": attention.starts_of((10, 14), slice(None))}
DOCUMENTS = attention.backward((2, 2, 2, 24, 24, 16), STARTS)
DOCUMENTS = replace(
    DOCUMENTS, args=(*DOCUMENTS.args[:2], *map(attention.packed, DOCUMENTS.args[2:4]), *DOCUMENTS.args[4:])
)
MANY = Call((Out(), [normal(1000, seed=n) for n in range(70)], 0.5, False), lambda *parts: sum(parts))
EVERY_SECOND = Call((normal(9, 24)[:, ::2], normal(12, 7), Out()), np.matmul)
LAUNCHES = [  # kernel, its call or the number of that, type, launches, bytes of scratch memory
    ("linear.forward_gelu", layer("forward_gelu", 70, 24, 32), "float32", 1, 0),
    ("linear.forward_gelu", layer("forward_gelu", 70, 25, 33), "float32", 2, 0),  # not for an epilogue
    ("linear.forward_gelu", layer("forward_gelu", 70, 24, 32), "float64", 2, 0),
    ("linear.backward_input_gelu", 1, "float32", 0, 0),
    ("linear.backward_parameters", layer("backward_parameters", 70, 24, 32, number=1), "bfloat16", 2, 256),
    ("matmul.matmul", EVERY_SECOND, "float32", 2, 864),  # a copy first
    ("attention.forward", attention.forward((2, 4, 2, 24, 24, 16), HOW), "bfloat16", 1, 0),
    ("attention.backward", attention.backward((2, 4, 2, 24, 24, 16), HOW), "float32", 3, 1536),
    ("attention.backward", DOCUMENTS, "bfloat16", 6, 1752),
    ("conv2d.forward", 0, "float32", 2, 0),  # cuDNN, and the bias
    ("conv2d.backward_weight", 1, "bfloat16", 2, 1080),
    ("embedding.backward", 0, "float32", 8, 127_408),
    ("grouped.forward", 0, "bfloat16", 3, 0),  # an upload, a call, and zeros
    ("layer_norm.backward", 0, "bfloat16", 2, 32_896),
    ("reduce.sum_into", MANY, "float32", 12, 88_000),
    ("elementwise.unscale_", 0, "float32", 2, 0),
    ("cross_entropy.backward_in_place", 0, "float32", 0, 0),
]


@pytest.mark.parametrize("name, call, element, launches, scratch", LAUNCHES)
def test_launches_and_scratch_memory_are_counted(name, call, element, launches, scratch):
    call = calls(name)[call] if isinstance(call, int) else call
    found = of(ON_GPU, name)(**arguments_of(name, call, element))
    assert (found.launches, found.scratch) == (launches, scratch)


def test_what_counts_launches_is_used_in_its_own_thread_alone():
    counting, others = object(), object()
    before = _launch.use(others)
    try:
        with _launch.used_here(counting), ThreadPoolExecutor(1) as thread:
            assert _launch.backend() is counting
            assert thread.submit(_launch.backend).result() is others
        assert _launch.backend() is others
    finally:
        _launch.use(before)


# -- numbers


def empty(*shape):
    return np.empty(shape, np.float32)


def test_products_have_two_operations_for_each_inner_element():
    x, weight, y = empty(70, 24), empty(32, 24), empty(70, 32)
    forward = ON_GPU.linear.forward(x, weight, None, y)
    assert forward.flops == 2 * 70 * 24 * 32 and forward.sizes == (70, 32, 24)
    assert forward.nbytes == 4 * (70 * 24 + 32 * 24 + 70 * 32)
    dinput, dweight = (
        ON_GPU.linear.backward_input(y, weight, x),
        ON_GPU.linear.backward_weight(x, y, weight, True),
    )
    assert dinput.flops == dweight.flops == forward.flops
    assert dinput.sizes == (70, 24, 32) and dweight.sizes == (32, 24, 70)
    assert dweight.nbytes == 4 * (70 * 24 + 70 * 32 + 2 * 32 * 24)
    batch = ON_GPU.matmul.matmul(empty(3, 9, 12), empty(3, 12, 7), empty(3, 9, 7))
    assert batch.flops == 3 * 2 * 9 * 12 * 7 and batch.sizes == (9, 7, 12, 3)
    experts = ON_GPU.grouped.forward(empty(20, 24), empty(3, 32, 24), [5, 0, 9], empty(20, 32))
    assert experts.flops == 2 * 14 * 24 * 32 and experts.sizes == (14, 32, 24, 2)
    assert experts.nbytes == 4 * (14 * 24 + 2 * 32 * 24 + 20 * 32)
    how = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 2}
    convolved = ON_GPU.conv2d.forward(empty(3, 4, 9, 8), empty(6, 2, 3, 2), None, empty(3, 6, 7, 7), **how)
    assert convolved.flops == 2 * 3 * 6 * 7 * 7 * 2 * 3 * 2


@pytest.mark.parametrize(
    "time, keys, how",
    [
        (8, 8, {}),
        (8, 5, {}),
        (8, 12, {"offsets": (2, 8)}),
        (8, 8, {"window": 3}),
        (8, 8, {"window": 9}),
        (8, 12, {"offsets": (2, 8), "window": 4}),
    ],
)
def test_attention_counts_the_pairs_that_see_each_other(time, keys, how):
    q, k = empty(2, 4, time, 16), empty(2, 2, keys, 16)
    offsets = how.get("offsets", (0,))
    each = time // len(offsets)
    last = [offset + i for offset in offsets for i in range(each)]
    window = how.get("window", 1000)
    pairs = 2 * 4 * sum(at - window < key <= at for at in last for key in range(keys))
    how = {"causal": True, "scale": 1.0} | how
    lse = empty(2, 4, time)
    assert ON_GPU.attention.forward(q, k, k, q, lse, **how).flops == 2 * 2 * 16 * pairs
    assert ON_GPU.attention.backward(q, q, k, k, q, lse, q, k, k, **how).flops == 5 * 2 * 16 * pairs
    full = ON_GPU.attention.forward(q, k, k, q, lse, causal=False, scale=1.0)
    assert full.flops == 2 * 2 * 16 * 2 * 4 * time * keys


def test_rows_move_as_often_as_they_are_named():
    indices, table, y = np.empty(50, np.int64), empty(300, 24), empty(50, 24)
    assert ON_GPU.embedding.forward(indices, table, y).nbytes == 8 * 50 + 4 * 2 * 50 * 24
    many, out = np.empty(5000, np.int64), empty(5000, 24)
    assert ON_GPU.embedding.forward(many, table, out).nbytes == 8 * 5000 + 4 * (300 * 24 + 5000 * 24)
    backward = ON_GPU.embedding.backward(indices, y, table)
    assert backward.nbytes - backward.scratch == 8 * 50 + 4 * 3 * 50 * 24
    places, rows, tokens = np.empty((30, 2), np.int64), empty(64, 24), empty(30, 24)
    collected = ON_GPU.route.collect(rows, None, places, tokens)
    assert collected.nbytes == 8 * 60 + 4 * (60 * 24 + 30 * 24) and collected.flops == 2 * 60 * 24
    spread = ON_GPU.route.spread(tokens, None, places.reshape(-1), 2, rows[:60])
    assert spread.nbytes == 8 * 60 + 4 * 2 * 60 * 24
    weights = ON_GPU.route.weights_backward(tokens, rows, places, empty(30, 2))
    assert weights.nbytes == 8 * 60 + 4 * (60 * 24 + 30 * 24 + 60)


def test_rows_that_are_read_again_count_twice():
    x, weight, inner = empty(70, 24), empty(32, 24), empty(70, 32)
    fused = ON_GPU.linear.forward_gelu(x, weight, None, inner, inner)
    assert fused.nbytes == 4 * (70 * 24 + 32 * 24 + 2 * 70 * 32)
    weight, inner = empty(33, 24), empty(70, 33)
    apart = ON_GPU.linear.forward_gelu(x, weight, None, inner, inner)
    assert apart.nbytes == 4 * (70 * 24 + 33 * 24 + 3 * 70 * 33)
    targets, numbers = np.empty(9, np.int64), empty(9)
    for vocab, passes in ((1000, 2), (60_000, 3)):
        loss = ON_GPU.cross_entropy.forward_in_place(empty(9, vocab), targets, numbers, numbers, -100)
        assert loss.nbytes == 4 * passes * 9 * vocab + 9 * (8 + 2 * 4)
