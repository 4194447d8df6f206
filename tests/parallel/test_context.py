"""parallel/context.py: sequences on several ranks, beside one rank that has the whole of them."""

import copy
from contextlib import nullcontext
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

import shardrt
from models.plans import plan_of
from models.sampling import ByteText, generate
from models.vit import SIZES, ViT
from shardrt import Tensor, no_grad, optim
from shardrt import functional as F
from shardrt.comm import init_device_mesh, objects
from shardrt.fsdp import (
    explain,
    fully_shard,
    memory_plan,
    set_world_invariant,
)
from shardrt.functional.context import context_attention, positions_of
from shardrt.parallel import (
    ColwiseParallel,
    ContextParallel,
    context_plan,
    parallelize_module,
    set_tensor_invariant,
    shard_sequence,
)
from shardrt.train.config import SampleConfig
from tests import lab
from tests.gradcheck import normal
from tests.parallel.nets import (
    BATCH,
    PLAN,
    TIME,
    alone,
    batch_of,
    build,
    data_of,
    make,
    mesh_of,
    moved,
    part_of,
    same_bits,
    same_to_1e5,
    trained,
)
from tests.parallel.sequences import planned
from tests.ranks import run_ranks

HEADS, KV_HEADS, WIDTH = 4, 2, 3
DOCUMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2], [5] * 16])


# --- the op


def attention(ranks, x, dy, starts=None, window=None):
    """y and dx of the whole, from parts on several ranks; in the order of time."""

    def part():
        mesh = init_device_mesh("cpu", (ranks,), ("cp",))
        own = positions_of(x.shape[1], mesh.rank, ranks)
        qkv = Tensor(x[:, own].copy(), requires_grad=True)
        begins = None if starts is None else starts[:, own].copy()
        for role in ("context", "control"):
            mesh.communicator(role)
        y = context_attention(qkv, HEADS, mesh, kv_heads=KV_HEADS, starts=begins, window=window)
        y.backward(dy[:, own].copy())
        return own, y.data, qkv.grad

    y, dx = np.full(dy.shape, np.nan, x.dtype), np.full(x.shape, np.nan, x.dtype)
    for own, part_y, part_dx in run_ranks(ranks, part):
        y[:, own], dx[:, own] = part_y, part_dx
    return y, dx


PACKED = normal(2, 16, (HEADS + 2 * KV_HEADS) * WIDTH)
DY = normal(2, 16, HEADS * WIDTH, seed=1)


@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 50])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_is_the_attention_of_one_rank(ranks, window, documents):
    starts = F.document_starts(DOCUMENTS) if documents else None
    whole = Tensor(PACKED, requires_grad=True)
    expected = F.self_attention(whole, HEADS, kv_heads=KV_HEADS, starts=starts, window=window)
    expected.backward(DY)
    y, dx = attention(ranks, PACKED, DY, starts, window)
    np.testing.assert_allclose(y, expected.data, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(dx, whole.grad, rtol=1e-11, atol=1e-13)


def test_ranks_have_the_same_number_of_pairs():
    """Of a query and a key that it sees."""
    for ranks in (1, 2, 3, 8):
        pairs = [int((positions_of(4 * ranks, rank, ranks) + 1).sum()) for rank in range(ranks)]
        assert len({*pairs}) == 1
        every = np.concatenate([positions_of(4 * ranks, rank, ranks) for rank in range(ranks)])
        assert sorted(every) == [*range(4 * ranks)]


# --- training


@pytest.mark.parametrize(
    ("kind", "cp"), [("gpt", 2), ("gpt", 4), ("llama 1", 4), ("llama 2", 2), ("llama 4", 2)]
)
def test_it_trains_as_on_one_rank_with_documents(kind, cp):
    """Dropout of GPT included: the masks are those of whole sequences."""
    same_to_1e5(trained(kind, {"cp": cp}, True, 3), alone(kind, True, 3))


OTHER_AXES = {
    "copies 2": {"copies": 2},
    "tp 2": {"tp": 2},
    "tp 4, sp": {"tp": 4, "sequence": True},
    "copies 2, tp 2, sp": {"copies": 2, "tp": 2, "sequence": True},
}


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "gpt") for name in OTHER_AXES), ("tp 2", "llama 2"), ("tp 4, sp", "llama 2")]
)
def test_beside_other_axes(name, kind):
    axes = {"cp": 2, **OTHER_AXES[name]}
    sequence = axes.pop("sequence", False)
    same_to_1e5(trained(kind, axes, sequence=sequence, first="cp" if name == "tp 2" else "tp"), alone(kind))


