"""Full gradients in pieces: the same bits as whole ones, in slots that the units inside have as well."""

from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from models.gpt import GPT, GPTConfig
from shardrt import Tensor, device, optim
from shardrt import functional as F
from shardrt.checkpoint import full_state_dict
from shardrt.device.cpu import CPUDevice
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard, memory_plan, no_sync, units
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.options import chunks
from shardrt.fsdp.options.chunks import ChunkedGradient
from shardrt.kernels.cpu import linear
from tests import lab

WIDTH, WORDS = 24, 997
TOKENS = np.random.default_rng(0).integers(0, WORDS, (12, 16))
BATCHES = [np.random.default_rng(i).integers(0, WORDS, (12, 16)) for i in range(3)]


def gpt(wrap=None, **settings):
    mesh = lab.mesh_for(settings.get("strategy"), wrap=wrap)
    config = GPTConfig(n_layer=2, n_head=2, n_embd=WIDTH, block_size=16, vocab_size=WORDS)
    model = lab.seeded(lambda: GPT(config), 1)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings), mesh


@pytest.fixture(autouse=True)
def long_heads(monkeypatch):
    """The head's gradient is long enough to be made by rows."""
    monkeypatch.setattr(linear, "BLOCK", 64)
    monkeypatch.setattr(linear, "TILE", 40)


@pytest.fixture
def all_in_pieces(monkeypatch):
    monkeypatch.setattr(chunks, "IN_CHUNKS", 0)
    monkeypatch.setattr(chunks, "SHORTEST", 0)


def trained(way="usual", **settings):
    """(weights after three steps, reductions of the last, whether the root has the blocks' slots)."""
    counts = lab.Counts()
    model, mesh = gpt(counts, **settings)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, in_backward=way == "in backward")
    own = [np.array_split(batch, mesh.world.size)[mesh.world.rank] for batch in BATCHES]

    def backward(tokens):
        logits = way == "logits"
        (F.cross_entropy(model(tokens), tokens) if logits else model(tokens, tokens)).backward()

    for tokens in own:
        counts.reset()
        if way == "accumulated":
            with no_sync(model):
                backward(tokens[:1])
        if way == "twice":
            backward(tokens[:1])
        backward(tokens)
        if way != "in backward":
            optimizer.step()
        optimizer.zero_grad()
    arenas = [unit.groups[0].arenas["gradients"] for unit in units(model)]
    return full_state_dict(model), *counts.calls("reduce_scatter"), arenas[0] is arenas[1]


@cache
def whole(ranks, way="usual", low=False):
    """`trained` with whole gradients."""
    assert 4 * WORDS * WIDTH < chunks.IN_CHUNKS
    return lab.first(ranks, trained, way, **policy(low))


def policy(low):
    return {"mp_policy": MixedPrecisionPolicy(param_dtype="bfloat16")} if low else {}


@pytest.mark.parametrize("way", ["usual", "twice", "logits", "in backward", "accumulated"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_bits_as_whole(ranks, way, request):
    expected, few, apart = whole(ranks, way)
    request.getfixturevalue("all_in_pieces")
    weights, reductions, shared = lab.first(ranks, trained, way)
    lab.assert_equal(weights, expected)
    assert not apart
    if way == "accumulated":  # what waits for a later backward has a place of its own
        assert reductions == few and not shared
    else:
        assert reductions >= few + 2 and shared


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "SHARD_OPT", "NO_SHARD", "HYBRID_SHARD"])
def test_the_same_bits_for_every_strategy(strategy, request):
    expected, _, _ = whole(4)
    request.getfixturevalue("all_in_pieces")
    weights, _, shared = lab.first(4, trained, strategy=strategy)
    lab.assert_equal(weights, expected)
    assert shared == (strategy == "SHARD_GRAD_OP")  # the others' are reduced more than once, or not cut


def test_gradients_stay_whole_where_matmuls_depend_on_place(all_in_pieces, monkeypatch):
    monkeypatch.setattr(CPUDevice, "matmul_ignores_place", staticmethod(lambda: False))
    assert not lab.first(2, trained)[2]


def test_gradients_stay_whole_where_pieces_would_be_short(monkeypatch):
    """Of a rank's shard of two, a slot has room for 144 rows: 24 * 24 * 12 / 2 elements and biases."""
    monkeypatch.setattr(chunks, "IN_CHUNKS", 0)
    monkeypatch.setattr(chunks, "SHORTEST", 140)
    assert lab.first(2, trained)[2]
    monkeypatch.setattr(chunks, "SHORTEST", 160)
    assert not lab.first(2, trained)[2]


