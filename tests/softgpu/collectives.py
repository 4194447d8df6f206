"""What tests ask of communicators on the GPU in software, all in one process: prints JSON.

python -m tests.softgpu.collectives
"""

import json
import os
import sys
import threading
import warnings
from collections import Counter
from dataclasses import replace
from itertools import product

from tests.softgpu.start import start

CUDA = start()

import ml_dtypes  # noqa: E402  after what is below CuPy
import numpy as np  # noqa: E402

import shardrt  # noqa: E402
from models.gpt import GPT, GPTConfig  # noqa: E402
from shardrt import device, nn, optim  # noqa: E402
from shardrt import functional as F  # noqa: E402
from shardrt.checkpoint import full_state_dict  # noqa: E402
from shardrt.comm import init_device_mesh, ipc, thread  # noqa: E402
from shardrt.device.cuda import CUDADevice  # noqa: E402
from shardrt.fsdp import (  # noqa: E402
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    memory_plan,
    set_world_invariant,
)
from tests.mpi.contract import packed, unpacked, values  # noqa: E402
from tests.softgpu.nccl import NcclCommunicator  # noqa: E402

MODES = ("late", "side first", "compute first")
COUNTS = (0, 1, 7, 1000)  # elements per rank
OPS = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}
SMALL = GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=4, vocab_size=29)


def tried(function, *args, **kwargs):
    """What it gives, or the error, which is to be seen beside all the rest."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


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


def sums():
    """What, reduction, ranks -> what it gives."""
    found = {}
    for what, reduction, size in product((scattered, in_16_bits, reduced), ("nccl", "tree"), (2, 3)):
        found[f"{what.__name__}, {reduction}, {size}"] = tried(on_ranks, size, reduction, what)
    return found


# -- training


def model_on(mesh, outermost=None, **settings):
    """A GPT in units, of which the outermost has other settings as well."""
    shardrt.manual_seed(0)
    model = GPT(SMALL)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    if "mp_policy" in settings:
        settings["mp_policy"] = replace(settings["mp_policy"], output_dtype="float32")  # the logits
    return fully_shard(model, mesh=mesh, **settings | (outermost or {}))


def texts(mesh, step):
    """This rank's two rows."""
    return np.random.default_rng([step, mesh.rank]).integers(0, SMALL.vocab_size, (2, SMALL.block_size + 1))


def train(name, *, communicator="auto", reduction="nccl", shape=None, parts=1, **settings):
    """Norms and weights of two steps in which the host reads nothing but the norm."""
    mesh = init_device_mesh(name, shape, communicator=communicator, reduction=reduction)
    model = model_on(mesh, **settings)
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
    "FULL_SHARD": (4, 3, {}),
    "NO_SHARD": (4, 1, {"strategy": "NO_SHARD"}),
    "HYBRID_SHARD": (4, 1, {"strategy": "HYBRID_SHARD", "shape": (2, 2)}),
    "gradients on the host": (2, 1, {"offload_policy": ON_HOST, "parts": 2}),
    "bfloat16": (4, 1, {"mp_policy": MixedPrecisionPolicy("bfloat16", "bfloat16")}),
}


def same(found, expected):
    """To the bit."""
    np.testing.assert_array_equal(found[0], expected[0])
    for name, array in expected[1].items():
        np.testing.assert_array_equal(found[1][name], array, err_msg=name)


def near(found, expected):
    """The largest difference of a norm or weight."""
    differences = [np.abs(np.subtract(found[0], expected[0])).max()]
    differences += [np.abs(found[1][name] - array).max() for name, array in expected[1].items()]
    return float(max(differences))


def trained():
    """Variant, reduction -> what each mode has against the first, distance from the CPU, from FULL_SHARD."""
    found, full = {}, {}
    for (variant, (ranks, modes, settings)), reduction in product(TRAINED.items(), ("nccl", "tree")):
        if (variant, reduction) == ("gradients on the host", "tree"):
            continue  # nothing else
        runs = []
        for mode in MODES[:modes]:
            CUDA.choose(mode, seed=1)
            how = {"communicator": "nccl", "reduction": reduction, **settings}
            runs.append(thread.run(ranks, train, "cuda", **how)[0])
        expected = thread.run(ranks, train, "cpu", **settings)[0]
        first = full.setdefault(reduction, runs[0])
        found[f"{variant}, {reduction}"] = [
            [tried(same, run, runs[0]) for run in runs],
            near(runs[0], expected),
            near(runs[0], first),
        ]
    return found


def train_invariant(reduction):
    mesh = init_device_mesh("cuda", communicator="nccl", reduction=reduction)
    model = model_on(mesh)
    set_world_invariant(model, 2)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(mesh.rank, 2, mesh.size):
        text = np.random.default_rng(number).integers(0, SMALL.vocab_size, (2, SMALL.block_size + 1))
        (F.cross_entropy(model(text[:, :-1]), text[:, 1:]) * 0.5).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return [norm], full_state_dict(model)


def invariant():
    """Reduction -> whether two ranks train as one."""
    message = {}
    for reduction in ("nccl", "tree"):
        one, two = (tried(thread.run, ranks, train_invariant, reduction) for ranks in (1, 2))
        message[reduction] = two if isinstance(two, str) else tried(same, two[0], one[0])
    return message


# -- calls and waits


