"""How a model is cut into stages: into pieces, by what they cost, by hand, and what is refused."""

import copy
import re
from contextlib import nullcontext
from itertools import combinations, pairwise

import numpy as np
import pytest

import shardrt
from models.regnet import SIZES as REGNETS
from models.regnet import RegNet
from models.vit import SIZES as VITS
from models.vit import ViT
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict, get_optimizer_state_dict
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard, set_world_invariant
from shardrt.parallel import parallelize_module, pipeline_stages
from shardrt.parallel.cut import balanced
from shardrt.parallel.schedules import schedule
from shardrt.parallel.times import piece_times
from tests import lab
from tests.parallel.staged import gpt, images, llama, mesh_of, text, two_stages
from tests.ranks import run_ranks


def brute(costs, parts):
    """(largest, sum of squares) of the best of all cuts."""
    cuts = combinations(range(1, len(costs)), parts - 1)
    sums = ([sum(costs[a:b]) for a, b in pairwise((0, *cut, len(costs)))] for cut in cuts)
    return min((max(found), sum(each * each for each in found)) for found in sums)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_the_largest_stage_is_as_small_as_can_be(parts):
    generator = np.random.default_rng(parts)
    for _ in range(20):
        costs = generator.integers(0, 9, 8).tolist()
        begins = balanced(costs, parts)
        found = [sum(costs[a:b]) for a, b in pairwise((*begins, len(costs)))]
        assert (max(found), sum(each * each for each in found)) == brute(costs, parts)
        assert len(begins) == parts and begins == sorted(set(begins)) and begins[0] == 0


def test_stages_are_cut_by_what_they_cost():
    def names(**how):
        shardrt.manual_seed(3)
        mesh = mesh_of(2)
        stages = pipeline_stages(llama(2), mesh["pp"], **how)
        return [piece.name for stage in stages for piece in stage.pieces], [s.number for s in stages]

    message = run_ranks(2, names, costs=[0, 1, 1, 9])
    assert message == [(["embedding", "blocks.0", "blocks.1"], [0]), (["head"], [1])]
    assert run_ranks(2, names, stages=["blocks.0"]) == run_ranks(2, names, stages=[1])
    timed = run_ranks(2, names, costs="time", batch=text()[0])
    assert sum((rank[0] for rank in timed), []) == ["embedding", "blocks.0", "blocks.1", "head"]