def test_what_travels_in_16_bits_is_in_pieces_too(request):
    expected, few, _ = whole(2, low=True)
    request.getfixturevalue("all_in_pieces")
    weights, reductions, shared = lab.first(2, trained, **policy(True))
    lab.assert_equal(weights, expected)
    assert reductions >= few + 2 and shared


@lab.on_ranks(2)
def test_the_plan_and_the_arenas_have_no_whole_gradient(all_in_pieces):
    model, _ = gpt(**policy(True))
    own = BATCHES[0][:4]
    plan = memory_plan(model, step=lambda: model(own, own).backward()).device
    model(own, own).backward()
    root, block, _ = (unit.groups[0].layout.total for unit in units(model))
    assert root > 3 * block
    arenas = units(model)[0].groups[0].arenas
    made = {role: [slot.array.nbytes for slot in arenas[role].slots] for role in ("gradients", "reduce_wire")}
    assert made == {"gradients": 2 * [4 * block], "reduce_wire": [2 * block]}
    assert plan["full gradients"] == 8 * block and plan["16-bit gradients on the way"] == 2 * block


@lab.on_ranks(2)
def test_gaps_between_parameters_are_zero_where_slots_held_others(all_in_pieces):
    model, mesh = gpt()
    model(BATCHES[0][:2], BATCHES[0][:2]).backward()
    group = units(model)[0].groups[0]
    gradient = np.zeros(group.layout.total)
    gradient[slice(*group.layout.shard_range(mesh.rank))] = group.gradient
    assert group.layout.padding
    assert not any(gradient[start:stop].any() for start, stop in group.layout.padding)


@lab.on_ranks(2)
def test_a_backward_that_raises_leaves_nothing(all_in_pieces):
    model, _ = gpt()
    tokens = BATCHES[0][:2]
    group, found = units(model)[0].groups[0], []
    for fails in (False, True, False):
        with lab.backward_raises(model.blocks[0]) if fails else nullcontext():
            model(tokens, tokens).backward()
        if fails:
            assert isinstance(group.gradient_path, ChunkedGradient) and group.has_unreduced_gradient
        else:
            found.append(lab.gradients(model))
        model.zero_grad()
        assert not group.has_unreduced_gradient and group.arenas["gradients"].in_use == 0
    lab.assert_equal(*found)


@lab.on_ranks(2)
def test_what_is_collected_moves_to_a_whole_gradient(all_in_pieces):
    """no_sync around backward alone: what was collected goes to a whole gradient made later."""
    model, _ = gpt()
    first, second = BATCHES[0][:1], BATCHES[1][:1]
    group, found = units(model)[0].groups[0], []
    for forward_too in (False, True):
        if forward_too:
            with no_sync(model):
                model(first, first).backward()
        else:
            loss = model(first, first)
            with no_sync(model):
                loss.backward()
        assert (
            isinstance(group.gradient_path, ChunkedGradient) != forward_too and group.has_unreduced_gradient
        )
        model(second, second).backward()
        found.append(lab.gradients(model))
        model.zero_grad()
    lab.assert_equal(*found)


def test_an_array_that_is_asked_for_has_what_was_left_before():
    here = device.get("cpu")
    streams = SimpleNamespace(device=here, compute=here.current_stream)
    slots = [SimpleNamespace(array=np.empty(32))]
    arenas = {"gradients": SimpleNamespace(slots=slots)}
    group = SimpleNamespace(runtime=SimpleNamespace(streams=streams), arenas=arenas)
    opened = ChunkedGradient(group, Layout.plan([("a", (20, 4))], 2), 32)
    opened.open()

    def add_ones(first, stop, out, accumulate):
        out[...] = 1 + out if accumulate else 1

    opened.put_rows(0, add_ones)
    array, accumulate = opened.target(0)
    assert accumulate and (array == 1).all()
    opened.put_rows(0, add_ones)
    assert (array == 2).all() and opened.target(0) == (array, True)


def test_an_ops_rows_are_those_of_its_whole_gradient():
    """What the two ops leave: rows of the gradient of a head, and of an embedding."""
    x = Tensor(np.random.default_rng(0).standard_normal((33, WIDTH)).astype(np.float32), requires_grad=True)
    left = []

    class Weight(Tensor):
        def put_rows(self, fill):
            left.append(fill)
            return super().put_rows(fill)

    table = np.random.default_rng(1).standard_normal((300, WIDTH)).astype(np.float32)
    weight = Weight(table, requires_grad=True)
    tokens = np.arange(33) * 7
    F.linear_cross_entropy(x + F.embedding(tokens, weight), weight, tokens, chunk=0).backward()
    rows = np.empty((100, WIDTH), np.float32)
    for number, fill in enumerate(left):
        fill(100, 200, rows, number > 0)
    assert len(left) == 2
    np.testing.assert_array_equal(rows, weight.grad[100:200])
