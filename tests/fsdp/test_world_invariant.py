"""set_world_invariant: 1, 2, 4 and 8 ranks train to the same bits, however the model is sharded."""

import re
from functools import cache
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
from shardrt.comm.objects import all_gather_object
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    memory_plan,
    set_gradient_divide_factor,
    set_world_invariant,
    units,
)
from shardrt.fsdp.options.fixed_tree import arrays_for, slot_of
from shardrt.kernels import cpu as K
from shardrt.recompute import checkpoint_blocks
from tests import lab

M = 8  # micro-batches of a step
BF16 = MixedPrecisionPolicy("bfloat16", output_dtype="float32")
FP16 = MixedPrecisionPolicy("float16", "float32", "float32", full_precision=(nn.LayerNorm,))


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
    sums = [np.full(3, np.nan, np.float32) for _ in range(arrays_for(turns))]
    for turn in range(turns):
        goes = slot_of(turn)
        parts = list(values[turn * ranks : (turn + 1) * ranks])
        K.reduce.sum_into(sums[goes.index], parts, 1.0, goes.accumulate)
        for low in range(goes.index, goes.index - goes.merges, -1):
            K.reduce.sum_into(sums[low - 1], [sums[low]], 1.0, True)
    level = list(values)
    while len(level) > 1:
        level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
    np.testing.assert_array_equal(sums[0], level[0])


# -- training


