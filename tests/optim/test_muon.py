"""Muon next to torch.optim.Muon, and on several ranks."""

import json
from contextlib import nullcontext

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, device, dtypes, nn, optim
from shardrt.checkpoint import (
    CheckpointManager,
    full_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from shardrt.comm import thread
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, no_sync
from shardrt.nn.extents import take
from shardrt.optim.muon import newton_schulz
from shardrt.optim.muon.exchange import owners_of
from tests import lab
from tests.parallel import meshes, routed

SHAPES = ((12, 40), (40, 12), (24, 24), (12, 40))


def pairs(steps, seed=0):
    rng = np.random.default_rng(seed)
    start = [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]
    return start, [[rng.normal(size=shape).astype(np.float32) for shape in SHAPES] for _ in range(steps)]


def by_shardrt(start, gradients, **how):
    layers = [nn.Linear(shape[1], shape[0], bias=False) for shape in SHAPES]
    for layer, values in zip(layers, start, strict=True):
        layer.weight.data[...] = values
    optimizer = optim.Muon([layer.weight for layer in layers], **how)
    for step in gradients:
        for layer, values in zip(layers, step, strict=True):
            layer.weight._gradient_target()[0][...] = values
        optimizer.step()
        optimizer.zero_grad()
    return [np.array(layer.weight.data) for layer in layers]


def by_torch(start, gradients, **how):
    torch = pytest.importorskip("torch")
    weights = [torch.nn.Parameter(torch.tensor(values)) for values in start]
    optimizer = torch.optim.Muon(weights, **how)
    for step in gradients:
        for weight, values in zip(weights, step, strict=True):
            weight.grad = torch.tensor(values)
        optimizer.step()
    return [weight.detach().numpy() for weight in weights]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_its_weights_are_those_of_torch_in_float32(nesterov, adjust, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's own lines, unrounded
    how = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust}
    start, gradients = pairs(50)
    for found, expected in zip(
        by_shardrt(start, gradients, **how), by_torch(start, gradients, **how), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_its_bfloat16_is_that_of_torch():
    start, gradients = pairs(1)
    found = by_shardrt(start, gradients, lr=1.0, weight_decay=0.0, ns_dtype=dtypes.bfloat16)
    for own, expected in zip(found, by_torch(start, gradients, lr=1.0, weight_decay=0.0), strict=True):
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-6)


def test_fifty_steps_in_bfloat16_stay_as_near_as_its_rounding():
    start, gradients = pairs(50)
    found = by_shardrt(start, gradients, lr=0.02, ns_dtype=dtypes.bfloat16)
    for own, expected in zip(found, by_torch(start, gradients, lr=0.02), strict=True):
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-3)


def give_gradients(model, step):
    """Gradients that are the same on any ranks, where there are any."""
    random = np.random.default_rng(step)
    for parameter in model.parameters():
        whole = random.normal(size=parameter.whole_shape).astype(np.float32)
        if parameter.grad is None:
            continue
        here = device.of(parameter.grad)
        parameter.grad.reshape(-1)[...] = here.asarray(take(parameter.extents, whole))


def trained(steps=3, strategy="", make=lab.Net, counts=None, folder=None, resume=False, **settings):
    """Whole weights and optimizer state, on rank 0, after these steps; "" trains a plain model."""
    model, mesh = (
        lab.build(make, strategy=strategy, wrap=counts, **settings) if strategy else (lab.seeded(make), None)
    )
    optimizer = optim.Muon(optim.muon_groups(model, 0.1), lr=0.02)
    manager = None if folder is None else CheckpointManager(folder, model, optimizer, mesh)
    for step in range(manager.restore()[0] if resume else 0, steps):
        lab.backward(model, mesh)
        give_gradients(model, step)
        if counts is not None:
            counts.reset()
        lab.update(optimizer)
    if manager is not None and not resume:
        manager.save(steps)
    return full_state_dict(model), get_optimizer_state_dict(model, optimizer)


class Wide(lab.Net):
    """Its matrices are larger than a cache line."""

    def __init__(self):
        super().__init__(width=24)


SHARDED = [
    ("FULL_SHARD", 1, Wide),
    ("FULL_SHARD", 2, Wide),
    ("FULL_SHARD", 4, lab.Net),
    ("FULL_SHARD", 8, Wide),
    ("SHARD_GRAD_OP", 3, Wide),
    ("SHARD_OPT", 2, lab.Net),
    ("NO_SHARD", 2, lab.Net),
    ("HYBRID_SHARD", 4, Wide),
]


@pytest.mark.parametrize("strategy, ranks, make", SHARDED)
def test_equal_gradients_give_equal_bits_on_any_ranks(strategy, ranks, make):
    lab.assert_equal(lab.first(ranks, trained, 3, strategy, make), trained(3, make=make), strategy)


