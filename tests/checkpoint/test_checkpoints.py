"""A run that is saved and resumed is the run that was not interrupted, on any ranks, in any layout."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from shardrt import nn, optim
from shardrt.checkpoint import CheckpointError, CheckpointManager, full_state_dict, load, verify
from shardrt.checkpoint.disk import Disk
from shardrt.checkpoint.pieces import counted, pieces_of
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from tests import lab
from tests.combinations import pairwise
from tests.lab import Net, loss_of

STEPS = 6
BATCHES = lab.batches(STEPS, size=24)


def made(
    root, disk=None, keep_last=3, keep_every=0, sgd=None, net=Net, shape=None, kind="shared", **settings
):
    """(model, optimizer, checkpoints) of this rank. sgd: its momentum; None: AdamW."""
    model, mesh = lab.build(net, shape=shape, **settings)
    if sgd is None:
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=sgd)
    how = {"keep_last": keep_last, "keep_every": keep_every, "kind": kind, "disk": disk}
    return model, optimizer, CheckpointManager(root, model, optimizer, mesh, **how)


def train(model, optimizer, first, last):
    """Steps first, ..., last - 1."""
    mesh = init_device_mesh("auto")
    for batch in BATCHES[first:last]:
        lab.backward(model, mesh, batch)
        lab.update(optimizer)


def everything(model, optimizer):
    """(kind, parameter) -> this rank's ranges of it, and the numbers of updates."""
    held = [
        (p.kind, p.parameter, p.extents[0].first, np.array(p.array))
        for p in pieces_of(model, optimizer, saving=True)
    ]
    return held, {name: int(piece.steps[at]) for name, (piece, at) in counted(model, optimizer).items()}


def whole(results):
    """Every (kind, parameter) as one array, from what all ranks hold."""
    found = {}
    for held, _ in results:
        for kind, name, first, values in held:
            found.setdefault((kind, name), []).append((first, values))
    return {
        key: np.concatenate([v for _, v in sorted(parts, key=lambda p: p[0])]) for key, parts in found.items()
    }


def save_after(root, last, asynchronous=False, **settings):
    model, optimizer, checkpoints = made(root, **settings)
    train(model, optimizer, 0, last)
    if asynchronous:
        checkpoints.start(last, {"note": "é"})
        train(model, optimizer, last, STEPS)  # the copy must not follow
        assert checkpoints.wait() is not None and checkpoints.wait() is None
    else:
        checkpoints.save(last, {"note": "é"})
    return everything(model, optimizer)


def resume(root, until=STEPS, **settings):
    model, optimizer, checkpoints = made(root, **settings)
    step, extra = checkpoints.restore()
    train(model, optimizer, step, until)
    return everything(model, optimizer), step, extra


def uninterrupted(**settings):
    model, optimizer, _ = made("nowhere", **settings)
    train(model, optimizer, 0, STEPS)
    return everything(model, optimizer)


SETTINGS = {
    "FULL_SHARD": {},
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "SHARD_OPT": {"strategy": "SHARD_OPT"},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy("bfloat16")},
    "on the host": {"offload_policy": CPUOffloadPolicy()},
    "SGD": {"sgd": 0.9},
}


@pytest.mark.parametrize(
    ("name", "asynchronous"), [("FULL_SHARD", False), *((name, True) for name in SETTINGS)]
)
def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(tmp_path, name, asynchronous):
    settings = SETTINGS[name]
    expected = thread.run(2, uninterrupted, **settings)
    thread.run(2, save_after, tmp_path / "c", 3, asynchronous, **settings)
    results = thread.run(2, resume, tmp_path / "c", **settings)
    assert [(step, extra) for _, step, extra in results] == [(3, {"note": "é"})] * 2
    lab.assert_equal(whole([held for held, _, _ in results]), whole(expected))
    assert [held[1] for held, _, _ in results] == [steps for _, steps in expected]


SIZES = (1, 2, 3, 4, 8)


