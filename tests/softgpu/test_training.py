"""Training on the installed CuPy, on the GPU emulator: the numbers of the CPU, in any order of streams.

What a wait that is missing would do there, tests/softgpu/mutations.py shows.
"""

import numpy as np
import pytest

from shardrt import device
from shardrt import functional as F
from shardrt.activation_offload import offload_activations
from shardrt.comm import thread
from shardrt.device.cuda import CUDAStream
from shardrt.fsdp import memory_plan
from shardrt.parallel.axis import Axis
from shardrt.tensor import Tensor
from tests import lab
from tests.cuda.small_gpt import STEPS, TENSOR, VARIANTS, agree, made, train
from tests.gpu import test_captured_step as capturing
from tests.gpu import test_pipeline as piping
from tests.softgpu import programs

cupy = pytest.importorskip("cupy")
MODES = ("late", "side first", "compute first")
RANKS = {  # variant -> [(ranks, communicator)], where that is not one rank alone
    "float32": [(1, "auto"), (2, "nccl"), (4, "staged")],
    "bfloat16": [(2, "nccl")],
    "bfloat16 on the wire": [(2, "staged")],
    "all on the host": [(2, "nccl")],
    "frozen late": [(2, "nccl")],
    "updates in backward": [(2, "staged")],
}
JOBS = [(name, *how) for name in VARIANTS for how in RANKS.get(name, [(1, "auto")])]
# By turns two of three orders.
ORDERS = [(MODES[0], MODES[1 + place % 2]) for place in range(len(JOBS))]
# The kernels of each side stream; besides there are copies.
SIDE = {
    "gather": {"pack"},
    "reduce": {"pack", "sum_parts", "set"},  # set: what is trained of a unit, picked out
    "optimizer": {"adamw"},
    **dict.fromkeys(("upload", "download", "offload", "fetch"), set()),
    **dict.fromkeys(("optimizer upload", "optimizer download"), set()),
}


@pytest.fixture
def names(monkeypatch):
    """Handle of a stream -> its name."""
    found, before = {0: "null"}, CUDAStream.__init__

    def named(stream, name, handle):
        before(stream, name, handle)
        found[handle.ptr] = name

    monkeypatch.setattr(CUDAStream, "__init__", named)
    return found


@pytest.mark.parametrize(
    ("variant", "ranks", "communicator", "modes"),
    [pytest.param(*job, modes, id="-".join(map(str, job))) for job, modes in zip(JOBS, ORDERS, strict=True)],
)
def test_however_late_streams_are_it_trains_as_the_cpu_and_to_the_same_bits(
    software, names, variant, ranks, communicator, modes
):
    settings = VARIANTS[variant] | {"layers": 2}
    expected, first = thread.run(ranks, train, "cpu", **settings), None
    for mode in modes:
        software.choose(mode, seed=1)
        software.log.clear()  # in the first mode products are still chosen
        found = thread.run(ranks, train, "cuda", communicator=communicator, **settings)
        first = first or found
        agree(found, expected, 1e-1 if "16" in variant else 2e-5)  # bfloat16 rounds others there
        lab.assert_equal(found, first)
    streams = kernels_by_stream(software.log, names)
    compute = streams.pop("compute")
    assert {"forward", "backward", "add"} < compute
    assert "gelu_backward" not in compute, "it is in a product, where measured times are equal"
    assert not compute & {"pack", "sum_parts", *streams.get("optimizer", ())} - {"copy"}
    for name, kernels in streams.items():  # nothing in the null stream
        assert name in SIDE and kernels <= SIDE[name] | {"copy"}, name
    if variant == "bfloat16 on the wire":
        assert "pack" in streams["gather"]
    if variant == "accumulation":
        assert streams["reduce"] == {"sum_parts"}


@pytest.mark.parametrize("variant", ["tp 2, bfloat16", "dp 2, tp 2, sequence, all on the host"])
def test_so_does_what_is_cut_along_tp(software, variant):
    ranks, settings = TENSOR[variant]
    expected, first = thread.run(ranks, train, "cpu", **settings), None
    for mode in MODES[1:]:
        software.choose(mode, seed=1)
        found = thread.run(ranks, train, "cuda", communicator="nccl", **settings)
        first = first or found
        agree(found, expected, 1e-1 if "16" in variant else 2e-5)  # bfloat16 rounds others there
        lab.assert_equal(found, first)


def products_meanwhile(log, names):
    """Of each collective in the stream "tensor": the products issued until their rank waits for it."""
    found = []
    for place, (what, side, _) in enumerate(log):
        if what == "nccl" and names[side] == "tensor":
            after = log[place + 1 :]
            done = next(event for each, stream, event in after if each == "record" and stream == side)
            wait = next(k for k, (each, _, event) in enumerate(after) if each == "wait" and event == done)
            compute = after[wait][1]
            assert names[compute] == "compute"
            found.append(sum(each == "product" and stream == compute for each, stream, _ in after[:wait]))
    return found


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_a_sum_along_tp_is_under_way_while_the_weights_product_runs(software, names, monkeypatch, sequence):
    how = (2, train, "cuda")
    settings = {"communicator": "nccl", "tp": True, "shape": (1, 2), "sequence": sequence}
    with monkeypatch.context() as patch:
        patch.setattr(Axis, "_beside", lambda axis: None)  # as without it
        expected = thread.run(*how, **settings)
        assert not products_meanwhile(software.log, names)
    for mode in MODES:
        software.choose(mode, seed=1)
        software.log.clear()
        lab.assert_equal(thread.run(*how, **settings), expected)
        found = products_meanwhile(software.log, names)
        assert len(found) == 2 * STEPS * 3 and min(found) > 0  # of attention, MLP and head, on two ranks


