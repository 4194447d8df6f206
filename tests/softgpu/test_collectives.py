"""Sums over ranks on the GPU emulator, NCCL's own and by the tree: in numbers, calls, waits, memory."""

from collections import Counter
from itertools import product
from threading import get_ident

import ml_dtypes
import numpy as np
import pytest

from shardrt import device, nn, optim
from shardrt import functional as F
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.device.cuda import CUDADevice
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    memory_plan,
    set_world_invariant,
)
from tests import lab
from tests.cuda.small_gpt import CONFIG, made
from tests.mpi.contract import packed, unpacked, values

pytest.importorskip("cupy")
MODES = ("late", "side first", "compute first")
COUNTS = (0, 1, 7, 1000)  # elements per rank
OPS = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}
FLOAT = 2e-7  # what sums of a few float32 may be off, relative to their largest
REDUCTION = pytest.mark.parametrize("reduction", ["nccl", "tree"])


# -- sums against float64


def on_ranks(size, reduction, body):
    """What `body(communicator, device, stream)` gives on rank 0, where all ranks run it."""

    def rank():
        mesh = init_device_mesh("cuda", communicator="nccl", reduction=reduction)
        return body(mesh.communicator("reduce"), mesh.device, mesh.stream("reduce"))

    return thread.run(size, rank)[0]


def uploaded(here, numbers):
    array = here.asarray(numbers)
    here.wait_here()
    return array


def read(here, stream, array):
    stream.synchronize()
    return here.to_numpy(array)


def scattered(comm, here, stream):
    """The worst error of reduce_scatter, relative to what the exact sum may be."""
    worst = 0.0
    cases = product(COUNTS, ("float32", "float64"), (1.0, 0.25, 1 / 3), (False, True), (False, True))
    for count, dtype, scale, accumulate, in_place in cases:
        own = slice(comm.rank * count, (comm.rank + 1) * count)
        given = [values(rank, comm.size * count, dtype) for rank in range(comm.size)]
        buffer = uploaded(here, given[comm.rank])
        output = buffer[own] if in_place else uploaded(here, np.full(count, 3, dtype))
        before = here.to_numpy(output).copy() if accumulate else 0.0
        comm.reduce_scatter(output, buffer, stream=stream, scale=scale, accumulate=accumulate)
        expected = before + scale * np.sum([part[own].astype(np.float64) for part in given], 0)
        found = read(here, stream, output)
        assert found.dtype == dtype
        worst = max(worst, np.abs(found - expected).max(initial=0) / 4)
        rest = np.delete(here.to_numpy(buffer), np.r_[own])
        np.testing.assert_array_equal(rest, np.delete(given[comm.rank], np.r_[own]))
    return float(worst)


def in_16_bits(comm, here, stream):
    """Kind -> the largest error of sums of 16-bit numbers, and that of a sum that is rounded at each rank."""
    message = {}
    for kind, accumulate, count in product(("bfloat16", "float16"), (False, True), COUNTS):
        own = slice(comm.rank * count, (comm.rank + 1) * count)
        bits = [packed(values(rank, comm.size * count, "float32"), kind) for rank in range(comm.size)]
        buffer, output = uploaded(here, bits[comm.rank]), uploaded(here, np.full(count, 3, np.float32))
        comm.reduce_scatter(output, buffer, stream=stream, scale=1.0, accumulate=accumulate, kind=kind)
        parts = [unpacked(part, kind)[own] for part in bits]
        expected = np.sum(parts, 0, np.float64) + 3 * accumulate
        found = read(here, stream, output)
        rounded, narrow = parts[0], ml_dtypes.bfloat16 if kind == "bfloat16" else np.float16
        for part in parts[1:]:
            rounded = (rounded + part).astype(narrow).astype(np.float32)
        errors = message.setdefault(kind, [0.0, 0.0])
        errors[0] = max(errors[0], float(np.abs(found - expected).max(initial=0)))
        errors[1] = max(errors[1], float(np.abs(rounded - (expected - 3 * accumulate)).max(initial=0)))
    return message


def reduced(comm, here, stream):
    """The worst error of all_reduce, as of `scattered`; integers must be exact, and nan must not be lost."""
    worst = 0.0
    for (op, exact), dtype, count in product(
        OPS.items(), ("float32", "float64", "int32", "int64", "uint8"), (0, 1, 7, 30_000)
    ):
        given = [values(rank, count, dtype) for rank in range(comm.size)]
        buffer = uploaded(here, given[comm.rank])
        comm.all_reduce(buffer, op=op, stream=stream)
        wide = np.float64 if "float" in dtype else np.int64
        expected, found = exact(np.array(given, wide), 0).astype(dtype), read(here, stream, buffer)
        if "int" in dtype or op in ("max", "min"):
            np.testing.assert_array_equal(found, expected, err_msg=f"{op} {dtype}")
        else:
            worst = max(worst, float(np.abs(found - expected).max(initial=0)) / 4)
    for op in ("max", "min", "sum"):
        buffer = uploaded(here, np.array([np.nan if comm.rank == comm.size - 1 else 1.0, 2.0], np.float32))
        comm.all_reduce(buffer, op=op, stream=stream)
        assert np.isnan(read(here, stream, buffer)).tolist() == [True, False], op
    comm.barrier(stream=stream)
    part = comm.split(comm.rank % 2, comm.rank)
    assert part.reduction == comm.reduction
    part.close()
    return worst