@pytest.fixture(scope="module")
def saved_at(tmp_path_factory):
    """World size -> (folder with a checkpoint of step 2, everything in it)."""
    made_by = {}
    for size in SIZES:
        root = tmp_path_factory.mktemp(f"saved-{size}") / "c"
        made_by[size] = root, whole(thread.run(size, save_after, root, 2))
    return made_by


@pytest.mark.parametrize(
    ("saved", "size", "strategy"), pairwise(SIZES, SIZES, ["FULL_SHARD", "NO_SHARD", "SHARD_GRAD_OP"])
)
def test_it_loads_at_any_number_of_ranks_with_the_same_bits(saved_at, saved, size, strategy):
    root, expected = saved_at[saved]
    results = thread.run(size, resume, root, until=2, strategy=strategy)
    lab.assert_equal(whole([held for held, _, _ in results]), expected)
    assert all(set(held[1].values()) == {2} for held, _, _ in results)


def test_it_loads_into_a_hybrid_and_out_of_it(tmp_path, saved_at):
    hybrid = {"shape": (2, 2), "strategy": "HYBRID_SHARD"}
    root, expected = saved_at[3]
    lab.assert_equal(whole([held for held, _, _ in thread.run(4, resume, root, until=2, **hybrid)]), expected)
    expected = whole(thread.run(4, save_after, tmp_path / "c", 2, **hybrid))
    lab.assert_equal(whole([held for held, _, _ in thread.run(3, resume, tmp_path / "c", until=2)]), expected)


def paused(root, first, last):
    """Steps of a model with biases that are frozen now and then, from one checkpoint to the next."""
    model, optimizer, checkpoints = made(root)
    assert checkpoints.restore()[0] == first
    for step in range(first, last):
        for number, block in enumerate(model.blocks):
            block.up.bias.requires_grad = (step + number) % 3 > 0
        train(model, optimizer, step, step + 1)
    checkpoints.save(last)
    return everything(model, optimizer)


def test_numbers_of_updates_that_differ_within_a_unit_come_back_at_any_number_of_ranks(tmp_path):
    expected = thread.run(2, paused, tmp_path / "whole", 0, STEPS)
    middle = thread.run(2, paused, tmp_path / "cut", 0, 4)
    assert [middle[0][1][f"blocks.{n}.up.bias"] for n in range(3)] == [2, 3, 3]
    assert middle[0][1]["blocks.0.up.weight"] == 4
    for ranks in (1, 3):
        found = thread.run(ranks, paused, tmp_path / "cut", 4, 4)
        lab.assert_equal(whole(found), whole(middle))
        assert all(steps == middle[0][1] for _, steps in found)
    found = thread.run(2, paused, tmp_path / "cut", 4, STEPS)
    lab.assert_equal(whole(found), whole(expected))
    assert [steps for _, steps in found] == [steps for _, steps in expected]


def test_what_was_unfrozen_in_the_run_keeps_its_moments(tmp_path):
    """The program that resumes begins as the run did: with the parameter frozen."""

    def begun():
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        optimizer = optim.AdamW(model.parameters())
        return model, optimizer, CheckpointManager(tmp_path / "c", model, optimizer, init_device_mesh("auto"))

    model, optimizer, checkpoints = begun()
    checkpoints.save(1)
    model[0].requires_grad_(True)
    model(np.ones((1, 3), np.float32)).sum().backward()
    optimizer.step()
    checkpoints.start(2)
    checkpoints.wait()
    again, resumed, others = begun()
    assert others.restore()[0] == 2
    held, steps = everything(model, optimizer)
    assert len(held) == 3 * 4 and set(steps.values()) == {1}
    lab.assert_equal(everything(again, resumed), (held, steps))


