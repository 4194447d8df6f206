"""Beside tensor parallelism, what tests/fsdp/test_pairs.py has not: adapters, plans, flat axes, explain."""

import numpy as np
import pytest

import shardrt
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.fsdp import check_replicas, explain, fully_shard, memory_plan
from shardrt.nn.utils import clip_grad_norm_
from shardrt.parallel import parallelize_module
from tests import lab
from tests.parallel.nets import alone, batch_of, build, data_of, make, mesh_of, plan_of
from tests.ranks import run_ranks

AXES = {"shards": 2, "tp": 2}


def trained_with(axes, sequence, adapters):
    """Weights after two steps, before which their memory is planned and after which copies are compared."""
    mesh, model = mesh_of(**axes), make("gpt")
    if adapters:
        nn.add_lora(model, 2, targets=("*.qkv", "*.output", "*.up", "*.down"))
    parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=sequence))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=data_of(mesh))
    memory_plan(model, step=lambda: model(*batch_of(0, mesh)).backward())
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for number in range(2):
        shardrt.manual_seed(3, step=number)
        model(*batch_of(number, mesh)).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        check_replicas(model, optimizer)
    return full_state_dict(model)


@pytest.mark.parametrize(("sequence", "adapters"), [(False, False), (True, True)])
def test_planned_and_with_adapters_it_trains_as_on_one_rank_and_copies_stay_equal(sequence, adapters):
    expected = lab.first(1, trained_with, {}, False, adapters)
    lab.assert_close(lab.first(4, trained_with, AXES, sequence, adapters), expected, atol=1e-5)


def test_the_data_may_be_on_a_flat_axis_of_several():
    def step():
        mesh = mesh_of(copies=2, shards=2, tp=2)
        model = make("gpt", dropout=0.0)
        parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=True))
        data = mesh.flat("dp_replicate", "dp_shard")
        fully_shard(model, mesh=data)
        loss = model(*(np.split(array, data.size)[data.rank] for array in batch_of(0)))
        loss.backward()
        return clip_grad_norm_(model.parameters(), 1.0)

    assert run_ranks(8, step) == [pytest.approx(alone("gpt", steps=1, dropout=0.0)["norms"][0])] * 8


def test_explain_says_what_is_cut_and_what_is_summed():
    def message():
        return explain(build("gpt", mesh_of(**AXES), sequence=True)).splitlines()

    lines = [line for line in run_ranks(4, message)[0] if line.startswith("blocks.0")]
    assert [("FULL_SHARD, cut on tp" in line, "FULL_SHARD, summed on tp" in line) for line in lines] == [
        (False, True),
        (True, False),
    ]
