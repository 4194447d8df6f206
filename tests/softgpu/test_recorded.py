"""The real CUDA path, on the GPU emulator: it issues what the simulator records, and that is proved."""

from collections import Counter
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

import shardrt
from shardrt import device, nn, optim
from shardrt import functional as F
from shardrt.comm import init_device_mesh
from shardrt.comm import world as worlds
from shardrt.comm.nccl import NCCLTransport
from shardrt.device import program as p
from shardrt.device import simulated
from shardrt.device.cuda import CUDAStream
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, no_sync
from shardrt.simulate.calls import mismatches, unordered
from shardrt.simulate.deadlocks import deadlock
from shardrt.simulate.provenance import followed
from shardrt.simulate.races import races_both_ways
from shardrt.simulate.script import record_of
from tests.cuda.small_gpt import TENSOR, VARIANTS, made
from tests.softgpu.recorded import recorded

pytest.importorskip("cupy")
RANKS = 2
SETTINGS = {
    "FULL_SHARD": {},
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "HYBRID_SHARD": {"strategy": "HYBRID_SHARD", "shape": (1, 2)},
    "no_sync": {"sync": False},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy("bfloat16", "float32")},
    "bfloat16 on the wire": {"mp_policy": MixedPrecisionPolicy("bfloat16", "bfloat16")},
    # Without padding, which such updates leave as it is.
    "all on the host": {"offload_policy": CPUOffloadPolicy(), "sizes": (16, 32, 32)},
}
GPT = ("recomputation", "activations on the host", "float16, scaled", "updates in backward")
SHARDED = ("tp 2, bfloat16", "tp 2, sequence, activations on the host, accumulation")
# CuPy's names of its own operators. A fill with 0 is a memset, and a copy of dense memory a memcpy.
NAMES = {
    "cupy_add": "numpy.add",
    "cupy_copy": "numpy.copyto",
    "cupy_fill": "numpy.fill",
    "cupy_maximum": "numpy.maximum",
    "cupy_multiply": "numpy.multiply",
    "cupy_not_equal": "numpy.not_equal",
    "cupy_sum": "numpy.add.reduce",
    "cupy_sum_with_dtype": "numpy.add.reduce",
    "cupy_true_divide": "numpy.divide",
    "memcpy": "numpy.copyto",
    "memset": "numpy.fill",
    "numpy.astype": "numpy.copyto",
    "numpy.copy": "numpy.copyto",
}


class Twice(nn.Module):
    """Uses one layer twice."""

    def __init__(self, inputs, width, outputs):
        super().__init__()
        self.first, self.same = nn.Linear(inputs, width), nn.Linear(width, width)
        self.last = nn.Linear(width, outputs)

    def forward(self, x):
        return self.last(F.gelu(self.same(F.gelu(self.same(self.first(x))))))


def train(strategy="FULL_SHARD", shape=None, sync=True, sizes=(8, 24, 4), **settings):
    mesh = init_device_mesh("cuda", shape, communicator="nccl")
    shardrt.manual_seed(0)
    model = Twice(*sizes)
    for module in (model.first, model.same, model.last, model):
        fully_shard(module, mesh=mesh, strategy=strategy, **settings)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        for number in range(2):
            with nullcontext() if sync or number else no_sync(model):
                x = np.ones((3, sizes[0]), np.float32)
                F.cross_entropy(model(x), np.zeros(3, np.int64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return mesh, model, optimizer


def train_gpt(tp=False, parts=1, scaled=False, in_backward=False, **settings):
    mesh, model = made("cuda", communicator="nccl", tp=tp, **settings)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, in_backward=in_backward)
    scaler = optim.GradScaler(init_scale=8.0, enabled=scaled)
    for step in range(2):
        shardrt.manual_seed(0, step)
        for _ in range(parts):
            tokens = np.zeros((2, 5), np.int64)
            scaler.scale(F.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])).backward()
        if not in_backward:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return mesh, model, optimizer


