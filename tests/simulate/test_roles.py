"""simulate/roles.py: which ranks are recorded, and that they say what all ranks would."""

from dataclasses import replace

import numpy as np
import pytest

from models.gpt import GPT, GPTConfig
from models.plans import plan_of
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.device.program import Take
from shardrt.fsdp import fully_shard
from shardrt.parallel import Pipeline, parallelize_module
from shardrt.simulate.machine import Machine
from shardrt.simulate.report import report
from shardrt.simulate.roles import columns, compared, roles_of
from shardrt.simulate.script import record_of

TOKENS = np.zeros((4, 16), np.int64)


def update(model, step):
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def loss_of(model, batch):
    return F.cross_entropy(model(batch), batch)


def model_of(layers):
    return GPT(GPTConfig(layers, 4, 64, 64, 64))


def sharded(layers=2):
    mesh, model = init_device_mesh("auto"), model_of(layers)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    update(model, lambda: loss_of(model, TOKENS).backward())


def piped(stages=2):
    mesh, model = init_device_mesh("auto", (stages, 4 // stages), ("pp", "dp")), model_of(4)
    pipeline = Pipeline(model, mesh["pp"], micro_batches=4)
    for stage in pipeline.stages:
        for module in (*stage.blocks, stage):
            fully_shard(module, mesh=mesh["dp"])
    update(model, lambda: pipeline.step(F.cross_entropy, [TOKENS] * 4, inputs=lambda batch: (batch,)))


def cut():
    mesh, model = init_device_mesh("auto", (2, 2), ("dp", "tp")), model_of(2)
    parallelize_module(model, mesh["tp"], plan_of(model))
    fully_shard(model, mesh=mesh["dp"])
    update(model, lambda: loss_of(model, TOKENS).backward())


@pytest.mark.parametrize(
    "function, roles",
    [(sharded, [range(4)]), (cut, [range(4)]), (piped, [[0, 1], [2, 3]])],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_one_rank_of_each_role_says_what_all_ranks_say(function, roles):
    machine = Machine.load("h100-8")
    programs = record_of(function, 4, steps=2)
    assert [list(program.alike) for program in programs] == [list(role) for role in roles]
    every = record_of(function, 4, steps=2, stands_for={rank: [rank] for rank in range(4)})
    found, truth = report(programs, machine), report(every, machine)
    for name in ("tokens", "memory", "links"):
        assert getattr(found, name) == getattr(truth, name)
    assert found.ms == pytest.approx(truth.ms, rel=1e-9)
    for program in programs:
        for rank in program.alike:
            assert not compared(every[rank], program).differs


def test_every_stage_is_a_role():
    programs = record_of(lambda: piped(4), 4, steps=1)
    assert [program.rank for program in programs] == [0, 1, 2, 3]


def test_roles_are_told_by_digits_and_other_ranks_of_them_by_their_column():
    assert roles_of((), 8) == {0: range(8)}
    assert roles_of(((2, 4),), 8) == {0: [0, 1, 4, 5], 2: [2, 3, 6, 7]}
    programs = record_of(piped, 4, steps=1)
    assert columns(programs, 5) == [{1: [0, 1], 3: [2, 3]}]
    assert columns(record_of(sharded, 4, steps=1), 2) == [{3: range(4)}, {1: range(4)}]


def test_what_does_not_do_the_same_is_reported():
    first, last = record_of(piped, 4, steps=2)
    assert "rank 2 does not do what rank 0 does: other collectives" in str(compared(last, first))
    (longer,) = record_of(lambda: sharded(3), 4, steps=2)
    (program,) = record_of(sharded, 4, steps=2)
    assert "other collectives (" in compared(longer, program).differs
    for index, item in enumerate(program.items):
        if isinstance(item, Take) and item.category == "optimizer state":
            program.items[index] = replace(item, category="state")
    (same,) = record_of(sharded, 4, steps=2)
    assert "other bytes (device state" in compared(program, same).differs
