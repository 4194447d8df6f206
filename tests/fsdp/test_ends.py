"""An embedding and a head that are units of their own: the same bits, by default where it hides them."""

from dataclasses import replace

import numpy as np
import pytest

import shardrt
from models.llama import Llama, LlamaConfig
from shardrt import device, nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import thread
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard, units
from shardrt.simulate.machine import Machine
from shardrt.simulate.step import simulated
from tests import lab

WORDS, LENGTH, ROWS, STEPS = 503, 32, 4, 4
SHAPE = LlamaConfig(
    n_layer=2, n_head=2, n_kv_head=1, n_embd=64, n_hidden=96, block_size=64, vocab_size=WORDS, tied=False
)
BATCHES = np.random.default_rng(0).integers(0, WORDS, (STEPS, ROWS, LENGTH + 1))


def made(apart, low):
    mesh, model = lab.mesh_for(), lab.seeded(lambda: Llama(SHAPE), 1)
    policy = MixedPrecisionPolicy("bfloat16", full_precision=(nn.RMSNorm,)) if low else None
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    of_ends = policy and replace(policy, cast_forward_inputs=False)  # as in shardrt/train/job.py
    for modules in ([model.embedding], [model.norm, model.head]) if apart else ():
        fully_shard(modules, mesh=mesh, reshard_after_forward=False, mp_policy=of_ends)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, optim.AdamW(model.parameters(), lr=1e-2)


def trained(apart, low):
    """Bits of an evaluation, logits, loss and norm of each step; and of the weights at the end."""
    (model, optimizer), mesh, seen = made(apart, low), lab.mesh_for(), []
    for batch in BATCHES:
        (tokens,) = lab.rows(mesh, batch)
        with shardrt.no_grad():
            seen += [model(tokens[:, :-1], tokens[:, 1:]), model(tokens[:, :-1])]
        seen.append(model(tokens[:, :-1], tokens[:, 1:]))
        seen[-1].backward()
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        lab.update(optimizer)
    return [np.array(getattr(each, "data", each)) for each in seen], full_state_dict(model)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
def test_units_of_their_own_change_no_bit(ranks, low):
    found, expected = (thread.run(ranks, trained, apart, low) for apart in (True, False))
    lab.assert_equal([seen for seen, _ in found], [seen for seen, _ in expected])
    lab.assert_equal(found[0][1], expected[0][1])


@lab.on_ranks(2)
def test_the_head_is_gathered_once_and_kept_for_backward():
    model, _ = made(apart=True, low=False)
    loss = model(BATCHES[0, :2, :-1], BATCHES[0, :2, 1:])
    found = {unit.label: unit.state.name for unit in units(model)}
    loss.backward()
    assert found["embedding"] == found["norm + head"] == "KEPT"
    assert found["blocks.0"] == "SHARDED"


LARGE = "--architecture", "llama", "--model.n-layer", "2", "--model.vocab-size", "32000"
RANKS = 4


@pytest.mark.parametrize(
    ("machine", "more", "apart"),
    [
        ("h100-8", ["--model.tied", "False"], True),
        ("h100-8", ["--model.tied", "False", "--parallel.tp", "2"], True),
        ("h100-8", ["--model.tied", "True"], False),  # one parameter: gathered first, and reduced last
        ("h100-8", ["--model.tied", "False", "--model.vocab-size", "512"], False),  # short
        ("h100-8", ["--model.tied", "False", "--parallel.pp", "2"], False),
        ("h100-8", ["--model.tied", "False", "--parallel.tp", "4"], False),  # nothing is reduced
        ("cpu-2", ["--model.tied", "False"], False),  # the root's gradients are made in pieces
    ],
)
def test_the_training_command_takes_them_apart_where_it_hides_them(machine, more, apart, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be, that is the question. " * 500)
    command = ["models.train", *LARGE, *more, "--data", str(text), "--sample.length", "0"]
    before = device.current()
    try:
        found = simulated([*command, "--batch-size", "16"], RANKS, Machine.load(machine)).report
    finally:
        device.set_current(before)
    gathered = {name.removeprefix("all_gather ").partition(" (")[0] for name in found.exposed}
    assert ({"embedding", "norm + head"} <= gathered) == apart, gathered
    assert ({"embedding", "norm + head"} & gathered == set()) == (not apart), gathered
