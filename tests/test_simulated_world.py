"""comm/simulated.py: one recorded rank of many makes the calls of real ranks, and hears what they say."""

import threading
from collections import Counter
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from models.plans import plan_of
from shardrt import device, nn, optim
from shardrt.comm import init_device_mesh
from shardrt.comm import world as worlds
from shardrt.comm.backends import create
from shardrt.comm.protocol import Communicator
from shardrt.comm.simulated import run, world_of
from shardrt.device.addresses import joined, ranges_of
from shardrt.device.cpu import CPUDevice
from shardrt.device.cuda import CUDADevice
from shardrt.device.program import Collective
from shardrt.device.simulated import SimulatedDevice
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, memory_plan, units
from shardrt.fsdp.options.quantisation import Quantisation
from shardrt.parallel import DiLoCo, parallelize_module
from tests import lab
from tests.parallel import piped
from tests.ranks import run_ranks

TOKENS = np.random.default_rng(0).integers(0, 64, (4, 32))
HYBRID = {"shape": (2, 2), "mesh_dim_names": ("replicate", "shard")}
HOSTS = {"shape": (2, 2), "mesh_dim_names": ("diloco", "dp_shard")}


def between_hosts(bits, **options):
    return MixedPrecisionPolicy(
        reduce_dtype="float32", quantised=Quantisation(bits, 8, host_size=2, **options)
    )


SETTINGS = {
    "FULL_SHARD": ({}, {}),
    "SHARD_GRAD_OP": ({}, {"strategy": "SHARD_GRAD_OP"}),
    "NO_SHARD": ({}, {"strategy": "NO_SHARD"}),
    "HYBRID_SHARD": (HYBRID, {"strategy": "HYBRID_SHARD"}),
    "offloaded": ({}, {"offload_policy": CPUOffloadPolicy()}),
    "16 bits on the wire": ({}, {"mp_policy": MixedPrecisionPolicy("bfloat16", "bfloat16")}),
    "8 bits between hosts": ({}, {"mp_policy": between_hosts(8)}),
    "4 bits, kept on the host": ({}, {"mp_policy": between_hosts(4, secondary=True)}),
    "Muon": ({}, {}),
    "Muon, split layers": ({"shape": (2, 2), "mesh_dim_names": ("dp_shard", "tp")}, {}),
    "DiLoCo": (HOSTS, {}),
    "DiLoCo in 4 bits": (HOSTS, {}),
}


@contextmanager
def simulated(like, size, rank=0):
    """Inside a with block, this is one rank of so many on a simulated device."""
    here = SimulatedDevice(like)
    with device.use(device.current()), worlds.use(world_of(size, here, rank)):
        yield here


def trained(name, steps=2, **options):
    """Train a small GPT; the calls and the bytes of the last step, by role and call."""
    how, settings = SETTINGS[name]
    counts = lab.Counts()
    shardrt.manual_seed(1)
    mesh = init_device_mesh("auto", **{**how, **options}, wrap=counts)
    model, outer = GPT(GPTConfig(2, 2, 64, 64, 64)), None
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        parallelize_module(model, mesh["tp"], plan_of(model))
    data = mesh["dp_shard"] if "dp_shard" in names else mesh
    for module in (*model.blocks, model):
        fully_shard(module, mesh=data, **settings)
    if name.startswith("Muon"):
        optimizer = optim.Muon(optim.muon_groups(model, 0.1))
    else:
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    if "diloco" in names:
        outer = DiLoCo(optimizer, mesh["diloco"], sync_every=2, should_quantize="4 bits" in name)
    for step in range(steps):
        counts.reset()
        model(TOKENS, TOKENS).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        if outer is not None:
            outer.step(step + 1)
    calls, nbytes = Counter(), Counter()
    for each in counts.communicators:
        calls.update({(each.communicator.role, call): n for call, n in each.calls.items() if n})
        nbytes.update({(each.communicator.role, call): n for call, n in each.bytes.items() if n})
    return calls, nbytes


@cache
def really(name):
    return run_ranks(4, trained, name)[1]


@pytest.mark.parametrize("like", [CPUDevice, CUDADevice])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_makes_the_calls_of_real_ranks(name, like):
    """As many, of as many bytes, for the same roles."""
    with simulated(like, 4, rank=1) as here:
        found = trained(name)
    assert sum(found[0].values()) > 0
    if like is CPUDevice:  # whose 16 bits are computed in 32
        assert found == really(name)
    assert found[0] == really(name)[0]
    recorded = Counter(item.call for item in here.program.items if isinstance(item, Collective))
    assert recorded >= Counter(call for _, call in found[0])


