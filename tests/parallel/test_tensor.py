"""Tensor and sequence parallelism: on any axes the numbers of one rank, and equal bits where they begin."""

from contextlib import nullcontext

import numpy as np
import pytest

import shardrt
from models.cache import KVCache
from models.plans import plan_of
from models.vit import ViT, ViTConfig
from shardrt import functional as F
from shardrt import nn, no_grad, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh
from shardrt.fsdp import check_replicas, explain, fully_shard, memory_plan
from shardrt.nn.module import WrapperOrder
from shardrt.nn.parameter_placement import joined
from shardrt.nn.utils import clip_grad_norm_
from shardrt.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    VocabParallel,
    parallelize_module,
)
from tests import lab
from tests.deferred import always, as_a_pipeline, reducing_last, usual
from tests.parallel.nets import (
    BATCH,
    TIME,
    alone,
    batch_of,
    build,
    data_of,
    make,
    mesh_of,
    same_to_1e5,
    trained,
)
from tests.ranks import run_ranks

KINDS = ("gpt", "llama")
SEQUENCE = pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])


def like_one_rank(found, expected):
    same_to_1e5(found, expected)
    lab.assert_equal(found["initial"], expected["initial"])


@SEQUENCE
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_are_those_of_one_rank(kind, tp, sequence):
    """A Llama on four ranks has fewer heads of keys and values than ranks."""
    like_one_rank(trained(kind, {"tp": tp}, steps=3, sequence=sequence, sharded=False), alone(kind, steps=3))


@SEQUENCE
@pytest.mark.parametrize("kind", KINDS)
def test_sharding_cuts_what_is_left(kind, sequence):
    found = trained(kind, {"copies": 2, "shards": 2, "tp": 2}, steps=3, sequence=sequence)
    like_one_rank(found, alone(kind, steps=3))


