"""set_tensor_invariant: 1, 2 and 4 ranks along tp train to the same bits, beside data ranks and stages."""

import gc
from functools import cache, partial

import numpy as np
import pytest

import shardrt
from models.plans import plan_of
from models.vit import ViT, ViTConfig
from shardrt import Tensor, device, nn, no_grad, optim
from shardrt import functional as F
from shardrt.comm import init_device_mesh
from shardrt.comm.reduction import combine
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard, memory_plan, set_world_invariant
from shardrt.functional import in_parts
from shardrt.nn.utils import clip_grad_norm_
from shardrt.parallel import ColwiseParallel, Pipeline, RowwiseParallel, SequenceParallel, parallelize_module
from shardrt.parallel import set_tensor_invariant as invariant
from shardrt.parallel.styles import Style
from tests import lab
from tests.parallel import nets
from tests.parallel.nets import BATCH, make
from tests.ranks import run_ranks

NAMES = ("pp", "dp_shard", "tp")
SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 44, "n_hidden": 52}
IMAGES = {"image_size": 8, "patch_size": 2, "channels": 1, "classes": 10}
KINDS = {  # parts are of 11, 12, 13 elements: of no vector's width
    "gpt": partial(make, "gpt", n_embd=44),
    "chunks": partial(make, "gpt", n_embd=44, loss_chunk=24),
    "llama": partial(make, "llama 4", n_head=8, n_embd=48, n_hidden=52, tied=False),
    "vit": lambda: ViT(ViTConfig(**SIZES, **IMAGES)),
}


def batch_of(kind, step, rows):
    if kind != "vit":
        return tuple(array[rows] for array in nets.batch_of(step))
    random = np.random.default_rng(step)
    images = random.standard_normal((BATCH, 1, 8, 8)).astype(np.float32)
    return images[rows], random.integers(0, 10, BATCH)[rows]


def inputs_of(batch):
    inputs, targets = batch
    return (Tensor(inputs),) if inputs.dtype.kind == "f" else (inputs, targets)


def loss_of(output, batch):
    """Of some rows, as a part of the mean of all."""
    inputs, targets = batch
    loss = F.cross_entropy(output, targets) if inputs.dtype.kind == "f" else output
    return loss * (len(inputs) / BATCH)