def test_beside_fsdp_with_the_same_bits_each_time():
    found, again = (trained("gpt", {"shards": 2, "cp": 2}, True, 3) for _ in range(2))
    same_bits(again, found)
    same_to_1e5(found, alone("gpt", True, 3))
    lab.assert_equal(found["initial"], alone("gpt", True, 3)["initial"])


def by_a_tree(axes, sequence):
    """(losses of all micro-batches in their order, norms, weights) in micro-batches of one sequence."""
    mesh = mesh_of(**axes)
    model, plan = make("gpt"), plan_of(make("gpt"), sequence_parallel=sequence)
    for axis, own in ((mesh["tp"], plan), (mesh["cp"], PLAN)):
        parallelize_module(model, axis, own)
    set_tensor_invariant(model, 2)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=data_of(mesh))
    set_world_invariant(model, BATCH)
    rows, losses = mesh["dp_replicate", "dp_shard"], []

    def step(number):
        tokens, targets = batch_of(number)
        for row in range(rows.rank, BATCH, rows.size):
            part = shard_sequence(tokens[[row]], targets[[row]], mesh=mesh["cp"])
            loss = model(**part._asdict(), reduction="sum") * (1 / (BATCH * TIME))
            loss.backward()
            losses.append((number, row, mesh.rank_of("cp"), loss.item()))

    found = lab.learn(model, step, optimizer=partial(optim.AdamW, lr=1e-2), clip=0.5)
    everyone = objects.all_gather_object(mesh.communicator("control"), losses)
    return sorted({tuple(each) for own in everyone for each in own}), found["norms"], found["final"]


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_with_a_tree_over_micro_batches_and_parts_of_modules_other_axes_change_no_bit(sequence):
    """Both modes, with dropout. How many ranks share a sequence does."""
    expected = run_ranks(2, by_a_tree, {"cp": 2}, sequence=sequence)[0]
    for axes in ({"shards": 2, "cp": 2}, {"cp": 2, "tp": 2}, {"copies": 2, "cp": 2, "tp": 2}):
        found = run_ranks(int(np.prod([*axes.values()])), by_a_tree, axes, sequence=sequence)[0]
        lab.assert_equal(found, expected)
    (alone,) = run_ranks(1, by_a_tree, {}, sequence=sequence)
    np.testing.assert_allclose(alone[1], expected[1], rtol=1e-5)
    assert alone[1] != expected[1]


# --- without a backward


def test_whole_sequences_on_each_rank_or_parts_and_text_is_made():
    def evaluated(cp):
        mesh = mesh_of(cp=cp)
        model = build("llama 2", mesh, changes={"vocab_size": 256}).eval()
        tokens, targets = np.random.default_rng(0).integers(0, 256, (2, 2, TIME))
        part = shard_sequence(tokens, targets, mesh=mesh["cp"])
        with no_grad():
            whole = model(tokens).data.copy(), model(tokens, targets, reduction="sum").item()
            parts = model(**part._asdict(), reduction="sum").item()
        text = generate(model, SampleConfig(prompt="ab", length=6), ByteText(), block_size=TIME, seed=0)
        return *whole, parts, text

    ((logits, loss, _, text),) = run_ranks(1, evaluated, 1)
    ranks = run_ranks(2, evaluated, 2)
    for found in ranks:
        np.testing.assert_array_equal(found[0], logits)
        assert found[1] == loss and found[3] == text
    assert sum(found[2] for found in ranks) == pytest.approx(loss, rel=1e-6)


# --- what it moves and takes


@pytest.mark.parametrize(("kind", "size"), [("gpt", 2), ("llama 1", 2), ("llama 2", 4)])
def test_keys_and_values_of_each_head_are_gathered_twice_and_their_gradients_sent_once(kind, size):
    def rank():
        mesh = init_device_mesh("cpu", (size,), ("cp",))
        model = make(kind)
        parallelize_module(model, mesh, PLAN)
        fully_shard(model, mesh=mesh)
        text = np.zeros((BATCH, TIME), np.int64)
        part = shard_sequence(text, text, mesh=mesh)
        return moved(mesh.communicator("context"), partial(model, **part._asdict()))

    f, layers, kv_heads = Fraction(size - 1, size), 2, 4 if kind == "gpt" else int(kind[-1])
    x, g = 4 * BATCH * TIME * 32, Fraction(kv_heads, 4)
    gathered = layers * kv_heads, layers * 2 * f * g * x
    for message in run_ranks(size, rank):
        assert message == [{"all_gather": gathered}, {"all_gather": gathered, "reduce_scatter": gathered}]


def test_activations_fall_with_the_ranks_as_planned():
    alone, two, four = (planned(cp) for cp in (1, 2, 4))
    assert len({*two}) == len({*four}) == 1
    assert two[0] < 0.6 * alone[0] and four[0] < 0.4 * alone[0]