def thawed(root):
    """What a model restores whose first block was frozen when it was saved."""
    for freeze in (True, False):
        model, mesh = lab.build()
        model.blocks[0].requires_grad_(not freeze)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        checkpoints = CheckpointManager(root, model, optimizer, mesh)
        if freeze:
            train(model, optimizer, 0, 2)
            checkpoints.save(2)
    for piece in pieces_of(model, optimizer, saving=False):
        piece.array[...] = 7  # what was there before is not what a restore leaves
    assert checkpoints.restore()[0] == 2
    return everything(model, optimizer)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_frozen_when_saved_begins_with_no_moments(tmp_path, ranks):
    results = thread.run(ranks, thawed, tmp_path / "c")
    for (kind, name), values in whole(results).items():
        if kind != "parameter":
            assert values.any() != name.startswith("blocks.0."), (kind, name)
    assert {name: steps for name, steps in results[0][1].items()} == {
        name: 0 if name.startswith("blocks.0.") else 2 for name in results[0][1]
    }


def into_one_unit(root):
    mesh = init_device_mesh("auto")
    model = fully_shard(Net(), mesh=mesh)
    optimizer = optim.AdamW(model.parameters())
    CheckpointManager(root, model, optimizer, mesh).restore()
    return everything(model, optimizer)


def test_it_loads_into_other_units(saved_at):
    root, expected = saved_at[4]
    lab.assert_equal(whole(thread.run(2, into_one_unit, root)), expected)


@pytest.mark.parametrize("momentum, message", [(0.9, "no 'momentum'"), (0.0, "'m', SGD keeps nothing")])
@lab.on_ranks(2)
def test_weights_alone_load_under_another_optimizer(saved_at, momentum, message):
    root, expected = saved_at[2]
    model, _, checkpoints = made(root, sgd=momentum)
    words = f"another optimizer: it has {message}.* restore with weights_only"
    with pytest.raises(CheckpointError, match=words):
        checkpoints.restore()
    assert checkpoints.restore(weights_only=True)[0] == 2
    for name, values in full_state_dict(model).items():
        np.testing.assert_array_equal(values.reshape(-1), expected["parameter", name])


class Larger(Net):
    def __init__(self):
        super().__init__()
        self.more = nn.Linear(2, 2)


def test_a_checkpoint_of_another_model_is_told_from_a_damaged_one(saved_at):
    root, _ = saved_at[1]
    model, optimizer, checkpoints = made(root, net=Larger)
    with pytest.raises(CheckpointError, match="it lacks more.bias, more.weight$") as caught:
        checkpoints.restore()
    assert "Damaged" not in str(caught.value) and "[]" not in str(caught.value)


def test_load_says_where_checkpoints_of_runs_are_read(saved_at):
    root, _ = saved_at[1]
    for folder in (root, sorted(root.glob("step-*"))[0]):
        with pytest.raises(FileNotFoundError, match=r"restore\(path, weights_only=True\)"):
            load(folder, Net())


def test_files_are_safetensors(saved_at):
    root, expected = saved_at[3]
    files = [load_file(path) for path in sorted((root / "step-00000002").glob("rank-*.safetensors"))]
    assert len(files) == 3
    for (kind, name), values in expected.items():
        parts = [file[f"{kind}/{name}"] for file in files if f"{kind}/{name}" in file]
        np.testing.assert_array_equal(np.concatenate(parts), values)


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_old_checkpoints_go(tmp_path):
    def several():
        *_, checkpoints = made(tmp_path / "c", keep_last=2, keep_every=3)
        for step in range(1, 7):
            checkpoints.save(step, best=2)

    thread.run(2, several)
    assert names(tmp_path / "c") == [f"step-{step:08d}" for step in (2, 3, 5, 6)]


@lab.on_ranks(2)
def test_without_a_checkpoint_a_run_starts_at_0(tmp_path):
    assert made(tmp_path / "c")[2].restore() == (0, {})


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def two_saved(root):
    model, optimizer, checkpoints = made(root)
    for step in (1, 2):
        train(model, optimizer, step - 1, step)
        checkpoints.save(step)


