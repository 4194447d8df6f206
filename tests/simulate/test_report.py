"""simulate/report.py: figures of programs written by hand; of recorded ones, against formulas."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

import shardrt
from bench import traffic
from models.gpt import GPT, GPTConfig
from shardrt import autograd, nn, optim
from shardrt import functional as F
from shardrt.comm import init_device_mesh
from shardrt.comm import world as worlds
from shardrt.comm.simulated import world_of
from shardrt.device.cuda import CUDADevice
from shardrt.device.program import HOST, Collective, Step, Work
from shardrt.device.simulated import SimulatedDevice
from shardrt.device.timeline import Span
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard
from shardrt.recompute import checkpoint_blocks
from shardrt.simulate.clock import price
from shardrt.simulate.links import transfer
from shardrt.simulate.machine import Link, Machine
from shardrt.simulate.report import report
from shardrt.simulate.script import _module_now
from tests.simulate.test_clock import PLAIN, near
from tests.simulate.written import Written


def named(program, name, flops, **facts):
    facts = {"sizes": (flops // 2, 1, 1)} | facts
    program.items.append(Work("compute", name, flops=flops, **facts))


def written():
    """Two steps; of the last: gather 2 s, forward 4, backward 10 with the forward again, an update of 1."""
    program = Written(1, 2)
    for number in range(2):
        program.call("gather", "all_gather", "", nbytes=4)
        program.wait("compute", program.record("gather"), "")
        named(program, "cross_entropy.forward", 0, sizes=(6, 9))
        named(program, "linear.forward", 4)
        named(program, "linear.forward", 2)
        named(program, "linear.backward_weight", 4)
        named(program, "linear.backward_input", 4)
        named(program, "adamw.step", 1)
        program.wait(HOST, program.record("compute"), "script.py:7")
        program.host("script.py:7", reads=(0, 4), why="norm")
        program.items.append(Step(number))
    return program


def test_a_step_written_by_hand():
    program = written()
    forward = next(i for i, item in enumerate(program.items) if i > 11 and isinstance(item, Work))
    spans = [
        Span("compute", "forward a", forward, forward + 2),
        Span("compute", "backward a", forward + 2, forward + 5),
    ]
    found = report([program], PLAIN, spans)
    assert (found.rank, found.ranks, found.step, found.ms) == (1, 2, 1, near(17e3))
    assert (found.tokens, found.tokens_per_s) == (12, near(12 / 17))
    assert found.split == near(
        {
            "backward": 8e3,
            "forward": 4e3,
            "recomputed forward": 2e3,
            "waiting for streams": 2e3,
            "optimizer": 1e3,
            "waiting for the host": 0,
        }
    )
    assert sum(found.split.values()) == near(found.ms)
    assert found.exposed == near({"": 2e3, "all_gather": 2e3})
    assert (found.mfu, found.hfu) == near((12 / 17, 14 / 17))  # 4 of forward once, 8 of backward; 2 again
    assert found.links == {"within the node": {"all_gather": 2}}
    (wait,) = found.waits
    assert (wait.site, wait.times, wait.ms, wait.values) == ("script.py:7", 1, near(17e3), ("norm",))


def test_the_report_says_that_nobody_measured_the_machine_and_what_its_figures_mean():
    text = str(report([written()], replace(PLAIN, ranks_per_node=1)))
    for message in ("measured = false: plain was not measured", "MFU: matrix products", "made up: norm"):
        assert message in text
    assert "sent between nodes, MB: all_gather" in text
    assert "measured = false" not in str(report([written()], replace(PLAIN, measured=True)))


def test_memory_is_told_when_a_place_has_most_in_the_last_step():
    program = Written()
    program.take((0, 100))
    program.free(0)
    program.items.append(Step(0))  # what was before does not count
    program.work("compute", "", flops=1)
    for start in (200, 300):
        program.take((start, start + 10))
    program.free(200)
    program.take((400, 405), place="host")
    program.items.append(Step(1))
    assert report([program], PLAIN).memory == {"device": {"activations": 20}, "host": {"activations": 5}}


def test_bytes_at_the_peak_are_those_of_units_and_of_the_layers_that_run():
    """Of two blocks, alike: their shards and states, and what they keep for backward."""
    with world(CUDADevice, 8) as here:
        here.whose = _module_now
        stepped("FULL_SHARD", 8)
        found = report([here.program], Machine.load("h100-8"))
    modules = found.modules["device"]
    for category, nbytes in found.memory["device"].items():
        assert sum(parts.get(category, 0) for parts in modules.values()) == nbytes
    shards = [modules[f"blocks.{number}"]["sharded parameters"] for number in range(2)]
    assert shards[0] == shards[1] and modules["blocks.0"]["optimizer state"] == 2 * shards[0]
    assert modules[""].keys() >= {"gathered parameters"} and "sharded parameters" not in modules[""]
    up = [modules[f"blocks.{number}.mlp.up"]["activations"] for number in range(2)]
    assert up[0] == up[1] >= TOKENS.size * 4 * CONFIG.n_embd * 4
    assert "by module: " in str(found) and "no module's own" in str(found)


def test_what_backward_takes_belongs_to_the_layer_that_is_differentiated():
    seen = set()

    class Noted(SimulatedDevice):
        def _array(self, *args, **kwargs):
            if autograd.running() is not None:
                seen.add(_module_now())
            return super()._array(*args, **kwargs)

    with worlds.use(world_of(1, Noted(CUDADevice))):
        stepped("bfloat16", 1)
    assert {"blocks.1.mlp.up", "blocks.0.mlp.up"} <= seen


def test_copies_to_and_from_the_host_are_told_apart():
    program = Written()
    program.take((0, 8), place="host")
    program.take((100, 108))
    for reads, writes in (((0, 8), (100, 108)), ((100, 108), (0, 8)), ((0, 4), (100, 104))):
        program.work("copy", "", reads=reads, writes=writes)
    program.items.append(Step(0))
    found = report([program], replace(PLAIN, host_link=Link(0.0, 1.0)))
    assert found.links == {"between host and device": {"to device": 12, "to host": 8}}


def test_without_a_step_there_is_nothing_to_say():
    with pytest.raises(ValueError, match="no optimizer step"):
        report([Written()], PLAIN)


# --- recorded -----------------------------------------------------------------------------------------------

TOKENS = np.zeros((4, 32), np.int64)
CONFIG = GPTConfig(2, 2, 64, 64, 64)
SETTINGS = {
    "FULL_SHARD": {},
    "HYBRID_SHARD": {"strategy": "HYBRID_SHARD"},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy("bfloat16", "float32")},
}


@contextmanager
def world(like, ranks):
    here = SimulatedDevice(like)
    with worlds.use(world_of(ranks, here)):
        yield here


def stepped(name, ranks, again=False):
    """Records two steps of a small GPT, and gives it."""
    shardrt.manual_seed(1)
    two = {"shape": (ranks // 8, 8), "mesh_dim_names": ("replicate", "shard")}
    mesh = init_device_mesh("auto", **two) if name == "HYBRID_SHARD" else init_device_mesh("auto")
    model = GPT(CONFIG)
    if again:
        checkpoint_blocks(model.blocks)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, **SETTINGS[name])
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        F.cross_entropy(model(TOKENS), TOKENS).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name, ranks", [("FULL_SHARD", 8), ("HYBRID_SHARD", 32)])
def test_bytes_of_all_links_are_those_of_the_formulas(name, ranks):
    """Those of bench.traffic for units; clipping and checks say some numbers of the host besides."""
    machine = replace(Machine.load("h100-8"), switch=None)
    with world(CUDADevice, ranks) as here:
        model = stepped(name, ranks)
        found = report([here.program], machine)
        sums = Counter()
        for _, item in price([here.program], machine).items_of(0):
            if isinstance(item, Collective) and item.reads:
                moved = transfer(machine, item.call, item.nbytes, here.program.groups[item.group].ranks)
                sums[item.call] += moved.sent
        assert sums.total() == pytest.approx(traffic.expected(model), rel=1e-12)
    for call, nbytes in sums.items():
        message = sum(calls.get(call, 0) for calls in found.links.values())
        assert 0 <= message - round(nbytes) < 0.02 * nbytes


@pytest.mark.parametrize("again", [False, True])
def test_operations_of_a_model_are_those_of_the_formula(again):
    """6 for each weight that a token meets, and 6 L C T of causal attention: PaLM's, whatever runs twice."""
    with world(CUDADevice, 64) as here:
        stepped("bfloat16", 64, again)
        found = report([here.program], Machine.load("h100-8"))
    layers, width, time = CONFIG.n_layer, CONFIG.n_embd, TOKENS.shape[1]
    weights = 12 * layers * width**2 + CONFIG.vocab_size * width
    expected = TOKENS.size * (6 * weights + 6 * layers * width * (time + 1))
    assert found.mfu * found.peak * found.ms / 1e3 == pytest.approx(expected, rel=1e-9)
    more = layers * TOKENS.size * (2 * 12 * width**2 + 2 * width * (time + 1))
    scores = layers * TOKENS.size * width * (time + 1)  # made again by the backward kernel of attention
    assert found.hfu * found.peak * found.ms / 1e3 == pytest.approx(
        expected + scores + again * more, rel=1e-9
    )
    assert (found.dtype, found.peak, found.tokens) == ("bfloat16", 989.4e12, 64 * TOKENS.size)


def test_nothing_that_dies_later_is_priced():
    """An array that is collected meanwhile adds its Free to the program."""
    program = written()
    timing = price([program], PLAIN)
    program.items.append(Step(2))
    assert report([program], PLAIN, timing=timing).step == 1
