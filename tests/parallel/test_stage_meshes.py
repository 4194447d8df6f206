"""What test_meshes.py says of any mesh holds for models in stages; whole weights go into stages and out."""

import pytest

import shardrt
from models.hub import load_pretrained
from shardrt import checkpoint
from shardrt.checkpoint import full_state_dict, get_optimizer_state_dict, set_optimizer_state_dict
from shardrt.checkpoint.pieces import counted
from tests import lab
from tests.parallel.meshes import MESHES, NETS, STAGED, adamw, spread

# ruff: noqa: F401  the tests that run with the lives of this file
from tests.parallel.test_meshes import (
    canonical,
    lives_on,
    restored_on,
    test_a_step_on_any_mesh_is_that_of_one_rank,
    test_ranks_that_hold_the_same_elements_hold_the_same_bits,
    test_the_norm_of_equal_gradients_has_the_same_bits_however_they_are_cut,
    test_weights_and_updates_have_the_same_bits_on_every_mesh,
)
from tests.ranks import run_ranks

PLAIN = {name: MESHES[name] for name in ("1", "dp 3", "copies 2, dp 2, tp 2")}
ALL = PLAIN | STAGED
lives = lives_on(ALL)


def test_ranks_hold_the_parameters_of_their_stages_and_no_more(lives):
    net, found = lives
    _, ranks = found["pp 2"]
    _, (alone,) = found["1"]
    twice = canonical(*ranks[0].saved)["parameter", "wte.weight"].nbytes if net == "gpt" else 0
    assert sum(rank.nbytes for rank in ranks) == alone.nbytes + twice
    assert max(rank.nbytes for rank in ranks) < 0.75 * alone.nbytes


def test_a_checkpoint_of_any_is_restored_on_any_other_to_the_bit(lives):
    """Of one piece in stages and back, and of stages in other stages."""
    restored_on(ALL, lambda name: STAGED if name in PLAIN else ALL, lives)


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
@pytest.mark.parametrize("name", ["pp 2", "pp 2, tp 2"])
def test_whole_weights_and_state_go_into_stages_and_out_again(lives, name, from_first):
    net, found = lives
    folder, (first, *_) = found[name]
    message = run_ranks(STAGED[name].ranks, through, net, folder, first.saved[1], STAGED[name], from_first)
    assert all((step, steps) == (1, {1}) for step, steps, *_ in message)
    lab.assert_equal(message[0][2:], (first.saved, first.saved[0]))