@pytest.fixture(scope="module")
def programs():
    """Those of all ranks of a hybrid mesh of 8, on GPUs: one step."""
    found = []
    for rank in range(8):
        with simulated(CUDADevice, 8, rank) as here:
            trained("HYBRID_SHARD", 1, shape=(2, 4))
        found.append(here.program)
    return found


def test_recordings_of_all_ranks_fit_together(programs):
    """A group of one name has the same ranks wherever it is told, and they make the same calls in it."""
    ranks_of, calls_of = {}, {}
    for program in programs:
        for name, group in program.groups.items():
            assert program.rank in group.ranks
            assert ranks_of.setdefault(name, group) == group
        calls = {}
        for item in program.items:
            if isinstance(item, Collective):
                calls.setdefault(item.group, []).append((item.number, item.call, item.nbytes))
        for name, made in calls.items():
            assert [number for number, *_ in made] == list(range(len(made)))
            assert calls_of.setdefault(name, made) == made
    for name, group in ranks_of.items():
        assert [name in program.groups for program in programs] == [rank in group.ranks for rank in range(8)]
    assert {(group.role, len(group.ranks)) for group in ranks_of.values()} >= {
        ("gather", 4),
        ("reduce", 4),
        ("copies", 2),
        ("control", 8),
    }


VALUES = {
    "all_gather": lambda comm, x, **how: comm.all_gather(x, **how),
    "sum": lambda comm, x, **how: comm.all_reduce(x, **how),
    "max": lambda comm, x, **how: comm.all_reduce(x, op="max", **how),
    "prod": lambda comm, x, **how: comm.all_reduce(x, op="prod", **how),
    "broadcast": lambda comm, x, **how: comm.broadcast(x, root=2, **how),
    "reduce_scatter": lambda comm, x, **how: comm.reduce_scatter(x[:4], x[4:16].copy(), scale=0.5, **how),
    "accumulated": lambda comm, x, **how: comm.reduce_scatter(x[:4], x[4:16].copy(), accumulate=True, **how),
    "all_to_all": lambda comm, x, **how: comm.all_to_all(x[:12], x[12:].copy(), **how),
}


@pytest.mark.parametrize("call", VALUES)
def test_values_of_the_host_are_as_if_every_rank_had_said_the_same(call):
    """As of ranks that say it. (Of all_to_all: what this one keeps.)"""

    def report():
        x = np.arange(1.0, 25.0)
        VALUES[call](create("auto"), x, stream=device.get("cpu").current_stream)
        return x

    with simulated(CUDADevice, 3, rank=2):
        found = report()
    expected = run_ranks(3, report)[2]
    if call == "all_gather":  # of which each has another slice
        expected[:] = np.tile(expected[16:], 3)
    if call == "all_to_all":
        found, expected = found[8:12], expected[8:12]
    np.testing.assert_array_equal(found, expected)


def test_stages_of_a_pipeline_are_recorded_together_and_make_the_calls_of_real_ranks(monkeypatch):
    """Two of four ranks: one for each stage. They tell each other the shapes of what they send."""
    here, submit = threading.local(), Communicator._submit

    def counted(self, stream, label, call, what, array, *args):
        here.calls[self.role, call, what, 0 if array is None else array.nbytes] += 1
        submit(self, stream, label, call, what, array, *args)

    def step():
        here.calls = Counter()
        pipeline, data = piped.build((2, 1, 2), "1F1B", first=lambda model: here.calls.clear())
        optimizer = optim.AdamW(pipeline.model.parameters(), lr=1e-2)
        pipeline.step(piped.loss_of, piped.batches_of(0, data))
        nn.utils.clip_grad_norm_(pipeline.model.parameters(), 1.0)
        optimizer.step()
        return here.calls

    monkeypatch.setattr(Communicator, "_submit", counted)
    expected = run_ranks(4, step)
    found = run(4, {0: (0, 1), 2: (2, 3)}, lambda rank: SimulatedDevice(CPUDevice), step)
    assert found == [expected[0], expected[2]]
    assert {role for role, *_ in found[0]} >= {"link", "shapes", "gather", "reduce", "control"}


