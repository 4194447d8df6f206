"""set_world_invariant: 1, 2, 4 and 8 ranks train to the same bits, however the model is sharded."""

import re
from math import fsum

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardrt
from models.gpt import GPT, GPTConfig
from shardrt import functional as F
from shardrt import nn, no_grad, optim
from shardrt.checkpoint.pieces import pieces_of
from shardrt.comm import init_device_mesh, thread
from shardrt.comm.talk import from_all
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    no_sync,
    set_gradient_divide_factor,
    set_world_invariant,
    tree,
)
from shardrt.kernels import cpu as K
from shardrt.recompute import checkpoint_blocks
from tests.fsdp.nets import Net, shard

M = 8  # micro-batches of a step
WORLDS = (1, 2, 4, 8)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads of BLAS change bits, and are a setting."""
    before = K.threads()
    shardrt.set_threads(1)
    yield
    shardrt.set_threads(before)


# -- the tree


@settings(deadline=None, max_examples=60)
@given(log_m=st.integers(0, 8), log_w=st.integers(0, 8), seed=st.integers(0, 2**32))
def test_turns_and_ranks_make_one_tree(log_m, log_w, seed):
    count, ranks = 2**log_m, 2 ** min(log_m, log_w)
    values = np.random.default_rng(seed).standard_normal((count, 3)).astype(np.float32)
    turns = count // ranks
    sums = [np.full(3, np.nan, np.float32) for _ in range(tree.buffers(turns))]
    for turn in range(turns):
        goes = tree.place(turn)
        parts = list(values[turn * ranks : (turn + 1) * ranks])
        K.reduce.sum_into(sums[goes.buffer], parts, 1.0, goes.accumulate)
        for low in range(goes.buffer, goes.buffer - goes.merges, -1):
            K.reduce.sum_into(sums[low - 1], [sums[low]], 1.0, True)
    level = list(values)
    while len(level) > 1:
        level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
    np.testing.assert_array_equal(sums[0], level[0])


# -- training


def gpt(mesh, strategy="FULL_SHARD", invariant=True, recompute=False, **options):
    shardrt.manual_seed(7)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=24, block_size=16, vocab_size=50, dropout=0.2))
    if recompute:
        checkpoint_blocks(model.blocks)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, strategy=strategy, **options)
    fully_shard(model, mesh=mesh, strategy=strategy, **options)
    set_world_invariant(model, M) if invariant else set_gradient_divide_factor(model, 1)
    return model


def micro_batch(step, number, vocabulary=50):
    tokens = np.random.default_rng((step, number)).integers(0, vocabulary, (2, 17))
    return tokens[:, :-1], tokens[:, 1:]


def train(make=gpt, steps=3, copies=1, fp16=False, in_backward=False, **options):
    """(step losses, norms, everything that a checkpoint holds, sample losses) on this rank; M parts a step."""
    mesh = init_device_mesh("auto")
    if copies > 1:
        mesh = init_device_mesh("auto", (copies, mesh.size // copies))
    model = make(mesh, **options)
    optimizer = optim.AdamW(optim.decay_groups(model, 0.1), lr=3e-3, in_backward=in_backward)
    scaler = optim.GradScaler(init_scale=2.0**20, growth_interval=2, enabled=fp16)
    losses, norms = [], []
    for step in range(steps):
        shardrt.manual_seed(1, step)
        own = []
        for number in range(mesh.rank, M, mesh.size):
            tokens, targets = micro_batch(step, number)
            loss = F.cross_entropy(model(tokens), targets) * (1 / M)
            scaler.scale(loss).backward()
            own.append(float(loss))
        scaler.unscale_(optimizer)
        if in_backward:
            norms.append(nn.utils.grad_norm(model.parameters()))
        else:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        everyone = from_all(mesh.communicator("control"), own)
        losses.append(fsum(loss for rank in everyone for loss in rank))
    return losses, norms, state(mesh, model, optimizer)


def state(mesh, model, optimizer):
    """(kind, parameter) -> all elements, put together from the pieces of all ranks."""
    whole = {}
    for piece in pieces_of(model, optimizer, saving=True):
        rows = whole.setdefault((piece.kind, piece.parameter), {})
        rows[piece.first] = np.array(piece.array)
    sent = [[*key, first, array.tolist()] for key, rows in whole.items() for first, array in rows.items()]
    found = {}
    for kind, name, first, values in (
        row for rank in from_all(mesh.communicator("control"), sent) for row in rank
    ):
        found.setdefault((kind, name), {})[first] = values
    return {key: [v for first in sorted(rows) for v in rows[first]] for key, rows in found.items()}


def on(ranks, **options):
    return thread.run(ranks, train, **options)[0]


@pytest.fixture(scope="module")
def alone():
    """What one rank gives."""
    return on(1)


@pytest.mark.parametrize("ranks", WORLDS[1:])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPT", "NO_SHARD"])
def test_every_number_of_ranks_gives_the_same_bits(ranks, strategy, alone):
    losses, norms, values = on(ranks, strategy=strategy)
    assert losses == alone[0] and norms == alone[1]
    assert values == alone[2] and len(values) == 3 * 28