def train(kind, axes, parts=4, tree=False, sequence=False, schedule="1F1B", **how):
    """What this rank sees of three steps on pp x dp x tp ranks. tree: in micro-batches of one row."""
    pp, dp, tp = axes
    mesh = init_device_mesh("cpu", axes, NAMES)
    shardrt.manual_seed(3)
    model, pipeline = KINDS[kind](), None
    plan = plan_of(model, sequence_parallel=sequence)
    if tp > 1:
        parallelize_module(model, mesh["tp"], plan)
    if parts:
        invariant(model, parts, plan=None if tp > 1 else plan)
    if pp > 1:
        pipeline = Pipeline(model, mesh["pp"], schedule=schedule, micro_batches=BATCH // dp)
    for whole in pipeline.stages if pipeline else [model]:
        for module in (*whole.blocks, whole):
            fully_shard(module, mesh=mesh["dp_shard"], **how)
    if tree:
        set_world_invariant(model, BATCH)
    own = [[row] for row in range(mesh.coordinate[1], BATCH, dp)] if tree or pp > 1 else [list(range(BATCH))]

    def step(number):
        batches, losses = [batch_of(kind, number, rows) for rows in own], []
        if pipeline is not None:
            pipeline.step(loss_of, batches, inputs=inputs_of)
        for batch in batches if pipeline is None else ():
            losses.append(loss_of(model(*inputs_of(batch)), batch))
            losses[-1].backward()
        return [loss.item() for loss in losses]

    whole = lab.whole_gradients if pipeline is None else None
    adamw = partial(optim.AdamW, lr=1e-2)
    return lab.learn(model, step, steps=3, optimizer=adamw, whole=whole)


@cache
def trained(kind, axes=(1, 1, 1), **how):
    """What the ranks see, by rank."""
    return run_ranks(int(np.prod(axes)), train, kind, axes, **how)


def same(found, expected, losses=True):
    """Losses and norms of all ranks, gradients and weights."""
    for rank in found:
        assert rank["norms"] == expected[0]["norms"]
        assert not losses or rank["losses"] == expected[0]["losses"]
    for what in ("gradients", "final") if losses else ("final",):
        lab.assert_equal(found[0][what], expected[0][what], what)


def differ(found, expected):
    return found[0]["norms"] != expected[0]["norms"]


@pytest.mark.parametrize(("kind", "tp"), [("gpt", 2), *((kind, 4) for kind in KINDS)])
def test_three_steps_have_the_same_bits_on_1_2_and_4_ranks(kind, tp):
    same(trained(kind, (1, 1, tp)), trained(kind))


@pytest.mark.parametrize("kind", ["gpt", "vit"])
def test_without_it_they_have_others_that_are_near(kind):
    """And with it, nearly those of the model as it is."""
    expected = trained(kind, parts=0)
    assert differ(trained(kind, (1, 1, 2), parts=0), expected)
    found = trained(kind, (1, 1, 4))
    assert differ(found, expected)
    lab.assert_close(found[0]["losses"], expected[0]["losses"], atol=1e-5)
    lab.assert_close(found[0]["gradients"], expected[0]["gradients"], atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_so_they_have_with_the_time_cut_as_well(kind):
    """One rank adds up gradients of norms, biases and positions in the same parts of the time."""
    found = trained(kind, (1, 1, 4), sequence=True)
    same(found, trained(kind, sequence=True))
    assert differ(found, trained(kind))


def test_gradients_over_time_are_what_they_are_without_parts():
    found, expected = (trained("gpt", parts=parts, sequence=True) for parts in (4, 0))
    lab.assert_close(found[0]["gradients"], expected[0]["gradients"], atol=1e-5)


@pytest.mark.parametrize(("parts", "sequence"), [(2, True), (8, False)])
def test_any_power_of_two_of_parts_will_do_and_no_unit_is_needed(parts, sequence):
    def step(tp):
        mesh = init_device_mesh("cpu", (tp,), ("tp",))
        model = make("gpt", n_head=8, n_embd=40, dropout=0.0)
        plan = plan_of(model, sequence_parallel=sequence)
        parallelize_module(model, mesh, plan)  # also on an axis of one rank
        invariant(model, parts)
        model(*batch_of("gpt", 0, slice(None))).backward()
        return clip_grad_norm_(model.parameters(), 1.0)

    assert run_ranks(2, step, 2) == run_ranks(1, step, 1) * 2


@pytest.mark.parametrize("kind", ["gpt", "chunks", "llama"])
def test_16_bits(kind):
    how = {"mp_policy": MixedPrecisionPolicy("bfloat16", reduce_dtype="float32")}
    expected = trained(kind, **how)
    same(trained(kind, (1, 1, 4), **how), expected)
    assert differ(trained(kind), expected)


MESHES = [("gpt", (1, 2, 2)), ("llama", (1, 2, 2)), ("llama", (1, 4, 1)), ("llama", (1, 1, 4))]


@pytest.mark.parametrize(("kind", "axes"), MESHES, ids=str)
def test_with_a_tree_over_micro_batches_any_mesh_trains_to_the_same_bits(kind, axes):
    same(trained(kind, axes, tree=True), trained(kind, tree=True), losses=False)


@pytest.mark.parametrize("axes", [(1, 2, 2), (2, 1, 2)], ids=str)
def test_and_with_the_time_cut(axes):
    expected = trained("llama", tree=True, sequence=True)
    same(trained("llama", axes, tree=True, sequence=True), expected, losses=False)


STAGES = [("llama", "1F1B", (2, 1, 2)), ("vit", "GPipe", (2, 2, 2)), ("llama", "Interleaved1F1B", (2, 2, 1))]


@pytest.mark.parametrize(("kind", "schedule", "axes"), STAGES)
def test_and_so_do_stages(kind, schedule, axes):
    same(trained(kind, axes, tree=True, schedule=schedule), trained(kind, tree=True), losses=False)


@pytest.mark.parametrize(("schedule", "sequence"), [("1F1B", False), ("ZB-H1", True)])
def test_tied_weights_of_two_stages_and_late_gradients(schedule, sequence):
    """The sum of what two stages add to it is the same on any tp, but not that of one stage."""
    expected = trained("gpt", (2, 1, 1), sequence=sequence)
    same(trained("gpt", (2, 1, 2), schedule=schedule, sequence=sequence), expected, losses=False)
    assert differ(trained("gpt", sequence=sequence), expected)


def test_generation_of_one_token_has_the_same_logits():
    def logits(tp):
        mesh = init_device_mesh("cpu", (tp,), ("tp",))
        model = parallelize_module(KINDS["gpt"](), mesh, plan_of(KINDS["gpt"]())).eval()
        invariant(model)
        with no_grad():
            return model(np.array([[5]])).numpy()

    expected = run_ranks(1, logits, 1)[0]
    for found in run_ranks(4, logits, 4):
        np.testing.assert_array_equal(found, expected)


def test_sums_of_parts_are_the_tree_that_ranks_go_on_with():
    numbers = np.random.default_rng(0).standard_normal((8, 3, 5)).astype(np.float32)

    def total(some):
        out = np.empty((3, 5), np.float32)
        in_parts.add_neighbours(out, len(some), lambda part, to: np.copyto(to, some[part]), np.dtype("f4"))
        return out

    expected = np.empty(15, np.float32)
    combine(expected, [part.ravel() for part in numbers])
    for ranks in (1, 2, 4, 8):
        each = [total(some).ravel() for some in np.split(numbers, ranks)]
        combine(each[0], list(each))
        np.testing.assert_array_equal(each[0], expected)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_its_memory_is_planned(sequence):
    def peaks():
        model = make("gpt", n_embd=64, block_size=64, vocab_size=256, dropout=0.0)
        invariant(model, plan=plan_of(model, sequence_parallel=sequence))
        fully_shard(model)
        tokens, here = np.zeros((8, 64), int), device.current()
        planned = memory_plan(model, step=lambda: model(tokens, tokens).backward())
        model(tokens, tokens).backward()
        model.zero_grad()
        gc.collect()
        before = here._pool.held_bytes
        here._pool.peak_bytes = before
        model(tokens, tokens).backward()
        return planned.device["activations"], here.peak_bytes() - before

    (found,) = run_ranks(1, peaks)
    assert found[0] == found[1]


class Own(SequenceParallel):
    put_in_parts = Style.put_in_parts


def cut(model, mesh):
    return parallelize_module(model, mesh, plan_of(model))


def after_it_was_sharded(model, mesh):
    fully_shard(model)
    invariant(model, plan=plan_of(model, sequence_parallel=True))


def odd_times(model, mesh):
    invariant(model, plan=plan_of(model, sequence_parallel=True))
    model(np.zeros((1, 6), int), np.zeros((1, 6), int)).backward()


def two_layers(model, mesh):
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    invariant(parallelize_module(layers, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()}))


def refusals(ranks, *rows):
    """(call with a GPT and a mesh of "tp", exception, words), as for lab.refusals."""
    made = [
        (lambda call=call: call(KINDS["gpt"](), init_device_mesh("cpu", (ranks,), ("tp",))), *message)
        for call, *message in rows
    ]
    return lab.refusals(*made, ranks=ranks, everywhere=True, literal=True)


DOWN = {"blocks.*.mlp.down": RowwiseParallel()}
test_what_one_rank_refuses = refusals(
    1,
    (lambda m, _: invariant(m, 3, plan=plan_of(m)), "parts must be a power of two, got 3"),
    (lambda m, _: invariant(m, 0, plan=plan_of(m)), "parts must be a power of two, got 0"),
    (
        lambda m, _: invariant(m, 32, plan=DOWN),
        "32 parts must divide the 176 inputs of 'blocks.0.mlp.down'",
    ),
    (
        lambda m, _: invariant(m, 64, plan={"wte": plan_of(m)["wte"]}),
        "'wte' must have at least 64 rows, one for each part, got 37",
    ),
    (lambda m, _: invariant(m, plan={"norm": Own()}), "the style Own of 'norm' does not support it"),
    (lambda m, _: invariant(m), "pass the plan that would split it, plan=plan_of(model)"),
    (
        lambda m, _: invariant(nn.add_lora(m, 2, targets=("*.up",)), plan=plan_of(m)),
        "'blocks.0.mlp.up' has a LoRA adapter, which is not supported",
    ),
    (after_it_was_sharded, RuntimeError, "with SequenceParallel call it before pipeline_stages"),
    (odd_times, "6 positions can't be split into 4 equal parts"),
)
test_what_two_ranks_refuse = refusals(
    2,
    (
        lambda m, mesh: invariant(cut(m, mesh), 8),
        "8 parts must divide the 4 heads of 'blocks.0.attention.qkv'",
    ),
    (
        lambda m, mesh: invariant(cut(m, mesh), plan=plan_of(m)),
        "the model has the plan of parallelize_module already",
    ),
    (lambda m, mesh: invariant(cut(m, mesh), 2 + 2 * mesh.rank), "ranks [1] passed other parts than rank 0"),
)
test_what_three_ranks_refuse = refusals(3, (two_layers, "the number of ranks must be a power of two, got 3"))
test_what_four_ranks_refuse = refusals(
    4, (lambda m, mesh: invariant(cut(m, mesh), 2), "parts must be at least 4, the number of ranks, got 2")
)
