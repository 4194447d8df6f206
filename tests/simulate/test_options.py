"""Muon, low-bit state, quantised collectives and DiLoCo simulate as they run: bytes and operations.

tests/test_simulated_world.py compares their calls with those of real ranks.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from shardrt import optim
from shardrt.comm import init_device_mesh, thread
from shardrt.device.cpu import CPUDevice
from shardrt.device.program import Collective, Work
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard, units
from shardrt.fsdp.options.quantisation import Quantisation
from shardrt.kernels.packed import packed_bytes
from shardrt.optim.low_bit import AdamW8bit, AdamWBF16, Lion8bit, LionBF16
from shardrt.optim.muon import newton_schulz
from shardrt.optim.muon.exchange import owners_of
from shardrt.parallel import DiLoCo
from shardrt.simulate.clock import price
from shardrt.simulate.links import transfer
from shardrt.simulate.machine import Machine
from shardrt.simulate.report import memory_of, report
from shardrt.simulate.script import record_of
from tests import lab

TOKENS = np.zeros((2, 16), np.int64)
EACH = {rank: [rank] for rank in range(4)}
TWO_NODES = replace(Machine.load("h100-8"), ranks_per_node=2, switch=None)
OPTIMIZERS = {
    "Muon": lambda model: optim.Muon(optim.muon_groups(model, 0.1)),
    **{
        kind.__name__: lambda model, kind=kind: kind(model.parameters(), lr=1e-3)
        for kind in (AdamW8bit, Lion8bit, AdamWBF16, LionBF16)
    },
}
NOT_KEPT = ("activations", "results", "buffers")


def trained(name="AdamW", wrap=None, steps=2, **settings):
    """Two steps on a small model; gives the model, its optimizer and what is outside of it."""
    shape = {"shape": (2, 2), "mesh_dim_names": ("diloco", "dp_shard")} if name == "DiLoCo" else {}
    shardrt.manual_seed(1)
    mesh, outer = init_device_mesh("auto", **shape, wrap=wrap), None
    model = GPT(GPTConfig(2, 2, 32, 16, 64))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp_shard"] if shape else mesh, **settings)
    made = OPTIMIZERS.get(name, lambda model: optim.AdamW(model.parameters(), lr=1e-3))
    optimizer = made(model)
    if shape:
        outer = DiLoCo(optimizer, mesh["diloco"], sync_every=1)
    for step in range(steps):
        if wrap is not None:
            wrap.reset()
        model(TOKENS, TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
        if outer is not None:
            outer.step(step + 1)
    return model, optimizer, outer


def kept(name, settings):
    """Bytes that this rank has at the end of training, but for what an op takes."""
    model, optimizer, outer = trained(name, **settings)
    arrays = [array for piece in optimizer.slices for array in piece.state.values()]
    for fragment in outer.fragments if outer else ():
        arrays += [fragment._buffer, *(array for piece in fragment.pieces for array in piece.outer.values())]
    return lab.bytes_held(model) + sum(array.nbytes for array in arrays)


def quantised(bits, **options):
    how = Quantisation(bits, 8, host_size=2, **options)
    return {"mp_policy": MixedPrecisionPolicy(quantised=how), "reshard_after_forward": True}


CASES = {
    **{name: (name, {}) for name in OPTIMIZERS},
    "8 bits": ("AdamW", quantised(8, error_feedback=True)),
    "4 bits": ("AdamW", quantised(4, secondary=True)),
    "DiLoCo": ("DiLoCo", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_memory_is_that_of_a_run_to_the_byte(case):
    name, settings = CASES[case]
    programs = record_of(lambda: trained(name, **settings), 4, stands_for=EACH, like=CPUDevice)
    timing = price(programs, TWO_NODES)
    found = [memory_of(timing, number)["device"] for number in range(4)]
    simulated = [sum(n for kind, n in memory.items() if kind not in NOT_KEPT) for memory in found]
    assert simulated == thread.run(4, kept, name, settings)


def test_bits_between_hosts_leave_the_node_and_sums_of_a_host_do_not():
    def one():
        model, _, _ = trained(**quantised(4))
        sizes.extend(group.layout.shard_size for unit in units(model) for group in unit.groups)

    sizes = []
    found = report(record_of(one, 4, local_size=2), TWO_NODES)
    inside, outside = found.links["within the node"], found.links["between nodes"]
    gathers = 3 * 2 * sum(packed_bytes(size, 4, 32) for size in sizes)  # to three ranks, twice
    assert inside["reduce_scatter"] == 2 * 4 * sum(sizes) and "reduce_scatter" not in outside
    assert outside["all_to_all"] == sum(packed_bytes(size, 8, 256) for size in sizes)
    assert "all_to_all" not in inside
    others = inside["all_gather"] + outside["all_gather"] - gathers  # what hosts say
    assert 0 <= others < 0.01 * gathers


def exchanged():
    counts = lab.Counts()
    trained("Muon", counts)
    return counts.bytes("all_to_all")[0]


def test_muon_moves_between_nodes_what_owners_lack():
    """Of each rank; and all ranks together receive what the ranks of a run do."""
    programs = record_of(lambda: trained("Muon"), 4, stands_for=EACH, local_size=2)
    timing, sums = price(programs, TWO_NODES), Counter()
    for number, program in enumerate(programs):
        for _, item in timing.items_of(number):
            if isinstance(item, Collective) and item.call == "all_to_all":
                own = program.rank // 2
                for rank, (to, source) in enumerate(item.parts):
                    sums[rank, "to"] += to * (rank != program.rank)
                    sums[program.rank, "from"] += source * (rank != program.rank)
                moved = transfer(TWO_NODES, item.call, item.nbytes, range(4), program.rank, item.parts)
                near = [to for rank, (to, _) in enumerate(item.parts) if rank // 2 == own]
                assert moved.outside == item.nbytes - sum(near)
    assert [sums[rank, "to"] for rank in range(4)] == [sums[rank, "from"] for rank in range(4)]
    assert [sums[rank, "from"] for rank in range(4)] == thread.run(4, exchanged)


def test_an_owner_computes_newton_schulz_of_its_matrices_and_no_model_does():
    programs = record_of(lambda: trained("Muon"), 4, stands_for=EACH)
    width, timing = 32, price(programs, TWO_NODES)
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * 2
    owners = owners_of(shapes, 4)
    for number in range(4):
        works = [item for _, item in timing.items_of(number) if isinstance(item, Work)]
        matmuls = [work for work in works if work.site.startswith("shardrt/optim/muon/newton_schulz")]
        flops = sum(work.flops for work in matmuls if work.name.startswith("matmul."))
        own = [shape for shape, owner in zip(shapes, owners, strict=True) if owner == number]
        whole = sum(map(newton_schulz.flops, own))
        assert whole / 2 < flops <= whole  # symmetric matmuls may compute one half
    plain = report(record_of(trained, 4), TWO_NODES)
    found = report(programs, TWO_NODES)
    assert found.mfu * found.ms == pytest.approx(plain.mfu * plain.ms)
    assert found.hfu * found.ms > plain.hfu * plain.ms
    assert found.split["optimizer"] > plain.split["optimizer"]


def test_outer_steps_are_seen_in_the_times_of_the_steps():
    def steps():
        mesh = init_device_mesh("auto", (2, 2), mesh_dim_names=("diloco", "dp_shard"))
        model = fully_shard(GPT(GPTConfig(1, 2, 32, 16, 64)), mesh=mesh["dp_shard"])
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        outer = DiLoCo(optimizer, mesh["diloco"], sync_every=3)
        for step in range(1, 6):
            model(TOKENS, TOKENS).backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step(step)

    found = report(record_of(steps, 4, local_size=2), TWO_NODES)
    first, second, third, fourth, fifth = found.each_ms
    assert fourth > 1.01 * max(second, third, fifth)  # it has the work after the third step
    assert (
        f"steps after the first, ms: {second:,.1f}, {third:,.1f}, {fourth:,.1f}, {fifth:,.1f}; mean "
        in str(found)
    )