def gpt(mesh, strategy="FULL_SHARD", invariant=True, recompute=False, dropout=0.2, **options):
    config = GPTConfig(n_layer=2, n_head=2, n_embd=24, block_size=16, vocab_size=50, dropout=dropout)
    model = lab.seeded(lambda: GPT(config), 7)
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
    """(losses of the steps, norms, all that a checkpoint holds); a step has M micro-batches."""
    mesh = init_device_mesh("auto")
    if copies > 1:
        mesh = init_device_mesh("auto", (copies, mesh.size // copies))
    model = make(mesh, **options)
    optimizer = optim.AdamW(optim.decay_groups(model, 0.1), lr=3e-3, in_backward=in_backward)
    scaler = optim.GradScaler(init_scale=2.0**26, backoff_factor=2.0**-8, enabled=fp16)
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
        everyone = all_gather_object(mesh.communicator("control"), own)
        losses.append(fsum(loss for rank in everyone for loss in rank))
    return losses, norms, pieces(model, optimizer)


def pieces(model, optimizer):
    """Of this rank: [(kind, parameter, number of the first element, elements)]."""
    return [
        (piece.kind, piece.parameter, piece.extents[0].first, np.array(piece.array).tolist())
        for piece in pieces_of(model, optimizer, saving=True)
    ]


def on(ranks, function=train, **options):
    """(..., (kind, parameter) -> all elements, put together from the pieces of all ranks)."""
    results = thread.run(ranks, function, **options)
    found = {}
    for kind, name, first, values in (piece for *_, own in results for piece in own):
        found.setdefault((kind, name), {})[first] = values
    whole = {key: [v for first in sorted(rows) for v in rows[first]] for key, rows in found.items()}
    return *results[0][:-1], whole


CASES = {
    "FULL_SHARD": {},
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "recomputation": {"recompute": True},
    "offload of parameters and state": {"offload_policy": CPUOffloadPolicy(gradients=False)},
    "bf16": {"mp_policy": BF16},
    "bf16, NO_SHARD": {"mp_policy": BF16, "strategy": "NO_SHARD"},
    "fp16": {"mp_policy": FP16, "fp16": True},
    "updates in backward": {"in_backward": True},
}
HYBRIDS = [
    (4, {"strategy": "HYBRID_SHARD_GRAD_OP", "copies": 2}),
    (8, {"strategy": "HYBRID_SHARD", "copies": 4, "mp_policy": BF16}),
]


@cache
def alone(numbers):
    """What one rank gives, with the options of CASES[numbers] that change numbers."""
    kept = ("mp_policy", "fp16", "in_backward")
    return on(1, **{key: value for key, value in CASES[numbers].items() if key in kept})


def same(found, expected):
    losses, norms, values = found
    assert losses == expected[0] and norms == expected[1]
    assert values == expected[2] and {kind for kind, _ in values} == {"parameter", "m", "v"}


@pytest.mark.parametrize("case", CASES)
def test_every_number_of_ranks_gives_the_same_bits(case):
    numbers = {"bf16, NO_SHARD": "bf16", "fp16": "fp16", "bf16": "bf16", "updates in backward": case}
    expected = alone(numbers.get(case, "FULL_SHARD"))
    # At 4 a sum has branches of turns and of ranks; where all are of one kind two strategies stand for all.
    for ranks in (2, 4, 8) if case in ("FULL_SHARD", "bf16, NO_SHARD") else (4,):
        same(on(ranks, **CASES[case]), expected)


@pytest.mark.parametrize(("ranks", "options"), HYBRIDS)
def test_hybrids_too(ranks, options):
    same(on(ranks, **options), alone("bf16" if "mp_policy" in options else "FULL_SHARD"))


def test_one_step_of_fp16_was_left_out_and_others_not():
    finite = np.isfinite(alone("fp16")[1]).tolist()
    assert finite == [False, True, True]


USED = [range(M), (0, 1, 2), (5,), ()]  # the micro-batches that have the second block, by step


def train_sometimes():
    mesh, model = init_device_mesh("auto"), lab.seeded(lab.Skips)
    model.blocks[2].up.bias.requires_grad = False
    lab.shard(model, mesh)
    set_world_invariant(model, M)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(4):
        for number in range(mesh.rank, M, mesh.size):
            tokens, targets = micro_batch(step, number, vocabulary=11)
            model.skipped = () if number in USED[step] else (1,)
            (F.cross_entropy(model(tokens), targets) * (1 / M)).backward()
        norms.append([nn.utils.grad_norm(model.parameters(), p) for p in (1, 2, np.inf)])
        lab.update(optimizer)
    return norms, pieces(model, optimizer)


@pytest.mark.filterwarnings("ignore:fully_shard. expected")
def test_units_that_some_micro_batches_leave_out_have_their_place_in_the_sum():
    expected = on(1, train_sometimes)
    for ranks in (2, 4, 8):
        assert on(ranks, train_sometimes) == expected


# -- what it takes, and what it refuses


@lab.on_ranks(1, 2, 4, 8)
def test_partial_sums_are_planned_and_few(ranks):
    model = gpt(init_device_mesh("auto"))
    plan = memory_plan(model).device.get("partial sums of gradients", 0)
    groups = lab.groups_of(model)
    held = sum(array.nbytes for group in groups for array in group.sharded_gradient.arrays[1:])
    assert plan == held == {1: 2, 2: 1}.get(ranks, 0) * sum(group.shard.nbytes for group in groups)


@lab.on_ranks(2)
def test_traffic_is_that_of_a_reduction_each_time_and_a_table():
    def traffic(invariant):
        """(calls, bytes) of a step on the communicators of this rank, clipping included."""
        counts = lab.Counts()
        mesh = init_device_mesh("auto", wrap=counts)
        model = gpt(mesh, invariant=invariant)

        def step():
            for number in range(mesh.rank, M, mesh.size):
                turn(model, number)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        lab.count_step(counts, model, step)
        return counts.all_calls(), counts.all_bytes()

    (calls, nbytes), (expected, expected_bytes) = traffic(True), traffic(False)
    assert calls == expected and calls["reduce_scatter"] == 4 * 3
    assert nbytes.pop("all_reduce") - expected_bytes.pop("all_reduce") == 256 * 2 * 8 - 2 * 16
    assert nbytes == expected_bytes


def turn(model, number=0):
    tokens, targets = micro_batch(0, number)
    F.cross_entropy(model(tokens), targets).backward()


def test_a_step_is_all_of_its_backwards():
    model = gpt(init_device_mesh("auto"))
    optimizer = optim.AdamW(model.parameters())
    for number in range(M - 1):
        turn(model, number)
    with pytest.raises(RuntimeError, match=re.escape("are complete after 8 backwards; so far there were")):
        optimizer.step()
    turn(model, M - 1)
    optimizer.step()
    with pytest.raises(RuntimeError, match="this would be one more"):
        turn(model)
    optimizer.zero_grad()
    turn(model)


def test_evaluation_between_turns_changes_nothing():
    def masks(evaluate):
        model = gpt(init_device_mesh("auto"))
        shardrt.manual_seed(5)
        for number in range(M):
            turn(model, number)
            if evaluate:
                with no_grad():
                    model(micro_batch(9, 9)[0])  # in training mode, with dropout
        return nn.utils.grad_norm(model.parameters())

    assert masks(False) == masks(True)


def refuses(call):
    return lambda: call(gpt(init_device_mesh("auto")))


# What does not go with it: test_pairs.py.
test_what_cannot_be_is_refused = lab.refusals(
    *(
        (
            refuses(lambda model, count=count: set_world_invariant(model, count)),
            ValueError,
            f"micro_batches must be a power of two, got {count}",
        )
        for count in (6, 0)
    ),
    (refuses(lambda m: set_gradient_divide_factor(m, 8)), ValueError, "factor 8 would round each"),
    (
        refuses(lambda m: nn.utils.grad_norm(m.parameters(), 3.0)),
        ValueError,
        "norm_type must be 1, 2 or infinity with set_world_invariant, which needs exact norms; got 3",
    ),
    (refuses(lambda m: units(m) and set_world_invariant(m, M)), RuntimeError, "before the optimizer is made"),
    (
        refuses(lambda m: set_world_invariant(m.blocks, 16) or units(m)),
        ValueError,
        "has micro_batches 16, .root. 8",
    ),
    (lambda: on(3), ValueError, "the number of ranks must be a power of two, got 3"),
    (lambda: on(16), ValueError, "micro_batches must be at least 16, the number of ranks, got 8"),
)