CHANGES = {
    "one head of keys and values": ("llama", {"n_kv_head": 1}),
    "a head of its own": ("llama", {"tied": False}),
    "a loss in chunks": ("gpt", {"loss_chunk": 8}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_models_differ_in_is_cut_too(name):
    kind, changes = CHANGES[name]
    found = trained(kind, {"tp": 4}, sequence=True, changes=changes)
    same_to_1e5(found, alone(kind, **changes))


def test_each_rank_has_its_part_of_the_weights_and_no_more():
    def sizes(tp):
        model = build("llama", mesh_of(tp=tp), sharded=False)
        return {name: parameter.shape for name, parameter in model.named_parameters()}

    whole, parts = run_ranks(1, sizes, 1)[0], run_ranks(4, sizes, 4)
    for name, shape in whole.items():
        held = [np.prod(part[name]) for part in parts]
        times = 4 if "norm" in name else 1
        assert sum(held) == times * np.prod(shape), name


def gradients_of_norms_around_an_error():
    """After a backward, after a second one that raises, and after a third."""
    model, found = build("llama", mesh_of(tp=2), sequence=True, sharded=False), []
    for raises in (False, True, False):
        with lab.backward_raises(model.blocks[0]) if raises else nullcontext():
            model(*batch_of(0)).backward()
        norms = (module.weight for module in model.modules() if isinstance(module, nn.RMSNorm))
        found.append([np.array(weight.grad) for weight in norms])
    return found


def test_a_backward_that_raises_leaves_no_gradient_that_is_not_summed():
    """Such gradients would differ between ranks, and with them what is the same on all of them."""
    ranks = run_ranks(2, gradients_of_norms_around_an_error)
    first, after, third = ranks[0]
    np.testing.assert_array_equal(after, first)
    np.testing.assert_allclose(third, 2 * np.array(first), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(ranks[0], ranks[1])


def with_a_whole_vocabulary(tp):
    """Embedding by its part of the time, a last norm that is put together, and a head that each rank has."""
    model = make("llama", tied=False)
    plan = {path: style for path, style in plan_of(model, sequence_parallel=True).items() if "head" != path}
    plan |= {"embedding": SequenceParallel(), "norm": SequenceParallel(output="whole")}
    parallelize_module(model, init_device_mesh("cpu", (tp,)), plan)
    loss = model(*batch_of(0))
    loss.backward()
    return loss.item(), lab.whole_gradients(model)


def test_the_vocabulary_may_be_whole():
    one, two = (lab.first(tp, with_a_whole_vocabulary, tp) for tp in (1, 2))
    lab.assert_close(two, one, atol=1e-5)


# -- what moves


def saved_bytes(sequence):
    """Of the arrays that the tape of a forward keeps, each once."""
    model = build("llama", mesh_of(tp=2), sequence, sharded=False)
    loss, arrays = model(*batch_of(0)), {}
    for node in shardrt.autograd.reachable({loss.node}):
        # What is gathered again is unpacked by iteration; look at what is kept.
        saved = getattr(node.saved, "_saved", node.saved)
        for item in (*saved, getattr(node.saved, "_own", None)):
            if isinstance(item, np.ndarray):
                base = item if item.base is None else item.base
                arrays[id(base)] = base.nbytes
    return sum(arrays.values())


def test_what_was_gathered_is_not_kept():
    whole, sequence = (lab.first(2, saved_bytes, way) for way in (False, True))
    activation = BATCH * TIME * 32 * 4
    # In each block two norms, their inputs and outputs, halved.
    assert whole - sequence > 4 * 2 * activation / 2


# -- without a backward


def logits_of(kind, tp, sequence):
    """Of a prompt that ranks do not divide and, with a cache, of tokens after it."""
    model = build(kind, mesh_of(tp=tp), sequence).eval()
    tokens, cache, found = np.arange(5)[None], KVCache(2, TIME), []
    with no_grad():
        for _ in range(3):
            found.append(np.array(model(tokens, cache=cache).data[:, -1]))
            tokens = found[-1].argmax(-1)[:, None]
        found.append(np.array([model(*(array[:, :5] for array in batch_of(0))).item()]))
    return found


@SEQUENCE
@pytest.mark.parametrize("kind", KINDS)
def test_generation_and_evaluation_take_any_number_of_positions(kind, sequence):
    expected = run_ranks(1, logits_of, kind, 1, False)
    found = run_ranks(4, logits_of, kind, 4, sequence)
    lab.assert_close(found, expected * 4, atol=1e-5)
    lab.assert_equal(found, found[:1] * 4)


class WithoutRecording:
    layer, every_entry = WrapperOrder.ACTIVATION_OFFLOAD, False

    def run(self, module, forward, *args, **kwargs):
        with no_grad():
            return forward(*args, **kwargs)


def with_a_block_that_is_not_recorded(tp):
    model = build("llama", mesh_of(tp=tp), sequence=True, sharded=False)
    model.blocks[0].wrap_forward(WithoutRecording())
    loss = model(*batch_of(0))
    loss.backward()
    weight = model.blocks[1].mlp.down.weight
    return loss.item(), joined(weight.placement, np.array(weight.grad))


def test_what_a_step_runs_without_recording_is_cut_along_time_as_the_rest():
    one, two = (lab.first(tp, with_a_block_that_is_not_recorded, tp) for tp in (1, 2))
    lab.assert_close(two, one, atol=1e-5)


# -- other models


VIT = {"n_layer": 2, "n_head": 4, "n_embd": 8, "n_hidden": 16, "image_size": 4, "patch_size": 2, "classes": 3}
OTHERS = {
    "vit": lambda: ViT(ViTConfig(**VIT, channels=1)),
    "vit with a mean": lambda: ViT(ViTConfig(**VIT, channels=1, pool="mean")),
    "gpt by its logits": lambda: make("gpt"),
    "gpt with adapters": lambda: nn.add_lora(make("gpt"), 2),
    "llama with adapters": lambda: nn.add_lora(make("llama"), 2),
}


def learned(name, tp, sequence):
    """(loss, whole gradients) of a model whose parameters that start at 0 have other values."""
    model = lab.seeded(OTHERS[name])
    parallelize_module(model, mesh_of(tp=tp)["tp"], plan_of(model, sequence_parallel=sequence))
    for parameter in model.parameters():
        if parameter.name.endswith(("bias", "lora_b")):
            parameter.data = np.full(parameter.shape, 0.3, np.float32)
    inputs, targets = batch_of(0)
    if "vit" in name:
        images = np.random.default_rng(0).standard_normal((3, 1, 4, 4), np.float32)
        inputs, targets = shardrt.Tensor(images), np.arange(3)
    by_logits = "vit" in name or "logits" in name
    loss = F.cross_entropy(model(inputs), targets) if by_logits else model(inputs, targets)
    loss.backward()
    return loss.item(), lab.whole_gradients(model)


@SEQUENCE
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_cut_too(name, sequence):
    if not (sequence and "vit" in name):  # for which there is no such plan
        lab.assert_close(
            lab.first(2, learned, name, 2, sequence), lab.first(1, learned, name, 1, False), atol=1e-5
        )


class TwoLayers(nn.Module):
    def __init__(self, gelu=False):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, gelu=gelu), nn.Linear(8, 5)

    def forward(self, x):
        return self.second(self.first(x))


def two_layers(tp, hooked):
    shardrt.manual_seed(3)
    model, seen = TwoLayers(gelu=True), []
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (tp,)), plan)
    if hooked:
        model.second.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    x = shardrt.Tensor(
        np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32), requires_grad=True
    )
    (model(x) * model(x)).sum().backward()
    return np.array(x.grad), lab.whole_gradients(model), full_state_dict(model), seen