def issued(program):
    """What a program issues, in its order: operations, waits, and the end of the memory that they use.

    Left out is what must differ:
    - addresses. Memory has the number of its first use, and its category;
    - marks. A wait has the stream, and how many operations the stream had before;
    - records that no wait is for: CUDADevice.upload has its own, for pinned memory;
    - kernels, reads and collectives of host memory. Ranks are threads here, and the CPU computes at once;
    - kernels of no elements, which are not launched;
    - memory that no recorded operation uses: what kernels take for themselves.
    """
    found, taken, numbers, before, marks = [], {}, {}, {}, {}

    def places(ranges):
        known = []
        for each in ranges:  # a range may join arrays that touch
            starts = [s for s in taken if s < each.stop and each.start < program.items[taken[s]].memory.stop]
            for s in starts:
                stop = min(each.stop, program.items[taken[s]].memory.stop)
                known.append((taken[s], max(each.start - s, 0), stop - s))
        return [
            (numbers.setdefault(index, len(numbers)), program.items[index].category, *where)
            for index, *where in sorted(known)
        ]

    def on_device(ranges):
        before = [start for start in taken if ranges and start <= ranges[0].start]
        return not before or program.items[taken[max(before)]].place == "device"

    for index, item in enumerate(program.items):
        match item:
            case p.Take():
                taken[item.memory.start] = index
            case p.Free():
                number = numbers.get(taken.pop(item.start))
                if number is not None:
                    found.append(("free", number, item.stream))
            case p.Record():
                marks[item.mark] = item.stream, before.get(item.stream, 0)
            case p.Wait():
                found.append(("wait", item.stream, *marks[item.mark], item.site))
            case p.HostWait():
                found.append(("host waits", *marks[item.mark], item.site))
            case p.HostRead() if on_device(item.reads):
                found.append(("host reads", places(item.reads), item.site))
            case p.Step():
                found.append(("step", item.number))
            case p.Work() if item.stream != p.HOST and (item.reads or item.writes):
                name = item.name.partition("__")[0]
                name = NAMES.get(name, name)
                if name == "numpy.copyto" and not item.reads:
                    name = "numpy.fill"  # with a number
                what = name, item.label, item.site, places(item.reads), places(item.writes)
                found.append((item.stream, *what))
            case p.Collective() if item.reads or item.writes:
                group = program.groups[item.group]
                what = item.call, item.nbytes, item.dtype, item.op, item.tag, item.label, item.site
                where = group.role, list(group.ranks), places(item.reads), places(item.writes)
                found.append((item.stream, *what, *where))
        if isinstance(item, p.Work | p.Collective) and (item.reads or item.writes):
            before[item.stream] = before.get(item.stream, 0) + 1
    return found


JOBS = {
    **{name: partial(train, **settings) for name, settings in SETTINGS.items()},
    **{f"GPT, {name}": partial(train_gpt, **VARIANTS[name]) for name in GPT},
    **{f"GPT, {name}": partial(train_gpt, **TENSOR[name][1]) for name in SHARDED},
}


def both(name, software, patch):
    """(programs of the real path, their Follow, programs of the simulator)"""
    function = JOBS[name]
    with followed() as follow:
        real = recorded(function, RANKS, software, patch, follow)
    roles = {rank: [rank] for rank in range(RANKS)}
    return real, follow, record_of(function, RANKS, stands_for=roles, like=device.get("cuda"))


def differences(real, simulated):
    """Of each rank, the first operation that is not the simulator's, or is missing."""
    found = []
    for one, other in zip(real, simulated, strict=True):
        one, other = issued(one), issued(other)
        at = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if at is not None or len(one) != len(other):
            at = min(len(one), len(other)) if at is None else at
            found.append((one[at : at + 1], other[at : at + 1]))
    return found


def wrong(programs):
    """Races, and what ranks would wait for."""
    known, hidden = races_both_ways(programs)
    return [*known, *hidden, *mismatches(programs), *deadlock(programs), *unordered(programs)]


@pytest.mark.parametrize("name", JOBS)
def test_cuda_gets_what_the_simulator_records_and_it_is_proved(name, software, monkeypatch):
    real, follow, expected = both(name, software, monkeypatch)
    assert differences(real, expected) == []
    assert follow.findings == []
    for follower in follow.followers:
        gathers = any(line[0] == "gather" for line in issued(follower.checks.program))
        assert follower.checks.updates >= 4 and bool(follower.checks.reads) == gathers
    assert wrong(real) == []


def first(calls):
    """Whether this is the first call of this rank."""
    calls[worlds.current().rank] += 1
    return calls[worlds.current().rank] == 1


def test_a_wait_that_is_left_out_is_noticed(software, monkeypatch):
    wait, calls = CUDAStream.wait, Counter()

    def left_out(stream, event):
        if stream.name != "reduce" or not first(calls):
            wait(stream, event)

    monkeypatch.setattr(CUDAStream, "wait", left_out)
    monkeypatch.setitem(simulated._files, left_out.__code__, "")  # sites pass over it
    real, _, expected = both("FULL_SHARD", software, monkeypatch)
    (real_has, simulator_has), *_ = differences(real, expected)
    assert simulator_has[0][:3] == ("wait", "reduce", "compute")
    assert real_has[0][:2] == ("reduce", "reduce_scatter")
    assert "reduce_scatter" in str(wrong(real)[0])


def test_a_reduction_that_is_left_out_is_noticed(software, monkeypatch):
    reduce, calls = NCCLTransport.reduce_scatter, Counter()

    def left_out(*args):
        if not first(calls):
            reduce(*args)

    monkeypatch.setattr(NCCLTransport, "reduce_scatter", left_out)
    real, follow, expected = both("FULL_SHARD", software, monkeypatch)
    (_, simulator_has), *_ = differences(real, expected)
    assert simulator_has[0][:2] == ("reduce", "reduce_scatter")
    assert follow.findings[0].what.startswith("the gradient of last ")
