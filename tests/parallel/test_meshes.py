"""What a model is on any mesh: its first weights and masks, its norms, what it learns, its checkpoints."""

import json
from itertools import combinations
from typing import NamedTuple

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
from shardrt.checkpoint.pieces import PARAMETER, counted, pieces_of
from shardrt.nn.extents import take
from shardrt.nn.layers import Dropout
from shardrt.nn.utils import clip_grad_norm_on_device_, grad_norm
from tests import lab
from tests.parallel.meshes import (
    BATCH,
    MESHES,
    NETS,
    STAGED,
    TIME,
    adamw,
    batch,
    gpt,
    learn,
    spread,
    train,
    whole_gradients,
)
from tests.ranks import run_ranks

NORMS = (1, 2, 3, np.inf)
ALL = MESHES | STAGED


class Life(NamedTuple):
    """What of a first step must be the same on every mesh, and what was saved."""

    begun: dict  # weights
    norms: list  # of given gradients
    largest: float  # of them, as it is clipped on the device
    loss: float
    gradients: dict
    saved: tuple  # weights, the optimizer's state
    held: list
    nbytes: int  # of the parameters' shards


def first_life(net, on, folder):
    """Begin, train a step on `on`, make an update of given gradients and save."""
    shardrt.manual_seed(3)
    model = NETS[net]()
    mesh, data = spread(model, on)
    optimizer = adamw(model)
    begun = full_state_dict(model)
    loss = learn(model, mesh, *lab.rows(data, *batch()))
    gradients = whole_gradients(model)
    lab.give_gradients(model)
    norms = [grad_norm(model.parameters(), norm_type) for norm_type in NORMS]
    largest = clip_grad_norm_on_device_(model.parameters(), np.inf).item()
    optimizer.step()
    checkpoints = CheckpointManager(folder / "run", model, optimizer, mesh)
    checkpoints.start(1)
    checkpoints.wait()
    checkpoint.save(folder / "weights", model, step=1)
    save_pretrained(model, folder / "published")
    saved = full_state_dict(model), get_optimizer_state_dict(model, optimizer)
    nbytes = sum(parameter.shard.nbytes for parameter in model.parameters())
    return Life(begun, norms, largest, loss, gradients, saved, held(model, optimizer), nbytes)


def held(model, optimizer):
    """(kind, name, part, values) of all that this rank has."""
    return [
        (piece.kind, piece.parameter, piece.extents, np.array(piece.array))
        for piece in pieces_of(model, optimizer, saving=False)
    ]


@pytest.fixture(scope="module", params=NETS)
def lives(request, tmp_path_factory):
    """(net, mesh -> (folder with what was saved, the lives of its ranks))."""
    found = {}
    for name, on in ALL.items():
        folder = tmp_path_factory.mktemp("mesh")
        found[name] = folder, run_ranks(on.ranks, first_life, request.param, on, folder)
    return request.param, found


def test_weights_and_updates_have_the_same_bits_on_every_mesh(lives):
    """Initial weights, and weights and the optimizer's state after an update of given gradients."""
    _, found = lives
    _, (alone,) = found["1"]
    for name, (_, ranks) in found.items():
        lab.assert_equal(ranks[0].begun, alone.begun, name)
        lab.assert_equal(ranks[0].saved, alone.saved, name)
        assert not any(rank.begun or rank.saved[0] or rank.saved[1] for rank in ranks[1:])


def test_the_norm_of_equal_gradients_has_the_same_bits_however_they_are_cut(lives):
    _, found = lives
    norms = {name: {tuple(rank.norms) for rank in ranks} for name, (_, ranks) in found.items()}
    assert set().union(*norms.values()) == norms["1"], norms
    largest = {rank.largest for _, ranks in found.values() for rank in ranks}
    np.testing.assert_allclose([*largest], found["1"][1][0].largest, rtol=1e-12)


def test_a_step_on_any_mesh_is_that_of_one_rank(lives):
    _, found = lives
    _, (alone,) = found["1"]
    for name, (_, ranks) in found.items():
        losses = [rank.loss for rank in ranks if rank.loss]  # of the last stage, where there are several
        assert np.mean(losses) == pytest.approx(alone.loss, rel=1e-6), name
        lab.assert_near(ranks[0].gradients, alone.gradients, name, rtol=1e-5, atol=1e-9)


def test_ranks_that_hold_the_same_elements_hold_the_same_bits(lives):
    """And what they hold is what the state dicts say."""
    _, found = lives
    for _, ranks in found.values():
        whole = canonical(*ranks[0].saved)
        for rank in ranks:
            for kind, name, part, values in rank.held:
                np.testing.assert_array_equal(values, take(part, whole[kind, name]), err_msg=f"{kind} {name}")


def canonical(weights, state):
    """(kind, name) -> whole array."""
    found = {(PARAMETER, name): values for name, values in weights.items()}
    for name, entry in state["state"].items():
        found |= {("m", name): entry["exp_avg"], ("v", name): entry["exp_avg_sq"]}
    return found


def second_life(net, on, folders, expected):
    """Restore every checkpoint into one model; names of those that came out otherwise."""
    shardrt.manual_seed(4)
    model = NETS[net]()
    mesh, _ = spread(model, on)
    optimizer, wrong = adamw(model), []
    for name, folder in folders.items():
        for piece in pieces_of(model, optimizer, saving=False):
            piece.array.fill(7)
        assert CheckpointManager(folder, model, optimizer, mesh).restore() == (1, {})
        same = all(
            np.array_equal(values, take(part, expected[name][kind, parameter]))
            for kind, parameter, part, values in held(model, optimizer)
        )
        steps = {int(piece.steps[at]) for piece, at in counted(model, optimizer).values()}
        if not same or steps != {1}:
            wrong.append(name)
    return wrong