@pytest.mark.parametrize("file", ["manifest.json", "rank-00001.safetensors"])
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(tmp_path, file):
    thread.run(2, two_saved, tmp_path / "c")
    damage(tmp_path / "c" / "step-00000002" / file)
    with pytest.warns(UserWarning, match=f"skipped a checkpoint: .*step-00000002/{file}"):
        results = thread.run(2, resume, tmp_path / "c", until=1)
    assert [step for _, step, _ in results] == [1, 1]


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error(tmp_path):
    thread.run(2, two_saved, tmp_path / "c")
    damage(tmp_path / "c" / "step-00000002" / "rank-00000.safetensors")
    wrong = r"rank-00000.safetensors: bytes 0 to \d+ .* \(wrong checksum\)"
    for path, words in (("c/step-00000002", wrong), ("none", "No checkpoint here")):
        with pytest.raises(CheckpointError, match=words):
            thread.run(2, lambda path=path: made(tmp_path / "c")[2].restore(tmp_path / path))


def restore_the_half(root, path):
    """(whether some weights changed, the loss, and the loss of a new model with the weights of now)."""
    model, _, checkpoints = made(root, mp_policy=MixedPrecisionPolicy("bfloat16"))
    loss_of(model, *BATCHES[0]).backward()  # copies of the weights in 16 bits are there from now on
    before = full_state_dict(model)
    with pytest.raises(CheckpointError, match="rank-00001"):
        checkpoints.restore(path)
    after = full_state_dict(model)
    same_weights, *_ = made(root, mp_policy=MixedPrecisionPolicy("bfloat16"))
    same_weights.load_state_dict(after)
    found, expected = (float(loss_of(each, *BATCHES[0]).item()) for each in (model, same_weights))
    return any((before[name] != after[name]).any() for name in after), found, expected


def test_a_restore_that_fails_half_way_leaves_no_copy_of_older_weights(tmp_path):
    thread.run(2, two_saved, tmp_path / "c")
    damage(tmp_path / "c" / "step-00000002" / "rank-00001.safetensors")
    [(changed, found, expected)] = thread.run(
        1, restore_the_half, tmp_path / "c", tmp_path / "c" / "step-00000002"
    )
    assert changed and found == expected


class Wider(Net):
    def __init__(self):
        super().__init__(width=8)


def restore_wider(root):
    *_, checkpoints = made(root, net=Wider)
    checkpoints.restore()


def test_another_model_is_reported(tmp_path):
    thread.run(2, two_saved, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"'embed.weight' has .* \(\(11, 7\), 'float32'\) in"):
        thread.run(2, restore_wider, tmp_path / "c")


class Full(Disk):
    """A disk without room for what a rank writes."""

    def write(self, file, data):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_ranks_learn_that_one_could_not_write_and_go_on(tmp_path, asynchronous):
    def one_fails():
        disk = Full() if init_device_mesh("auto").rank == 1 else None
        model, optimizer, checkpoints = made(tmp_path / "c", disk=disk)
        before = everything(model, optimizer)
        words = "step 1 was not saved: rank 1: OSError: .*No space left on device"
        with pytest.raises(CheckpointError, match=words):
            (checkpoints.start if asynchronous else checkpoints.save)(1)
            checkpoints.wait()
        lab.assert_equal(everything(model, optimizer), before)
        checkpoints.store.disk = Disk()
        checkpoints.save(2)

    thread.run(3, one_fails)
    assert names(tmp_path / "c") == ["step-00000002"]
    verify(tmp_path / "c" / "step-00000002")


@lab.on_ranks(3)
def test_a_save_under_way_is_published_by_a_tick(tmp_path):
    """While training goes on."""
    model, optimizer, checkpoints = made(tmp_path / "c")
    published = []
    for step in range(1, STEPS + 1):
        train(model, optimizer, step - 1, step)
        path = checkpoints.tick()
        published += [path.name] if path else []
        if step == 2:
            checkpoints.start(step)
    path = checkpoints.wait()
    assert published + ([path.name] if path else []) == ["step-00000002"]


@pytest.mark.parametrize(("keep_last", "keep_every"), [(0, 0), (1, -1)])
def test_retention_that_keeps_nothing_is_refused(keep_last, keep_every):
    with pytest.raises(ValueError, match="keep_last"):
        made("nowhere", keep_last=keep_last, keep_every=keep_every)