def test_cpus_of_a_node_share_what_they_gather():
    """As under mpirun: one buffer of all ranks, in which each has its shard; a gather is a barrier."""

    def step():
        mesh = init_device_mesh("auto")
        model = fully_shard(nn.Linear(64, 64), mesh=mesh)
        plan = memory_plan(model)
        optimizer = optim.SGD(model.parameters(), lr=1.0)
        model(np.zeros((4, 64), np.float32)).sum().backward()
        optimizer.step()
        (group,) = units(model)[0].groups
        (slot,) = group.arenas["gathered"].slots
        return mesh.device, ranges_of(slot.array), ranges_of(group.shard), plan.device["sharded parameters"]

    found = run(4, {r: [r] for r in range(4)}, lambda r: SimulatedDevice(CPUDevice), step, 4, shared=True)
    devices, slots, shards, planned = zip(*found, strict=True)
    assert len(set(slots)) == 1 and joined((r.start, r.stop) for (r,) in shards) == slots[0]
    assert sum(planned) == slots[0][0].stop - slots[0][0].start
    for here in devices:
        calls = {item.call for item in here.program.items if isinstance(item, Collective)}
        assert "barrier" in calls and "reduce_scatter" in calls
        gathers = [i for i in here.program.items if isinstance(i, Collective) and i.call == "all_gather"]
        assert {here.program.groups[item.group].role for item in gathers} == {"control"}
    for size_of_node in (1, 2):
        with worlds.use(world_of(2, SimulatedDevice(CPUDevice), 0, size_of_node, shared=True)):
            assert create("auto").shares_memory == (size_of_node == 2)


def test_recorded_ranks_hear_each_other_and_those_that_they_stand_for():
    """Of 8 ranks, two: each for the half that is like it."""

    def report():
        comm, stream = create("auto"), device.get("cpu").current_stream
        x, rows, message = np.array([comm.rank + 1.0, -comm.rank]), np.zeros(8), np.zeros(1)
        comm.all_reduce(x, stream=stream)
        rows[comm.rank] = comm.rank
        comm.all_gather(rows, stream=stream)
        largest = np.array([comm.rank])
        comm.all_reduce(largest, op="max", stream=stream)
        if comm.rank == 1:
            comm.send(np.array([7.0]), peer=5, stream=stream)
        else:
            comm.recv(message, peer=1, stream=stream)
        return (
            x.tolist(),
            rows.tolist(),
            comm.all_gather_bytes(str(comm.rank).encode()),
            largest.item(),
            message.item(),
        )

    halves = {1: range(4), 5: range(4, 8)}
    found = run(8, halves, lambda rank: SimulatedDevice(CUDADevice), report)
    assert found[0][:-1] == found[1][:-1]
    assert found[0] == ([32.0, -24.0], [1.0] * 4 + [5.0] * 4, [b"1"] * 4 + [b"5"] * 4, 5, 0.0)
    assert found[1][-1] == 7.0


def test_a_recorded_rank_that_fails_wakes_those_that_wait_for_it():
    def report():
        comm = create("auto")
        if comm.rank == 0:
            raise KeyError("it is over")
        comm.all_gather_bytes(b"")

    with pytest.raises(KeyError, match="it is over"):
        run(2, {0: [0], 1: [1]}, lambda rank: SimulatedDevice(CUDADevice), report)


def test_ranks_agree_and_what_a_peer_alone_knows_is_refused():
    with simulated(CUDADevice, 1 << 14, rank=5) as here:
        mesh = init_device_mesh("auto", (512, 32), mesh_dim_names=("replicate", "shard"))
        assert (mesh.size, mesh.rank_of("shard"), mesh.device) == (1 << 14, 5, here)
        assert mesh.communicator("control").all_gather_bytes(b"here") == [b"here"] * mesh.size
        control = mesh["shard"].communicator("control")
        assert (control.rank, control.size) == (5, 32)
        with pytest.raises(NotImplementedError, match="what rank 4 sends is not known"):
            control.recv(np.zeros(1, np.int64), peer=4, stream=here.current_stream)
        groups = here.program.groups.values()
    assert {group.ranks for group in groups} == {range(1 << 14)}
    assert mesh["replicate"].communicator("control")._host.channel.ranks == range(5, 1 << 14, 32)
