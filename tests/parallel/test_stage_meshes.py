"""Models in stages beside those in one piece: first weights, norms, updates, checkpoints and files."""

import numpy as np
import pytest

import shardrt
from models.hub import load_pretrained, save_pretrained
from shardrt import checkpoint
from shardrt.checkpoint import (
    CheckpointManager,
    full_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from shardrt.checkpoint.pieces import counted
from shardrt.nn.extents import take
from shardrt.nn.utils import clip_grad_norm_on_device_, grad_norm
from tests import lab
from tests.parallel.meshes import MESHES, NETS, STAGED, Mesh, adamw, batch, learn, own, spread
from tests.parallel.test_meshes import NORMS, canonical, held, second_life
from tests.ranks import run_ranks

PLAIN = {name: MESHES[name] for name in ("1", "dp 3", "copies 2, dp 2, tp 2")}
ALL = PLAIN | STAGED


def first_life(net, on, folder):
    """Begin, make a step of given gradients and save: what must be equal on every mesh, and what is held."""
    shardrt.manual_seed(3)
    model = NETS[net]()
    mesh, data = spread(model, on)
    optimizer = adamw(model)
    begun = full_state_dict(model)
    tokens, targets = (own(rows, data) for rows in batch())
    learn(model, mesh, tokens, targets)
    lab.give_gradients(model)
    norms = [grad_norm(model.parameters(), norm_type) for norm_type in NORMS]
    norms.append(clip_grad_norm_on_device_(model.parameters(), np.inf).item())
    optimizer.step()
    checkpoints = CheckpointManager(folder / "run", model, optimizer, mesh)
    checkpoints.start(1)
    checkpoints.wait()
    checkpoint.save(folder / "weights", model, step=1)
    save_pretrained(model, folder / "published")
    saved = full_state_dict(model), get_optimizer_state_dict(model, optimizer)
    bytes_held = sum(parameter.shard.nbytes for parameter in model.parameters())
    return begun, norms, saved, held(model, optimizer), bytes_held


@pytest.fixture(scope="module", params=NETS)
def lives(request, tmp_path_factory):
    """(net, mesh -> (folder with what was saved, by rank what first_life gives))."""
    found = {}
    for name, on in ALL.items():
        folder = tmp_path_factory.mktemp("mesh")
        found[name] = folder, run_ranks(on.ranks, first_life, request.param, on, folder)
    return request.param, found


def test_weights_norms_and_updates_are_those_of_the_model_in_one_piece(lives):
    _, found = lives
    _, (alone,) = found["1"]
    for name, (_, ranks) in found.items():
        lab.assert_equal(ranks[0][0], alone[0])
        lab.assert_equal(ranks[0][2][0], alone[2][0])
        assert {tuple(rank[1][:-1]) for rank in ranks} == {tuple(alone[1][:-1])}, name
        for rank in ranks:
            assert rank[1][-1] == pytest.approx(alone[1][-1], rel=1e-12)
        assert not any(rank[0] or rank[2][0] or rank[2][1] for rank in ranks[1:])


def test_the_state_of_the_optimizer_is_whole_and_counted_on_rank_0(lives):
    _, found = lives
    _, (alone,) = found["1"]
    expected = alone[2][1]
    for _, ranks in found.values():
        state = ranks[0][2][1]
        assert state["param_groups"] == expected["param_groups"]
        assert {name: entry["step"] for name, entry in state["state"].items()} == {
            name: 1 for name in expected["state"]
        }
        for name, entry in expected["state"].items():
            lab.assert_equal(
                {k: v for k, v in state["state"][name].items() if k != "step"},
                {k: v for k, v in entry.items() if k != "step"},
            )


def test_ranks_hold_their_stages_and_no_more_and_copies_have_the_same_bits(lives):
    net, found = lives
    _, (alone,) = found["1"]
    for name, (_, ranks) in found.items():
        whole = canonical(*ranks[0][2])
        for rank in ranks:
            for kind, parameter, part, values in rank[3]:
                np.testing.assert_array_equal(values, take(part, whole[kind, parameter]), err_msg=parameter)
        if name == "pp 2":
            twice = whole["parameter", "wte.weight"].nbytes if net == "gpt" else 0
            assert sum(rank[4] for rank in ranks) == alone[4] + twice
            assert max(rank[4] for rank in ranks) < 0.75 * alone[4]


def test_a_checkpoint_of_any_is_restored_on_any_other_to_the_bit(lives):
    """Of one piece in stages and back, and of stages in other stages."""
    net, found = lives
    expected = {name: canonical(*ranks[0][2]) for name, (_, ranks) in found.items()}
    for name, on in ALL.items():
        others = STAGED if name in PLAIN else ALL
        folders = {other: found[other][0] / "run" for other in others}
        assert not any(run_ranks(on.ranks, second_life, net, on, folders, expected)), name


def through(net, folder, state, on, from_first):
    """Load weights and the optimizer's state in each way, and look at them."""
    shardrt.manual_seed(4)
    model = NETS[net]()
    mesh, _ = spread(model, on)
    optimizer = adamw(model)
    given = state if not from_first or mesh.rank == 0 else None
    step = checkpoint.load(folder / "weights", model, broadcast_from_rank0=from_first)
    set_optimizer_state_dict(model, optimizer, given, broadcast_from_rank0=from_first)
    steps = {int(piece.steps[at]) for piece, at in counted(model, optimizer).values()}
    found = full_state_dict(model), get_optimizer_state_dict(model, optimizer)
    published = load_pretrained(folder / "published")
    spread(published, on)
    return step, steps, found, full_state_dict(published)


@pytest.mark.parametrize("from_first", [False, True], ids=["all read", "rank 0 reads"])
def test_whole_weights_and_state_go_into_stages_and_out_again(lives, from_first):
    net, found = lives
    for name, on in {"pp 2": Mesh(pp=2), "pp 2, tp 2": STAGED["pp 2, tp 2"]}.items():
        folder, ranks = found[name]
        message = run_ranks(on.ranks, through, net, folder, ranks[0][2][1], on, from_first)
        assert {rank[0] for rank in message} == {1} and all(rank[1] == {1} for rank in message)
        expected = canonical(*ranks[0][2])
        lab.assert_equal(canonical(*message[0][2]), expected)
        lab.assert_equal(message[0][3], ranks[0][2][0])