def test_a_model_of_ones_own_needs_two_entries():
    """On a mesh whose axis has no name; the bias of the second is added once, hooks run where they were."""
    *expected, state, _ = lab.first(1, two_layers, 1, False)
    for tp in (2, 4):
        *found, own_state, seen = lab.first(tp, two_layers, tp, True)
        lab.assert_close(found, expected, atol=1e-5)
        lab.assert_equal(own_state, state)
        assert seen == [(3, 8 // tp)] * 2


class TiedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(self.norm(self.words(tokens)))


def tied_head(tp):
    shardrt.manual_seed(3)
    model, tokens = TiedHead(), np.arange(8).reshape(2, 4)
    plan = {"words": VocabParallel(), "norm": SequenceParallel(), "head": VocabParallel()}
    parallelize_module(model, init_device_mesh("cpu", (tp,)), plan)
    loss = F.cross_entropy(model(tokens), tokens)
    loss.backward()
    return loss.item(), lab.whole_gradients(model)


def test_a_head_that_is_called_gives_the_logits_of_all_words():
    found = lab.first(2, tied_head, 2)
    assert found[1].keys() == {"words.weight", "norm.weight", "norm.bias"}
    lab.assert_close(found, lab.first(1, tied_head, 1), atol=1e-5)


@lab.on_ranks(1)
def test_an_axis_of_one_rank_changes_nothing():
    model = make("gpt")
    parallelize_module(model, mesh_of()["tp"], plan_of(model, sequence_parallel=True))
    assert not any(module._forward_wrappers for module in model.modules())
    assert not any(parameter.placement for parameter in model.parameters())


@lab.on_ranks(4)
def test_a_batch_part_is_that_of_the_other_axes():
    mesh = mesh_of(copies=2, tp=2)
    part = build("gpt", mesh, sharded=False).batch_block.part
    assert part == data_of(mesh).rank == mesh.rank // 2


# -- beside what else there is: of which tests/fsdp/test_pairs.py has most

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


def in_halves(way, kind, axes, sequence, sharded, changes):
    """Of this rank, and the calls of all communicators."""
    counts = lab.Counts()
    mesh = mesh_of(**axes, wrap=counts)
    model = build(kind, mesh, sequence, sharded=sharded, changes=changes)
    shardrt.manual_seed(3, step=1)
    way(lambda number: model(*batch_of(number, mesh)), reducing_last(model) if sharded else always)
    return {name: p.grad for name, p in model.named_parameters()}, counts.all_calls()


@SEQUENCE
@pytest.mark.parametrize(
    ("kind", "axes", "sharded", "changes"),
    [
        ("llama", {"tp": 2}, False, None),  # each backward sums what sequence parallelism leaves partial
        ("gpt", {"shards": 2, "tp": 2}, True, {"loss_chunk": 5}),
    ],
)
def test_halves_have_the_bits_and_collectives_of_usual_backwards(kind, axes, sequence, sharded, changes):
    how = (kind, axes, sequence, sharded, changes)
    ranks = int(np.prod([*axes.values()]))
    expected, found = (run_ranks(ranks, in_halves, way, *how) for way in (usual, as_a_pipeline))
    lab.assert_equal(found, expected)
    assert all(gradient is not None for gradients, _ in expected for gradient in gradients.values())