@REDUCTION
def test_sums_are_those_of_float64_and_no_nan_is_lost(software, reduction):
    """With scales, added to what is there, in place; all types and ops."""
    assert on_ranks(3, reduction, scattered) <= FLOAT
    assert on_ranks(3, reduction, reduced) <= FLOAT


def test_nccl_adds_16_bits_as_a_sum_that_is_rounded_at_each_rank_and_the_tree_does_not(software):
    for kind, (error, rounded) in on_ranks(3, "nccl", in_16_bits).items():
        assert 0 < error <= 2 * rounded, kind
    for kind, (error, rounded) in on_ranks(3, "tree", in_16_bits).items():
        assert error <= FLOAT < rounded, kind


# -- training


def texts(mesh, step):
    """This rank's two rows."""
    return np.random.default_rng([step, mesh.rank]).integers(0, CONFIG.vocab_size, (2, CONFIG.block_size + 1))


def train(name, *, parts=1, **settings):
    """Norms and weights of two steps in which the host reads nothing but the norm."""
    mesh, model = made(name, **settings)
    optimizer, norms = optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(2):
        for _ in range(parts):
            text = texts(mesh, step)
            F.cross_entropy(model(text[:, :-1]), text[:, 1:]).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return norms, full_state_dict(model)


ON_HOST = CPUOffloadPolicy(parameters=False, optimizer_state=False)
TRAINED = {  # by NCCL, with each reduction: ranks, in how many modes, how
    "FULL_SHARD": (4, 2, {}),
    "NO_SHARD": (4, 1, {"strategy": "NO_SHARD"}),
    "HYBRID_SHARD": (4, 1, {"strategy": "HYBRID_SHARD", "shape": (2, 2)}),
    "gradients on the host": (2, 1, {"offload_policy": ON_HOST, "parts": 2}),
}


def near(found, expected):
    """The largest difference of a norm or weight."""
    differences = [np.abs(np.subtract(found[0], expected[0])).max()]
    differences += [np.abs(found[1][name] - array).max() for name, array in expected[1].items()]
    return float(max(differences))


@REDUCTION
def test_training_is_near_the_cpus_and_has_the_same_bits_however_late_streams_are(software, reduction):
    """Also where gradients are on the host, and the first to wait for anything is who takes their norm.

    By the tree all strategies train to the same bits; by NCCL not, or nothing here would tell them apart.
    """
    first = {}
    for variant, (ranks, modes, settings) in TRAINED.items():
        if (variant, reduction) == ("gradients on the host", "tree"):
            continue  # nothing else
        for mode in MODES[:modes]:
            software.choose(mode, seed=1)
            how = {"communicator": "nccl", "reduction": reduction, **settings}
            found = thread.run(ranks, train, "cuda", **how)[0]
            lab.assert_equal(found, first.setdefault(variant, found))
        expected = thread.run(ranks, train, "cpu", **settings)[0]
        assert near(first[variant], expected) < 1e-5, variant
    apart = [near(first[variant], first["FULL_SHARD"]) for variant in ("NO_SHARD", "HYBRID_SHARD")]
    assert apart == [0, 0] if reduction == "tree" else apart[1] > 0


def train_invariant(reduction):
    mesh, model = made("cuda", communicator="nccl", reduction=reduction)
    set_world_invariant(model, 2)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(mesh.rank, 2, mesh.size):
        text = np.random.default_rng(number).integers(0, CONFIG.vocab_size, (2, CONFIG.block_size + 1))
        (F.cross_entropy(model(text[:, :-1]), text[:, 1:]) * 0.5).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return [norm], full_state_dict(model)


def test_one_rank_and_two_train_to_the_same_bits_by_the_tree_and_nccls_sums_are_refused(software):
    one, two = (thread.run(ranks, train_invariant, "tree")[0] for ranks in (1, 2))
    lab.assert_equal(two, one)
    with pytest.raises(ValueError, match="reduction='tree'"):
        thread.run(2, train_invariant, "nccl")


# -- calls and waits


