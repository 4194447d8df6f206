"""Low-bit optimizer state on meshes: the bits of one rank, but of what tp splits, and equal copies."""

from functools import partial

import pytest

import shardrt
from shardrt import optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import thread
from shardrt.fsdp import ReplicasDiffer, check_replicas
from shardrt.optim.low_bit import AdamW8bit, AdamWBF16, Lion8bit, LionBF16
from tests import lab
from tests.parallel import meshes, test_experts

OPTIMIZERS = [AdamW8bit, Lion8bit, AdamWBF16, LionBF16]
RATE = 0.01


def prepared(net, on, make):
    shardrt.manual_seed(3)
    model = meshes.NETS[net]()
    mesh, data = meshes.spread(model, on)
    return model, mesh, data, make(optim.decay_groups(model, 0.1), lr=RATE)


def update(model, mesh, data, optimizer, step):
    meshes.learn(model, mesh, *lab.rows(data, *meshes.batch(step)))
    lab.give_gradients(model)
    optimizer.step()
    optimizer.zero_grad()


def trained(net, on, make, steps):
    """Whole weights, on rank 0, and whether every rank's copies are equal."""
    parts = prepared(net, on, make)
    for step in range(steps):
        update(*parts, step)
    check_replicas(parts[0], parts[-1])
    return full_state_dict(parts[0])


WITHOUT_TP = {name: on for name, on in (meshes.MESHES | meshes.STAGED).items() if on.tp == 1}
WITH_TP = {
    "copies 2, dp 2, tp 2": meshes.MESHES["copies 2, dp 2, tp 2"],
    "pp 2, tp 2": meshes.STAGED["pp 2, tp 2"],
}


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_data_and_pipeline_parallel_ranks_make_the_same_updates(make):
    expected = lab.first(1, trained, "gpt", meshes.Mesh(), make, 3)
    for name in ("dp 3", "pp 2, dp 2"):
        lab.assert_equal(
            lab.first(WITHOUT_TP[name].ranks, trained, "gpt", WITHOUT_TP[name], make, 3), expected, name
        )


@pytest.mark.parametrize("make", [AdamW8bit, AdamWBF16])
def test_of_what_tp_splits_blocks_are_of_other_elements(make):
    """The first update is the same: there are no moments. Later ones differ by rounding where tp splits."""
    first, expected = (lab.first(1, trained, "llama", meshes.Mesh(), make, steps) for steps in (1, 3))
    for name, on in WITH_TP.items():
        lab.assert_equal(lab.first(on.ranks, trained, "llama", on, make, 1), first, name)
        found = lab.first(on.ranks, trained, "llama", on, make, 3)
        whole = [key for key in expected if "norm" in key]
        lab.assert_equal({key: found[key] for key in whole}, {key: expected[key] for key in whole}, name)
        lab.assert_close(found, expected, rtol=0, atol=RATE / 2)


@pytest.mark.parametrize("make", [AdamW8bit, AdamWBF16])
def test_stages_with_experts_on_several_ranks_have_the_bits_of_one_piece(make, monkeypatch):
    monkeypatch.setattr(test_experts, "ADAMW", partial(make, lr=RATE))
    lab.assert_equal(lab.first(4, test_experts.in_stages, 2), lab.first(2, test_experts.in_stages, 1))


def after_a_flip(name, kind):
    """What check_replicas says after rank 1 has flipped a bit of a parameter's state."""
    model, mesh = lab.build(strategy="NO_SHARD")
    optimizer = AdamW8bit(model.parameters())
    lab.backward(model, mesh)
    lab.update(optimizer)
    check_replicas(model, optimizer)
    parameter = dict(model.named_parameters())[name]
    piece = next(piece for piece in optimizer.slices if piece.storage is parameter.storage)
    if mesh.rank == 1:
        piece.state[kind][slice(*parameter.storage.range_of(parameter))][-1] ^= 1
    try:
        check_replicas(model, optimizer)
    except ReplicasDiffer as differ:
        return str(differ)


@pytest.mark.parametrize("kind", ["v", "v_scales"])
def test_scales_that_differ_between_copies_are_found_and_named(kind):
    for name in ("blocks.1.up.weight", "blocks.1.down.bias"):
        expected = f"copies of the optimizer's '{kind}' of parameter '{name}' differ between rank"
        assert all(message.startswith(expected) for message in thread.run(2, after_a_flip, name, kind))