class Alternates(Wide):
    """Leaves out its second block in every other step."""

    calls = 0

    def run_blocks(self, x):
        self.calls += 1
        for number, block in enumerate(self.blocks):
            x = x if number == 1 and self.calls % 2 else block(x)
        return x


@pytest.mark.filterwarnings("ignore:fully_shard. expected unit")
def test_a_matrix_without_a_gradient_is_left_alone():
    found = lab.first(2, trained, 4, "FULL_SHARD", Alternates)
    lab.assert_equal(found, trained(4, make=Alternates))


def test_gathers_in_bfloat16_change_no_bit_of_an_update():
    policy = MixedPrecisionPolicy("bfloat16", "float32")
    found = lab.first(2, trained, 3, "FULL_SHARD", Wide, mp_policy=policy)
    lab.assert_equal(found, trained(3, make=Wide))


@lab.on_ranks(2)
def test_accumulated_gradients_make_one_update():
    weights = []
    for parts in (1, 2):
        model, mesh = lab.build(Wide)
        optimizer = optim.Muon(optim.muon_groups(model, 0.1), lr=0.02)
        tokens, targets = lab.rows(mesh, *lab.batches(1)[0])
        for part in range(parts):
            own = slice(part * len(tokens) // parts, (part + 1) * len(tokens) // parts)
            with no_sync(model) if part < parts - 1 else nullcontext():
                (lab.loss_of(model, tokens[own], targets[own]) * (1 / parts)).backward()
        lab.update(optimizer)
        weights.append(full_state_dict(model))
    lab.assert_close(*weights, rtol=0, atol=1e-4)


@pytest.mark.parametrize("offload", [{}, {"step": "host"}, {"parameters": False, "gradients": False}])
def test_offloaded_arrays_are_updated_to_the_same_bits(offload):
    found = lab.first(2, trained, 3, "FULL_SHARD", Wide, offload_policy=CPUOffloadPolicy(**offload))
    lab.assert_equal(found, trained(3, make=Wide))


def test_what_two_ranks_saved_four_and_one_go_on_with(tmp_path):
    lab.first(2, trained, 2, "FULL_SHARD", folder=tmp_path)
    expected = trained(4)
    for ranks in (4, 1):
        found = lab.first(ranks, trained, 4, "FULL_SHARD", folder=tmp_path, resume=True)
        lab.assert_equal(found, expected, ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_receives_its_matrices_and_its_shards(ranks):
    def received():
        counts = lab.Counts()
        model, mesh = lab.build(Wide, strategy="FULL_SHARD", wrap=counts)
        optimizer = optim.Muon(optim.muon_groups(model, 0.1))
        for _ in range(2):
            lab.backward(model)
            counts.reset()
            lab.update(optimizer)
        matrices = [p for piece in optimizer.slices for p, group in piece.members if group == 0]
        sizes, held = [p.size for p in matrices], [p.shard.size for p in matrices]
        owned = [owner == mesh.rank for owner in owners_of([p.shape for p in matrices], ranks)]
        formula = 4 * (np.dot(owned, sizes) + sum(held) - 2 * np.dot(owned, held))
        return (*counts.bytes("all_to_all"), formula, *counts.calls("all_to_all"), sum(sizes))

    found = thread.run(ranks, received)
    assert [each[0] for each in found] == [each[1] for each in found]
    assert {each[2] for each in found} == {2}
    assert sum(each[0] for each in found) <= 4 * 2 * found[0][3]  # all ranks together: twice the matrices


def test_owners_share_the_flops():
    shapes = [(64, 256), (256, 64), (64, 192), (64, 64)] * 6
    for ranks in (1, 2, 3, 4, 8):
        owners, load = owners_of(shapes, ranks), [0] * ranks
        for shape, owner in zip(shapes, owners, strict=True):
            load[owner] += newton_schulz.flops(shape)
        assert max(load) - min(load) <= newton_schulz.flops((64, 256)), ranks


def test_groups_have_the_hidden_matrices():
    model = lab.seeded()
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optim.muon_groups(model, 0.1)
    names = [sorted(known[id(p)] for p in group["params"]) for group in groups]
    assert [group["use_muon"] for group in groups] == [True, False, False]
    assert names[0] == sorted(f"blocks.{i}.{each}.weight" for i in range(3) for each in ("up", "down"))
    assert names[1] == ["embed.weight"]


def updated(net, on, steps=1, folder=None, first=0):
    """Whole weights and optimizer state, on rank 0, after updates of given gradients on a mesh.

    folder: of checkpoints; with `first` it goes on from the newest, else it saves one.
    """
    shardrt.manual_seed(3)
    model = meshes.NETS[net]()
    mesh, data = meshes.spread(model, on)
    optimizer = optim.Muon(optim.muon_groups(model, 0.1), lr=0.02)
    manager = None if folder is None else CheckpointManager(folder, model, optimizer, mesh)
    if first:
        assert manager.restore()[0] == first
    for _ in range(first, steps):
        meshes.learn(model, mesh, *lab.rows(data, *meshes.batch()))
        lab.give_gradients(model)
        lab.update(optimizer)
    if folder is not None and not first:
        manager.save(steps)
    return full_state_dict(model), get_optimizer_state_dict(model, optimizer)


EVERY = meshes.MESHES | meshes.STAGED
LLAMAS = ("tp 4, sp", "copies 2, dp 2, tp 2", "pp 2, tp 2")  # two ranks have a head of keys together


@pytest.mark.parametrize("net, names", [("gpt", EVERY), ("llama", LLAMAS)])
def test_every_mesh_makes_the_same_update(net, names):
    expected = lab.first(1, updated, net, meshes.Mesh())
    for name in names:
        lab.assert_equal(lab.first(EVERY[name].ranks, updated, net, EVERY[name]), expected, name)


def test_what_one_mesh_saved_others_go_on_with(tmp_path):
    expected = lab.first(1, updated, "gpt", meshes.Mesh(), 2)
    names = ("pp 2, dp 2", "copies 2, tp 2", "dp 3")
    for name, other in zip(names, (*names[1:], names[0]), strict=True):
        lab.first(EVERY[name].ranks, updated, "gpt", EVERY[name], 1, tmp_path / name)
        found = lab.first(EVERY[other].ranks, updated, "gpt", EVERY[other], 2, tmp_path / name, 1)
        lab.assert_equal(found, expected, f"{name} to {other}")


def routed_update(shards, ep):
    """As `updated`, of a model with experts, whose own parameters are AdamW's."""
    model, data = routed.spread(shards, ep)
    optimizer = optim.Muon(optim.muon_groups(model, 0.1), lr=0.02)
    model(Tensor(routed.tokens_of(data.size, data.rank))).backward()
    lab.give_gradients(model)
    optimizer.step()
    return full_state_dict(model), get_optimizer_state_dict(model, optimizer)


def test_experts_on_other_ranks_change_no_bit():
    expected = lab.first(1, routed_update, 1, 1)
    for shards, ep in ((1, 2), (2, 2)):
        lab.assert_equal(lab.first(shards * ep, routed_update, shards, ep), expected, (shards, ep))


def test_its_memory_is_planned_to_the_byte():
    found = list(map(json.loads, lab.printed(2, "-m", "tests.optim.muon_memory")))
    assert len(found) == 6
    for planned, taken in found:
        assert planned == taken


def test_hidden_matrices_have_no_second_moment():
    model = lab.seeded(Wide)
    optimizer = optim.Muon(optim.muon_groups(model, 0.1))
    hidden = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    for piece in optimizer.slices:
        (parameter, _), *_ = piece.members
        expected = 0 if id(parameter) in hidden else parameter.size
        assert (piece.state["m"].size, piece.state["v"].size) == (parameter.size, expected)


def test_momenta_of_torch_are_taken_over():
    torch = pytest.importorskip("torch")
    start, gradients = pairs(3)
    weights = [torch.nn.Parameter(torch.tensor(values)) for values in start]
    theirs = torch.optim.Muon(weights, lr=0.02, nesterov=False)
    model = nn.Sequential(*(nn.Linear(shape[1], shape[0], bias=False) for shape in SHAPES))
    ours = optim.Muon(model.parameters())
    for weight, values in zip(weights, gradients[0], strict=True):
        weight.grad = torch.tensor(values)
    theirs.step()
    set_optimizer_state_dict(model, ours, theirs.state_dict())
    group = ours.param_groups[0]
    assert (group["lr"], group["nesterov"], group["ns_steps"]) == (0.02, False, 5)
    found = get_optimizer_state_dict(model, ours)["state"]
    for entry, weight in zip(found.values(), weights, strict=True):
        assert entry.keys() == {"step", "momentum_buffer"}
        np.testing.assert_array_equal(entry["momentum_buffer"], theirs.state[weight]["momentum_buffer"])


test_what_cannot_be_is_refused = lab.refusals(
    (
        lambda: optim.Muon(nn.Linear(3, 2).parameters()),
        ValueError,
        "Muon: parameter 'bias' has 1 axes, and use_muon=True needs 2; make groups with muon_groups",
    ),
    (
        lambda: optim.Muon(nn.Linear(3, 2, bias=False).parameters(), momentum=1.0),
        ValueError,
        "Muon: momentum must be in",
    ),
    (
        lambda: optim.Muon(nn.Linear(3, 2, bias=False).parameters(), adjust_lr_fn="rms"),
        ValueError,
        "Muon: adjust_lr_fn must be 'original' or 'match_rms_adamw', got 'rms'",
    ),
)