@pytest.mark.mpi
def test_two_processes_have_the_bits_of_two_threads_and_take_what_was_planned(tmp_path):
    lab.printed(2, "-m", "tests.parallel.sequences", str(tmp_path / "found"))
    found, threads = dict(np.load(tmp_path / "found.npz")), trained("gpt", {"cp": 2}, True)
    np.testing.assert_array_equal(found["losses"], threads["losses"])
    for name, values in threads["final"].items():
        np.testing.assert_array_equal(found[f"final/{name}"], values, err_msg=name)
    assert found["taken"] == pytest.approx(found["planned"], rel=0.01)


def test_explain_names_the_axes_over_which_a_unit_is_cut():
    (message, _) = run_ranks(2, lambda: explain(build("gpt", mesh_of(cp=2))))
    assert "FULL_SHARD on dp_shard_cp" in message


# --- what is refused


def on_parts(
    spread=lambda model, mesh: fully_shard(model, mesh=data_of(mesh)),
    call=lambda model, batch: model(**batch),
):
    """A step of a GPT that is on two ranks along cp, and sharded so."""

    def step():
        mesh, model = mesh_of(shards=2, cp=2), make("gpt")
        parallelize_module(model, mesh["cp"], PLAN)
        spread(model, mesh)
        call(model, part_of(0, mesh, False))

    return step


test_what_would_train_something_else = lab.refusals(
    (
        on_parts(call=lambda model, batch: model(batch["tokens"], batch["targets"])),
        "train on parts of sequences",
    ),
    (on_parts(lambda model, mesh: None), "the gradient of 'wte.weight' is not summed over"),
    (
        on_parts(lambda model, mesh: fully_shard(model, mesh=mesh["dp_shard"])),
        "alone, not over .*, along which sequences lie",
    ),
    (
        on_parts(call=lambda model, batch: shardrt.nn.Sequential(model)(batch["tokens"])),
        RuntimeError,
        "call it on the outermost module",
    ),
    (
        on_parts(lambda model, mesh: parallelize_module(model, mesh["cp"], PLAN)),
        "'blocks.0.attention' already has sequences on",
    ),
    (on_parts(lambda model, mesh: copy.deepcopy(model)), TypeError, "can't be copied"),
    ranks=4,
)


def at_positions(positions, gradients):
    """Of another part: their keys and masks would be those of the part that the rank has."""
    tokens = np.zeros((2, len(positions)), np.int64)

    def call(model, batch):
        with nullcontext() if gradients else no_grad():
            model(tokens, tokens, positions=positions)

    words = "positions: rank . of 2 has chunk . and chunk . of 4 equal ones"
    return on_parts(call=call), rf"{words}, got {len(positions)} positions \["


test_positions_of_another_part = lab.refusals(
    *(
        at_positions(np.array(positions), gradients)
        for positions, gradients in (
            (range(8), True),  # as many from the beginning
            (range(7, -1, -1), True),  # its own in another order
            (range(16), False),  # of the whole
            (range(7), False),  # an odd number
        )
    ),
    ranks=4,
)
test_lengths_and_models_that_can_not_be_cut = lab.refusals(
    (
        lambda: shard_sequence(np.zeros((2, 10), np.int64), mesh=mesh_of(cp=2)["cp"]),
        "10 positions can't be split into 2 equal chunks for each of 2 ranks; take a multiple of 4",
    ),
    (
        lambda: parallelize_module(ViT(SIZES["vit-digits"]), mesh_of(cp=2)["cp"], PLAN),
        TypeError,
        "is for modules with causal attention",
    ),
    (lambda: context_plan(ViT(SIZES["vit-digits"])), TypeError, "a ViT has no causal attention"),
    (
        lambda: parallelize_module(
            make("gpt"), mesh_of(cp=2)["cp"], PLAN | {"blocks.*.mlp.up": ColwiseParallel()}
        ),
        "ContextParallel needs a plan of its own, without ColwiseParallel",
    ),
    ranks=2,
)


def test_a_plan_of_context_names_each_attention():
    assert [*context_plan(make("gpt"))] == ["blocks.0.attention", "blocks.1.attention"]
    assert isinstance(context_plan(make("llama 2"))["blocks.0.attention"], ContextParallel)


def test_a_plan_of_memory_leaves_the_model_as_it_was():
    def losses(plan):
        mesh = mesh_of(cp=2)
        model = build("llama 2", mesh)
        batch = part_of(0, mesh, True)
        if plan:
            memory_plan(model, step=lambda: model(**batch).backward())
        return model(**batch).item()

    assert run_ranks(2, losses, True) == run_ranks(2, losses, False)
