"""Each wait of fsdp/, optim/offload and activation_offload taken away: a race is told, or a row says why.

A recording does not depend on waits, so one is taken away by leaving its items out.
"""

import ast
from contextlib import suppress
from functools import cache

import numpy as np
import pytest

from models.gpt import GPT, GPTConfig
from shardrt import functional as F
from shardrt import optim
from shardrt.activation_offload import offload_activations
from shardrt.comm import init_device_mesh
from shardrt.device.cpu import CPUDevice
from shardrt.device.cuda import CUDADevice
from shardrt.device.program import HostWait, Program, Wait
from shardrt.fsdp import buffers, fully_shard
from shardrt.simulate.races import races, without_values
from shardrt.simulate.script import record_of
from tests.races.recorded import recorded
from tests.ranks import ROOT

FILES = [
    *sorted((ROOT / "shardrt" / "fsdp").glob("*.py")),
    ROOT / "shardrt" / "nn" / "storage.py",
    ROOT / "shardrt" / "optim" / "offload.py",
    ROOT / "shardrt" / "activation_offload.py",
]
WAITS = ("wait", "synchronize")
CONFIGURATIONS = (
    (CUDADevice, ("offload all", "bf16", "clip norm")),
    (CUDADevice, ("offload activations", "late", "clip norm")),
    (CUDADevice, ("step on host", "in backward")),
    (CUDADevice, ("offload optimizer", "clip norm")),
    (CUDADevice, ("offload gradients", "accumulate")),
    (CUDADevice, ("NO_SHARD", "no_sync")),
    (CPUDevice, ("bf16",)),
    (CPUDevice, ("bf16", "NO_SHARD", "SGD")),
    (CUDADevice, ("unused units", "in backward")),
    (CUDADevice, ("given up",)),
    (CUDADevice, ("frozen later",)),
    (CPUDevice, ("in pieces",)),
)

# By "file function: who waits", those that no configuration above misses alone: the others that cover it, one
# of which is enough; or why nobody can miss it here.
END, KEPT = (
    "fsdp/gradients.py end_backward: self._streams.compute.wait(group.gradient_ready)",
    "nn/storage.py complete_gradient: device.of(gradient).current_stream.wait(self.gradient_ready)",
)
OPEN = "fsdp/gradients.py _slot: self._streams.compute.wait(slot.free)"
REFRESH = "fsdp/gathers.py refresh: streams.gather.wait(self._shards_ready)"
FREED = "fsdp/collectives.py _reduce_to_host: streams.upload.wait(staged.free)"
COVERED = {
    END: [KEPT],
    "fsdp/collectives.py _rounded: streams.gather.wait(slot.free)": [REFRESH],
    "fsdp/gradients.py _slot: self._streams.compute.wait(group.gradient_ready)": [END, KEPT, OPEN],
    "fsdp/collectives.py _reduce_to_host: streams.upload.wait(group.gradient_ready)": [
        FREED,
        "fsdp/gathers.py refresh: streams.upload.wait(self._shards_ready)",
    ],
    "optim/offload.py issue: stream.wait(route.updated)": [
        "optim/offload.py _issue_chunk: first.wait(slot.free)",
        "optim/offload.py settle: self.device.current_stream.wait(route.updated)",
    ],
    "activation_offload.py depart: streams.offload.wait(host.read)": [
        "activation_offload.py depart: streams.offload.wait(host.ready)"
    ],
}
OUTSIDE = "memory outside of the pool: the driver frees it when all is done, a CPU when no queue holds it"
VALUES = "it waits for values of the host, which have no addresses here"
NOT_SEEN = {
    "fsdp/gradients.py have_slots: self._streams.reduce.synchronize()": OUTSIDE,
    "fsdp/trained.py follow: streams.reduce.synchronize()": OUTSIDE,
    "fsdp/trained.py follow: streams.download.synchronize()": OUTSIDE,
    "fsdp/trained.py agree: streams.reduce.synchronize()": OUTSIDE,
    "fsdp/gradients.py _told: told.synchronize()": VALUES,
    "fsdp/gathers.py _drop: self.streams.compute.wait(group.slot.ready)": "the next to write is gather, too",
    "fsdp/tree.py has: self.ready.synchronize()": "none of these configurations comes to it",
}


def waits_in(path):
    """(name, site) of each call of `wait` or `synchronize`."""
    file = path.relative_to(ROOT / "shardrt").as_posix()
    for function in ast.walk(ast.parse(path.read_text())):
        for node in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in WAITS:
                yield f"{file} {function.name}: {ast.unparse(node)}", f"shardrt/{file}:{node.lineno}"


SITES = {name: site for path in FILES for name, site in waits_in(path)}


def steps(name):
    """Of three blocks and what is around them: a step, something else, a step."""
    mesh, tokens = init_device_mesh("auto"), np.zeros((2, 16), np.int64)
    model = GPT(GPTConfig(3, 2, 16, 16, 8192 if name == "in pieces" else 16))
    for block in model.blocks:
        fully_shard(offload_activations(block) if name == "given up" else block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        loss = model(tokens, tokens) if name == "in pieces" else F.cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def fail(*args):
        raise KeyError

    step()
    if name == "frozen later":
        model.blocks[1].requires_grad_(False)
    else:
        model(tokens)  # no backward comes to it
        hook = model.blocks[1].register_forward_pre_hook(fail)  # the next one is gathered already
        with suppress(KeyError):
            model(tokens)
        hook.remove()
    step()


@cache
def program_of(like, names, directory):
    """Without the values that the host asks for, whose waits hide others."""
    if names[0] in ("given up", "frozen later", "in pieces"):
        with pytest.MonkeyPatch.context() as patch:
            if names[0] == "in pieces":
                patch.setattr(buffers, "IN_PIECES", 0)
            (program,) = record_of(lambda: steps(*names), 2, like=like)
    else:
        (program,) = recorded(names, directory, like)
    return without_values(program)


def without(program, sites):
    items = [item for item in program.items if not (isinstance(item, Wait | HostWait) and item.site in sites)]
    return Program(program.rank, program.world_size, items, program.groups)


def races_without(directory, *names):
    """Those of each configuration that are there if these waits are left out."""
    sites = {SITES[name] for name in names}
    for like, features in CONFIGURATIONS:
        program = program_of(like, features, directory)
        there = {item.site for item in program.items if isinstance(item, Wait | HostWait)}
        yield races([without(program, sites)]) if sites <= there else []


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


def test_as_they_are_the_configurations_have_no_race(directory):
    for like, names in CONFIGURATIONS:
        assert not races([program_of(like, names, directory)]), names


def test_every_row_names_waits_that_are_there():
    named = {other for row in COVERED.values() for other in row}
    assert COVERED.keys() | NOT_SEEN.keys() | named <= SITES.keys()


@pytest.mark.parametrize("name", SITES)
def test_a_wait_that_is_taken_away_is_missed_or_covered(name, directory):
    found = [race for each in races_without(directory, name) for race in each]
    if name not in NOT_SEEN and name not in COVERED:
        assert found, "no race without it, and no row that says what covers it"
        assert all("let " in race.repair for race in found)
        return
    assert not found, f"its row is wrong: {found[0]}"
    if name in COVERED:
        others, both = (
            [sum(race.count for race in found) for found in races_without(directory, *names)]
            for names in (COVERED[name], [name, *COVERED[name]])
        )
        assert any(more > less for less, more in zip(others, both, strict=True))