MODELS = {
    "gpt": (gpt, lambda: text()[0]),
    "llama": (llama, lambda: text()[0]),
    "tied llama": (lambda: llama(tied=True), lambda: text()[0]),
    "vit": (lambda: ViT(VITS["vit-digits"]), images),
    "regnet": (lambda: RegNet(REGNETS["regnety-digits"]), images),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_pieces_one_after_the_other_are_the_model_to_the_bit(name):
    make, batch_of = MODELS[name]
    found = []
    for in_pieces in (False, True):
        model, batch = lab.seeded(make), batch_of()
        if in_pieces:
            (stage,) = pipeline_stages(model, init_device_mesh("cpu"))
            y = stage(None, batch)
        else:
            y = model(**batch)
        y.sum().backward()
        found.append((y.numpy(), {key: p.grad for key, p in model.named_parameters()}))
    lab.assert_equal(*found)


def test_a_rank_has_the_stages_that_are_placed_on_it():
    def numbers(count, placement):
        stages = pipeline_stages(lab.seeded(llama), mesh_of(2)["pp"], stages=count, placement=placement)
        return [stage.number for stage in stages]

    assert run_ranks(2, numbers, 4, "loop") == [[0, 2], [1, 3]]
    for placement in ("V", [0, 1, 1, 0], schedule("ZBVZeroBubble", 2, 4)):
        assert run_ranks(2, numbers, 4, placement) == [[0, 3], [1, 2]]
    assert run_ranks(2, numbers, 3, {0: 1, 1: 1, 2: 0}) == [[2], [0, 1]]


def test_measuring_costs_leaves_the_model_as_it_was():
    shardrt.manual_seed(3)
    model = RegNet(REGNETS["regnety-digits"])
    expected = {name: np.array(array) for name, array in model.named_buffers()}
    assert min(piece_times(model, images())) > 0
    lab.assert_equal(dict(model.named_buffers()), expected)
    assert not any(p.storage.materialised for p in model.parameters())


class Own(nn.Module):
    """Two layers, whose pieces are as a test says."""

    def __init__(self, pieces):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.given = pieces

    def pieces(self):
        return [nn.Piece(name, lambda x, batch: x, *uses) for name, *uses in self.given(self)]


def tied(model):
    model.b.weight = model.a.weight
    return [("a", (model.a,)), ("b", (model.b,))]


def thrice(model):
    return [("a", (model.a, model.b)), ("b", (), (model.a,)), ("c", (), (model.a,))]


def refusals(*rows):
    """(model, arguments, words)."""
    made = [
        (lambda make=make, how=how: pipeline_stages(make(), mesh_of(2)["pp"], **how), words)
        for make, how, words in rows
    ]
    rows = [(call, (ValueError, TypeError), f"pipeline_stages: .*{re.escape(words)}") for call, words in made]
    return lab.refusals(*rows, ranks=2, everywhere=True)


test_it_is_refused_by_one_line_on_every_rank = refusals(
    (llama, {"stages": 7}, "7 stages need at least 7 pieces, the model has 6"),
    (llama, {"stages": 0}, "0 stages need at least 0 pieces, the model has 6"),
    (llama, {"stages": ["blocks.1", "blocks.1"]}, "stage 1 would have no piece"),
    (llama, {"stages": [0]}, "stage 0 would have no piece"),
    (llama, {"stages": ["blocks.9"]}, "cuts must name pieces (embedding, blocks.0"),
    (llama, {"costs": [1.0] * 5}, "costs must have 6 numbers, one for each of embedding, blocks.0"),
    (llama, {"costs": [1.0] * 5 + [-1.0]}, "must be finite and at least 0"),
    (llama, {"costs": [1.0] * 5 + [np.nan]}, "must be finite and at least 0"),
    (llama, {"costs": "bytes"}, "'parameters', 'time' or numbers, got 'bytes'"),
    (llama, {"costs": "time"}, "needs a micro-batch to measure"),
    (llama, {"placement": "W"}, "unknown placement 'W'; known: 'loop', 'V'"),
    (llama, {"placement": [0]}, "must give the rank of each of 2 stages"),
    (llama, {"placement": [0, 2]}, "names rank 2, but the axis has ranks 0 to 1"),
    (llama, {"placement": [0, 0]}, "rank 1 of the axis has none of the 2 stages"),
    (lambda: nn.Linear(2, 2), {}, "Linear has no method pieces()"),
    (
        lambda: Own(tied),
        {},
        "'a.weight' is used on stages 0 and 1, but piece 'b' does not name it",
    ),
    (lambda: Own(thrice), {"stages": 3}, "'a.weight' is tied between stages 0, 1, 2"),
    (lambda: Own(lambda m: [("a", (m.a,)), ("c", ())]), {}, "'b.weight' is in no piece of Own"),
)


def late(before):
    def attempt():
        model, mesh = llama(), mesh_of(2)
        kept = before(model, mesh)
        assert pipeline_stages(model, mesh["pp"]) and kept

    return attempt


test_stages_are_made_first = lab.refusals(
    (
        late(lambda model, mesh: fully_shard(model, mesh=mesh["dp_shard"])),
        RuntimeError,
        "'embedding.weight' is sharded already",
    ),
    (
        late(lambda model, mesh: optim.SGD(model.parameters(), lr=1.0)),
        RuntimeError,
        "has an optimizer already",
    ),
    (late(lambda model, mesh: pipeline_stages(model, mesh["pp"])), RuntimeError, "has stages already"),
    ranks=2,
    everywhere=True,
)


@lab.on_ranks(2)
def test_what_does_not_know_of_stages_says_so():
    model, mesh, stages = two_stages()
    for attempt, expected in (
        (lambda: fully_shard(model, mesh=mesh["dp_shard"]), "the model has pipeline stages; call it on each"),
        (lambda: fully_shard(model.blocks, mesh=mesh["dp_shard"]), "the modules of this rank's stages"),
        (lambda: parallelize_module(model, mesh["dp_shard"], {}), "call it before pipeline_stages"),
        (lambda: nn.add_lora(model, 2), "call add_lora before pipeline_stages"),
        (lambda: full_state_dict(stages[0]), "give the model, not one of its stages"),
        (lambda: copy.deepcopy(model), "can't be copied"),
        (lambda: model(**text()[0]), f"Llama has stages, of which this rank runs {mesh.rank}:"),
    ):
        with pytest.raises((ValueError, RuntimeError, TypeError), match=expected):
            attempt()


@lab.on_ranks(2)
def test_an_optimizer_of_the_stages_alone_has_no_whole_state():
    model, _, stages = two_stages()
    optimizer = optim.SGD(stages[0].parameters(), lr=1.0)
    with pytest.raises(
        ValueError, match="only the parameters of this rank's stages; make it with model.parameters"
    ):
        get_optimizer_state_dict(model, optimizer)


@pytest.mark.parametrize("other", ["seed", "cut"])
@lab.on_ranks(2)
def test_ranks_with_other_seeds_or_cuts_are_reported(other):
    mesh = mesh_of(2)
    model = lab.seeded(llama, mesh.rank if other == "seed" else 0)
    with pytest.raises(ValueError, match="ranks .1. have another model, seed or cuts than rank 0"):
        pipeline_stages(model, mesh["pp"], stages=[1 + (other == "cut" and mesh.rank)])


@pytest.mark.parametrize("make", [gpt, llama])
@lab.on_ranks(2)
def test_the_same_bits_at_every_number_of_ranks_are_refused_for_tied_stages(make):
    model, _, stages = two_stages(make)
    refused = pytest.raises(ValueError, match="'wte.weight' is on two stages")
    for part in (model, *stages):
        with refused if make is gpt else nullcontext():
            set_world_invariant(part, 2)


def test_a_model_may_have_names_of_its_own_for_what_a_pipeline_has():
    """No name that a module of a user's may well have is taken."""
    model = nn.Sequential(nn.Linear(2, 2))
    for name in ("stages", "stage", "place", "pieces", "blocks", "label", "number", "model", "first", "last"):
        setattr(model, name, nn.Linear(2, 2))
    assert len(list(model.parameters())) == 22