def test_a_checkpoint_of_any_mesh_is_restored_on_any_other_to_the_bit(lives):
    net, found = lives
    expected = {name: canonical(*ranks[0].saved) for name, (_, ranks) in found.items()}
    folders = {name: folder / "run" for name, (folder, _) in found.items()}
    for name, on in ALL.items():
        assert not any(run_ranks(on.ranks, second_life, net, on, folders, expected)), name


def through(net, folder, saved, on, from_first):
    """Load weights and the optimizer's state in each way, and look at them."""
    weights, state = saved

    def new(seed, make=NETS[net]):
        shardrt.manual_seed(seed)
        model = make()
        return model, spread(model, on)[0]

    model, mesh = new(4)
    optimizer = adamw(model)
    if from_first and mesh.rank > 0:
        weights = state = None
    step = checkpoint.load(folder / "weights", model, broadcast_from_rank0=from_first)
    set_optimizer_state_dict(model, optimizer, state, broadcast_from_rank0=from_first)
    steps = {int(piece.steps[at]) for piece, at in counted(model, optimizer).values()}
    given, _ = new(5)
    given.load_state_dict(weights, broadcast_from_rank0=from_first)
    published, _ = new(6, lambda: load_pretrained(folder / "published"))
    found = [full_state_dict(each) for each in (model, given, published)]
    return step, steps, found, get_optimizer_state_dict(model, optimizer)


@pytest.mark.parametrize("from_first", [False, True], ids=["all read", "rank 0 reads"])
@pytest.mark.parametrize("name", ["dp 3, tp 2", "tp 4, sp", "pp 2, tp 2"])
def test_whole_weights_and_state_go_in_and_out_again(lives, name, from_first):
    net, found = lives
    folder, (first, *_) = found[name]
    message = run_ranks(ALL[name].ranks, through, net, folder, first.saved, ALL[name], from_first)
    assert all((step, steps) == (1, {1}) for step, steps, *_ in message)
    weights, state = first.saved
    lab.assert_equal(message[0][2:], ([weights] * 3, state))


def test_ranks_hold_the_parameters_of_their_stages_and_no_more(lives):
    net, found = lives
    _, ranks = found["pp 2"]
    _, (alone,) = found["1"]
    twice = canonical(*ranks[0].saved)["parameter", "wte.weight"].nbytes if net == "gpt" else 0
    assert sum(rank.nbytes for rank in ranks) == alone.nbytes + twice
    assert max(rank.nbytes for rank in ranks) < 0.75 * alone.nbytes


def test_columns_are_saved_in_a_format_of_their_own_and_all_else_as_earlier_versions_read_it(lives):
    _, found = lives
    for name in MESHES:
        saved = found[name][0] / "run" / "step-00000001"
        manifest = json.loads((saved / "manifest.json").read_bytes())
        in_columns = MESHES[name].tp > 1
        assert manifest["format"] == (2 if in_columns else 1), name
        assert in_columns or {len(row) for row in manifest["pieces"]} == {6}, name
        checkpoint.verify(saved)


def dropped(on):
    """(rows, times) of this rank, and which elements each use of dropout drops, in the forward's order."""
    shardrt.manual_seed(3)
    model = gpt(dropout=0.3)
    mesh, data = spread(model, on)
    masks = []
    for module in model.modules():
        if isinstance(module, Dropout):
            module.register_forward_hook(lambda module, given, y: masks.append(np.asarray(y) == 0))
    model(*lab.rows(data, *batch()))
    (rows,) = lab.rows(data, np.arange(BATCH))
    part, parts = (mesh.rank_of("tp"), on.tp) if on.sequence else (0, 1)
    times = np.arange(TIME)[part * TIME // parts : (part + 1) * TIME // parts]
    return np.ix_(rows, times), masks


@pytest.fixture(scope="module")
def masks_of_one_rank():
    ((_, masks),) = run_ranks(1, dropped, MESHES["1"])
    assert len(masks) == 5 and all(mask.shape == (BATCH, TIME, 8) for mask in masks)
    assert all(0.25 < mask.mean() < 0.35 for mask in masks)
    assert not any((one == other).all() for one, other in combinations(masks, 2))
    return masks


@pytest.mark.parametrize("name", MESHES)
def test_dropout_drops_the_same_elements_on_every_mesh(masks_of_one_rank, name):
    on = MESHES[name]
    for place, masks in run_ranks(on.ranks, dropped, on):
        assert len(masks) == len(masks_of_one_rank)
        for mask, whole in zip(masks, masks_of_one_rank, strict=True):
            np.testing.assert_array_equal(mask, whole[place])


@pytest.mark.mpi
def test_four_processes_have_the_bits_of_four_threads_and_train_as_one_rank(tmp_path):
    name, steps = "dp 2, tp 2", 3
    lab.printed(4, "-m", "tests.parallel.meshes", "gpt", name, str(steps), str(tmp_path / "found"))
    processes = dict(np.load(tmp_path / "found.npz"))
    threads = lab.first(4, train, "gpt", MESHES[name], steps)
    alone = lab.first(1, train, "gpt", MESHES["1"], steps)
    assert processes.keys() == threads.keys() == alone.keys()
    lab.assert_equal(processes, threads)
    losses = threads["losses"]
    assert losses.shape == (4, steps) and (losses[::2] == losses[1::2]).all()  # the same along tp
    np.testing.assert_allclose(losses.mean(0), alone["losses"][0], rtol=1e-5)
    kept = [name for name in alone if name != "losses" and not name.endswith("qkv.bias")]
    lab.assert_near({name: threads[name] for name in kept}, {name: alone[name] for name in kept}, rtol=1e-5)