def second_step(reduction, norm_type, outermost, software, waits):
    """What the host waits for in the norm of a second step and in all of it, and what this rank issues."""
    how = {"communicator": "nccl", "reduction": reduction, "outermost": {"strategy": outermost}}
    mesh, model = made("cuda", **how)
    optimizer, here, waited = optim.AdamW(model.parameters(), lr=1e-2), device.current(), waits[get_ident()]
    for step in range(2):
        text = texts(mesh, step)
        inputs, targets = (here.asarray(np.ascontiguousarray(part)) for part in (text[:, :-1], text[:, 1:]))
        here.wait_here()
        waited.clear()
        begun = len(software.log)
        F.cross_entropy(model(inputs), targets).backward()
        before = len(waited)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type)
        in_norm = waited[before:]
        optimizer.step()
        optimizer.zero_grad()
    mine = {stream.handle for stream in software.of(software.rank)}
    issued = Counter(what for what, stream, _ in software.log[begun:] if stream in mine)
    return in_norm, list(waited), issued


READ = ["memcpyAsync", "streamSynchronize", "streamSynchronize"]  # to memory that is not pinned
STEPS = {  # reduction, kind of norm, strategy of the outermost unit: ranks, calls of NCCL
    ("nccl", 2.0, "FULL_SHARD"): {2: 2 + 1 + 2, 4: 2 + 1 + 2},  # gathered, one of both again; reduced
    ("tree", 2.0, "FULL_SHARD"): {2: None, 4: None},
    ("nccl", 2.0, "NO_SHARD"): {2: None},
    ("nccl", float("inf"), "NO_SHARD"): {2: None},
}


@pytest.mark.parametrize("how", STEPS, ids=str)
def test_the_host_waits_once_in_a_step_for_the_norm_and_calls_are_those_of_the_reduction(
    software, waits, how
):
    """By NCCL's sums a step takes as many calls of NCCL and launches on 4 ranks as on 2."""
    launches = []
    for ranks, calls in STEPS[how].items():
        in_norm, in_step, issued = thread.run(ranks, second_step, *how, software, waits)[0]
        assert in_norm == in_step == READ
        assert calls in (None, issued["nccl"])
        launches.append(issued["launch"])
    assert how[0] == "tree" or launches[-1] <= launches[0]


# -- memory


def planned(communicator, reduction, strategy, precision, allocated):
    """[[planned on the device, on the host], [allocated there]]."""
    how = {"strategy": strategy, "mp_policy": MixedPrecisionPolicy(precision)}
    how["shape"] = (2, 2) if "HYBRID" in strategy else None
    mesh, model = made("cuda", communicator=communicator, reduction=reduction, **how)
    text = texts(mesh, 0)

    def backward():
        F.cross_entropy(model(text[:, :-1]), text[:, 1:]).backward()

    plan = memory_plan(model, step=backward)
    allocated[get_ident()].clear()
    CUDADevice._uploads.fget(mesh.device)._pinned = lambda size: np.empty(size, np.uint8)  # not planned
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    backward()
    optimizer.step()
    mesh.device.wait_here()
    expected = {name: count for name, count in plan.device.items() if name != "activations"}
    return [
        [sum(expected.values()), plan.host_bytes],
        [allocated[get_ident()][name] for name in ("buffer", "pinned")],
        dict(plan.device),
        dict(plan.host),
    ]


PLANS = [  # communicator, reduction, ranks, strategy, precision
    ("nccl", "nccl", 4, "HYBRID_SHARD", "bfloat16"),
    ("nccl", "tree", 4, "HYBRID_SHARD", "bfloat16"),
    ("nccl", "tree", 2, "FULL_SHARD", "float32"),
    ("staged", "tree", 4, "HYBRID_SHARD", "float32"),
    ("staged", "tree", 2, "NO_SHARD", "bfloat16"),
    ("ipc", "tree", 4, "HYBRID_SHARD", "bfloat16"),
    ("ipc", "tree", 2, "NO_SHARD", "float32"),
]
SCRATCH = {  # of communicators, on the device and on the host
    PLANS[0]: lambda there, here: there == here == 0,
    PLANS[2]: lambda there, here: there > 0,
    PLANS[3]: lambda there, here: here > 0,
}


@pytest.mark.parametrize("how", PLANS, ids=str)
def test_what_communicators_take_is_planned_to_the_byte(processes, allocated, how):
    """In float32 and bfloat16, on the GPU and pinned on the host."""
    kind, reduction, ranks, *settings = how
    for plan, taken, *categories in thread.run(ranks, planned, kind, reduction, *settings, allocated):
        assert plan == taken, categories
        scratch = [place.get("scratch of communicators", 0) for place in categories]
        assert how not in SCRATCH or SCRATCH[how](*scratch)