class Counting:
    """Counts calls of NCCL from Python, launches, and waits of the host, by thread."""

    def __init__(self):
        self.by_thread = {}
        for name in ("allGather", "allReduce", "reduceScatter", "broadcast", "send", "recv"):
            setattr(NcclCommunicator, name, self._counted(getattr(NcclCommunicator, name), "nccl"))
        for name in ("streamSynchronize", "eventSynchronize", "deviceSynchronize"):
            setattr(CUDA, name, self._counted(getattr(CUDA, name), "waits"))
        CUDA.launchKernel = self._counted(CUDA.launchKernel, "launches")
        # A copy to memory that is not pinned waits inside, and CuPy then waits for the same.
        CUDA.memcpyAsync = self._counted(CUDA.memcpyAsync, "copies")
        self._inside = threading.local()

    def _counted(self, function, what):
        def call(*args):
            outermost = not getattr(self._inside, "call", False)
            self.here()[what] += outermost
            self._inside.call = True
            try:
                return function(*args)
            finally:
                self._inside.call = not outermost

        return call

    def here(self):
        return self.by_thread.setdefault(threading.get_ident(), Counter())


def counted_step(reduction, norm_type, outermost, counting):
    """Waits for the norm of a second step, and counts of all of that step."""
    mesh = init_device_mesh("cuda", communicator="nccl", reduction=reduction)
    model = model_on(mesh, {"strategy": outermost})
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    here = device.current()
    message = []
    for step in range(2):
        text = texts(mesh, step)
        inputs, targets = (here.asarray(np.ascontiguousarray(part)) for part in (text[:, :-1], text[:, 1:]))
        here.wait_here()
        counting.here().clear()
        F.cross_entropy(model(inputs), targets).backward()
        before = Counter(counting.here())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type)
        message = [counting.here()["waits"] - before["waits"]]
        optimizer.step()
        optimizer.zero_grad()
        message.append(dict(counting.here()))
    return message


def counts():
    """What one rank does in a step on 2 and on 4 ranks."""
    counting, found = Counting(), {}
    CUDA.choose("late", seed=1)
    cases = [("nccl", 2.0, "FULL_SHARD"), ("tree", 2.0, "FULL_SHARD")]
    cases += [("nccl", norm_type, "NO_SHARD") for norm_type in (2.0, float("inf"))]
    for reduction, norm_type, outermost in cases:
        found[f"{reduction}, {norm_type}, {outermost}"] = [
            thread.run(ranks, counted_step, reduction, norm_type, outermost, counting)[0]
            for ranks in ((2, 4) if outermost == "FULL_SHARD" else (2,))
        ]
    return found


# -- memory


class Allocated:
    """Bytes that each thread has asked the device for, outside of CuPy's pool, and pinned on the host."""

    def __init__(self):
        self._here = threading.local()
        self._count("buffer", "device")
        self._count("pinned", "host")

    def _count(self, name, place):
        original = getattr(CUDADevice, name)

        def counted(this, *args):
            array = original(this, *args)
            setattr(self._here, place, getattr(self._here, place, 0) + array.nbytes)
            return array

        setattr(CUDADevice, name, counted)

    def reset(self):
        self._here.device = self._here.host = 0

    def both(self):
        return [self._here.device, self._here.host]


def planned(communicator, reduction, strategy, precision, allocated):
    """[[planned on the device, on the host], [allocated there]]."""
    shape = (2, 2) if "HYBRID" in strategy else None
    mesh = init_device_mesh("cuda", shape, communicator=communicator, reduction=reduction)
    model = model_on(mesh, strategy=strategy, mp_policy=MixedPrecisionPolicy(precision))
    text = texts(mesh, 0)

    def backward():
        F.cross_entropy(model(text[:, :-1]), text[:, 1:]).backward()

    plan = memory_plan(model, step=backward)
    allocated.reset()
    CUDADevice._uploads.fget(mesh.device)._pinned = lambda size: np.empty(size, np.uint8)  # not planned
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    backward()
    optimizer.step()
    mesh.device.wait_here()
    expected = {name: count for name, count in plan.device.items() if name != "activations"}
    return [[sum(expected.values()), plan.host_bytes], allocated.both(), dict(plan.device), dict(plan.host)]


def plans():
    """Settings -> what each rank has planned and allocated."""
    ipc._process = lambda: threading.get_ident().to_bytes(16, "big")  # threads pass for processes
    CUDADevice.export_memory = lambda self, array: array.data.ptr.to_bytes(64, "big")
    CUDADevice.open_memory = lambda self, handle: int.from_bytes(handle, "big")
    CUDADevice.close_memory = lambda self, address: None
    allocated, found = Allocated(), {}
    for kind, reduction, ranks, strategy, precision in (
        ("nccl", "nccl", 4, "HYBRID_SHARD", "bfloat16"),
        ("nccl", "tree", 4, "HYBRID_SHARD", "bfloat16"),
        ("nccl", "tree", 2, "FULL_SHARD", "float32"),
        ("staged", "tree", 4, "HYBRID_SHARD", "float32"),
        ("staged", "tree", 2, "NO_SHARD", "bfloat16"),
        ("ipc", "tree", 4, "HYBRID_SHARD", "bfloat16"),
        ("ipc", "tree", 2, "NO_SHARD", "float32"),
    ):
        key = f"{kind}, {reduction}, {strategy}, {precision}"
        found[key] = tried(thread.run, ranks, planned, kind, reduction, strategy, precision, allocated)
    return found


PARTS = {"sums": sums, "trained": trained, "invariant": invariant, "plans": plans, "counts": counts}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    wanted = sys.argv[1:] or list(PARTS)
    print(json.dumps({name: PARTS[name]() for name in PARTS if name in wanted}), flush=True)
    os._exit(0)  # without CuPy's clean-up, which would call CUDA
