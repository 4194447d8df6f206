"""What there is beside tensor parallelism works with it: to the bit where it only moves things."""

from functools import partial

import numpy as np
import pytest

import shardrt
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.fsdp import (
    MixedPrecisionPolicy,
    check_replicas,
    explain,
    fully_shard,
    memory_plan,
    set_find_unused_parameters,
    set_world_invariant,
)
from shardrt.nn.utils import clip_grad_norm_
from shardrt.parallel import parallelize_module
from tests import lab
from tests.parallel.nets import (
    MOVES,
    alone,
    batch_of,
    build,
    data_of,
    make,
    mesh_of,
    plan_of,
    same_bits,
    same_to_1e5,
    trained,
)
from tests.ranks import run_ranks

AXES = (1, 2, 2)
SEQUENCE = pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])


@pytest.fixture(scope="module")
def plain():
    return {s: trained("gpt", AXES, s, steps=2) for s in (False, True)}


@SEQUENCE
@pytest.mark.parametrize("name", MOVES)
def test_what_only_moves_things_changes_no_bit(plain, name, sequence):
    same_bits(trained("gpt", AXES, sequence, steps=2, **MOVES[name]), plain[sequence])


@SEQUENCE
def test_gradients_are_accumulated_reduced_each_time_or_not(sequence):
    expected = trained("gpt", (1, 2, 1), steps=2, micro_batches=2)
    for synced in (True, False):
        same_to_1e5(trained("gpt", AXES, sequence, 2, 2, synced), expected)


@SEQUENCE
def test_16_bits(sequence):
    policy = MixedPrecisionPolicy("bfloat16", reduce_dtype="float32")
    found = trained("llama", AXES, sequence, steps=2, mp_policy=policy)
    expected = alone("llama", steps=2, mp_policy=policy)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=0, atol=1e-3)


def trained_with(axes, sequence, prepare, step, adapters=False):
    """Weights after three steps of AdamW, each of which is `step(model, optimizer, mesh, number)`."""
    mesh, model = mesh_of(*axes), make("gpt")
    if adapters:
        nn.add_lora(model, 2, targets=("*.qkv", "*.output", "*.up", "*.down"))
    parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=sequence))
    for block in model.blocks:
        fully_shard(block, mesh=data_of(mesh))
    fully_shard(model, mesh=data_of(mesh))
    prepare(model)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for number in range(3):
        shardrt.manual_seed(3, step=number)
        step(model, optimizer, mesh, number)
        optimizer.zero_grad()
    return full_state_dict(model)


def once(model, optimizer, mesh, number):
    model(*batch_of(number, mesh)).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def scaled(model, optimizer, mesh, number):
    scaler = optim.GradScaler(init_scale=2.0**8)
    scaler.scale(model(*batch_of(number, mesh))).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)


def checked(model, optimizer, mesh, number):
    once(model, optimizer, mesh, number)
    check_replicas(model, optimizer)


def planned(model, optimizer, mesh, number):
    if number == 0:
        memory_plan(model, step=lambda: model(*batch_of(number, mesh)).backward())
    once(model, optimizer, mesh, number)


def nothing(model):
    pass


FEATURES = {
    "unused parameters": {"prepare": set_find_unused_parameters, "step": once},
    "a scaled loss": {"prepare": nothing, "step": scaled},
    "replicas": {"prepare": nothing, "step": checked},
    "a memory plan": {"prepare": nothing, "step": planned},
    "adapters": {"prepare": nothing, "step": once, "adapters": True},
}


@SEQUENCE
@pytest.mark.parametrize("name", FEATURES)
def test_it_trains_as_on_one_rank(name, sequence):
    how = FEATURES[name]
    expected = lab.first(1, trained_with, (1, 1, 1), False, **how)
    found = lab.first(4, trained_with, AXES, sequence, **how)
    lab.assert_close(found, expected, atol=1e-5)


def with_a_tree(axes):
    """Two steps of four micro-batches, on any number of data ranks."""
    mesh = mesh_of(*axes)
    model, data = build("gpt", mesh), data_of(mesh)
    set_world_invariant(model, 4)

    def step(number):
        for row in range(data.rank, 4, data.size):
            tokens, targets = (array[row : row + 1] for array in batch_of(number))
            (model(tokens, targets) * 0.25).backward()

    return lab.learn(model, step, optimizer=partial(optim.AdamW, lr=1e-2))


def test_world_invariant_bits_do_not_depend_on_the_ranks_of_the_data():
    expected = lab.first(2, with_a_tree, (1, 1, 2))
    for axes in ((1, 2, 2), (2, 2, 2)):
        found = lab.first(int(np.prod(axes)), with_a_tree, axes)
        lab.assert_equal(found, expected)


def test_the_data_may_be_on_a_flat_axis_of_several():
    def step():
        mesh = mesh_of(2, 2, 2)
        model = make("gpt", dropout=0.0)
        parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=True))
        data = mesh.flat("dp_replicate", "dp_shard")
        fully_shard(model, mesh=data)
        loss = model(*(np.split(array, data.size)[data.rank] for array in batch_of(0)))
        loss.backward()
        return clip_grad_norm_(model.parameters(), 1.0)

    assert (
        run_ranks(8, step)
        == [pytest.approx(trained("gpt", (1, 1, 1), steps=1, changes={"dropout": 0.0})["norms"][0])] * 8
    )


def test_explain_says_what_is_cut_and_what_is_summed():
    def message():
        return explain(build("gpt", mesh_of(*AXES), sequence=True)).splitlines()

    lines = [line for line in run_ranks(4, message)[0] if line.startswith("blocks.0")]
    assert [("FULL_SHARD, cut on tp" in line, "FULL_SHARD, summed on tp" in line) for line in lines] == [
        (False, True),
        (True, False),
    ]