def test_memory_of_what_is_cut_along_tp_is_planned_without_a_collective(software):
    """NCCL could make none of the arrays of a dry run, which have no elements."""

    def rank():
        mesh, model = made("cuda", communicator="nccl", tp=True, shape=(1, 2))
        tokens = np.zeros((1024, 4), np.int64)
        mesh.device.wait_here()
        software.log.clear()
        return memory_plan(model, step=lambda: model(tokens, tokens).backward()).device["activations"]

    plans = thread.run(2, rank)
    assert plans[0] == plans[1] > 4096 * 8 * 4
    assert not any(what == "nccl" for what, *_ in software.log)


@pytest.mark.parametrize(("schedule", "shards"), [("1F1B", 2), ("ZB-H1", 1)])
def test_pipelines_train_to_the_same_bits_however_late_links_are(software, schedule, shards):
    how, first = (2 * shards, piping.train, "cuda", schedule, shards), None
    for mode in MODES[1:]:
        software.choose(mode, seed=1)
        found = thread.run(*how, communicator="nccl")
        first = first or found
        assert found == first
    np.testing.assert_allclose(
        np.hstack(found), np.hstack(thread.run(2 * shards, piping.train, "cpu", schedule, shards)), atol=1e-4
    )


RAISES = {
    "updates in backward": (1, {"in_backward": True, "layers": 3}),
    "activations on the host": (1, {"prepare": offload_activations, "layers": 3}),
}


@pytest.mark.parametrize("variant", RAISES)
def test_what_is_under_way_when_a_backward_raises_reaches_nothing_that_comes_after(software, variant):
    ranks, settings = RAISES[variant]
    software.choose("at once")
    expected = thread.run(ranks, programs.raises, "cuda", **settings)
    for mode in ("late", "compute first"):
        software.choose(mode, seed=1)
        lab.assert_equal(thread.run(ranks, programs.raises, "cuda", **settings), expected)


def kernels_by_stream(log, names):
    """Name of a stream -> the kernels, copies and fills that were issued in it."""
    found = {}
    for what, stream, detail in log:
        if what in ("launch", "copy", "set"):
            found.setdefault(names.get(stream, "unknown"), set()).add(detail or what)
    return found


CAPTURED = {
    **{name: (1, settings) for name, settings in capturing.VARIANTS.items()},
    "more pieces of gradients than CuPy joins without an upload": (1, {"layers": 12}),
    "two ranks": (2, {"communicator": "nccl", "dropout": 0.2}),
    "two ranks, by the tree": (2, {"communicator": "nccl", "reduction": "tree"}),
    "two ranks along tp": (2, {"communicator": "nccl", "shape": (1, 2), "tp": True, "dropout": 0.2}),
}


@pytest.mark.parametrize("variant", CAPTURED)
def test_replays_of_a_captured_step_train_as_steps_that_are_not(software, variant):
    ranks, settings = CAPTURED[variant]
    expected = thread.run(ranks, capturing.train, False, **settings)
    for mode in MODES[::2] if settings.get("layers", 1) == 1 else MODES[:1]:
        software.choose(mode, seed=2)
        found = thread.run(ranks, capturing.train, True, **settings)
        capturing.assert_same(found, expected)


def submit_in_a_submit(here, x):
    def ptr():
        return cupy.cuda.get_current_stream().ptr

    first, second = here.new_stream("first"), here.new_stream("second")
    inside = []
    first.submit(lambda: (second.submit(int), inside.append(ptr() == first.handle.ptr)))
    assert inside == [True]


AFTER = {
    "work in a side stream": lambda here, x: here.new_stream("side").submit(here.zeros, (3,), np.float32),
    "work in a side stream, by work in another": submit_in_a_submit,
    "a transposed array read by the host": lambda here, x: here.to_numpy(x.data.T),
    "the device chosen again": lambda here, x: (cupy.cuda.Stream.null.use(), device.set_current(here)),
    "rows by a list, and backward": lambda here, x: x[[0, 1]].sum().backward(),
    "12 joined": lambda here, x: here.capture(lambda: F.concatenate([x] * 12)).replay(),
    "12 stacked": lambda here, x: here.capture(lambda: F.stack([x] * 12, axis=1)).replay(),
}


@pytest.mark.parametrize("call", AFTER)
def test_the_compute_stream_stays_current(software, call):
    """Whatever makes another one current for a while, CuPy itself included."""

    def rank():
        here = device.get("cuda")
        device.set_current(here)
        AFTER[call](here, Tensor(here.zeros((4, 6), np.float32), requires_grad=True))
        return cupy.cuda.get_current_stream().ptr == here.current_stream.handle.ptr

    assert thread.run(1, rank) == [True]
