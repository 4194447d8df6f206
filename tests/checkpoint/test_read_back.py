"""What a save writes, the same code reads: checked before it is published; and what is never published."""

import json
from math import inf, nan

import numpy as np
import pytest

from shardrt import nn, optim
from shardrt.checkpoint import (
    CheckpointError,
    CheckpointManager,
    Damaged,
    NonfiniteWeights,
    read_manifest,
    verify,
)
from shardrt.checkpoint.disk import Disk
from shardrt.checkpoint.manifest import SMALL, _checksum
from shardrt.comm import init_device_mesh, thread
from tests import lab
from tests.checkpoint.test_checkpoints import made, names, train

STRANGE = {"clip": inf, "betas": (0.9, -inf), "Infinity": 'a "quoted" Infinity \\', 3: None}
STRANGE_READ = {"clip": inf, "betas": [0.9, -inf], "Infinity": 'a "quoted" Infinity \\', "3": None}


class Odd(nn.Module):
    """Parameters and buffers of the kinds that other tests have not."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter((7,), nn.init.Normal())
        self.bound = nn.Parameter((2,), nn.init.Constant(-inf), requires_grad=False)
        self.register_buffer("mask", (3,), -inf)
        self.register_buffer("calls", (), 5, dtype="int64")


def odd(root, **settings):
    model = Odd()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, CheckpointManager(root, model, optimizer, init_device_mesh("auto"), **settings)


def strict(path):
    """A JSON file's contents, as a reader has them that knows no Infinity."""
    return json.loads(path.read_bytes(), parse_constant=lambda constant: pytest.fail(constant))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with checkpoint 1 of an Odd, with infinite settings."""
    root = tmp_path_factory.mktemp("odd") / "runs" / "a" / "checkpoints"  # none of which is there
    thread.run(1, lambda: odd(root)[1].save(1, STRANGE))
    return root


def test_infinite_settings_come_back_from_strict_json(saved):
    assert strict(saved / "step-00000001" / "manifest.json")["extra"] == STRANGE_READ
    assert thread.run(1, lambda: odd(saved)[1].restore()) == [(1, STRANGE_READ)]


def test_a_manifest_of_an_earlier_version_with_infinity_in_it_is_read(saved, tmp_path):
    content = strict(saved / "step-00000001" / "manifest.json")
    del content["self"]
    copy = tmp_path / "step-00000001"
    copy.mkdir()
    (copy / "rank-00000.safetensors").hardlink_to(saved / "step-00000001" / "rank-00000.safetensors")
    (copy / "manifest.json").write_text(json.dumps({**content, "self": _checksum(content)}, indent=0))
    assert '"clip": Infinity' in (copy / "manifest.json").read_text()
    assert thread.run(1, lambda: odd(tmp_path)[1].restore()) == [(1, STRANGE_READ)]


@pytest.mark.parametrize("extra", [{"loss": nan}, {1: "a", "1": "b"}, {"a": object()}, {"a": {1, 2}}])
def test_what_would_not_come_back_is_refused_at_once(tmp_path, extra):
    with pytest.raises((ValueError, TypeError), match="a checkpoint's extra must be JSON: "):
        thread.run(1, lambda: odd(tmp_path / "c")[1].start(1, extra))
    assert not (tmp_path / "c").exists()


@lab.on_ranks(1)
def test_what_the_program_changes_after_start_is_not_saved(tmp_path):
    extra = {"history": [1]}
    _, checkpoints = odd(tmp_path / "c")
    checkpoints.start(1, extra)
    extra["history"].append(2)
    checkpoints.wait()
    assert read_manifest(tmp_path / "c" / "step-00000001").extra == {"history": [1]}


class Elsewhere(Disk):
    """A node that does not see the folder of the others: what it writes goes to its own."""

    def create(self, path, direct=False):
        own = path.parent.parent.parent / "another node"
        own.mkdir(exist_ok=True)
        return super().create(own / path.name, direct)


def test_a_save_to_folders_that_are_not_shared_fails_and_not_the_first_resume(tmp_path):
    def on_two_nodes():
        disk = Elsewhere() if init_device_mesh("auto").rank == 1 else None
        words = "^step 1 was not saved: .*rank-00001.safetensors: the file is missing$"
        with pytest.raises(CheckpointError, match=words):
            made(tmp_path / "c", disk=disk)[2].save(1)

    thread.run(2, on_two_nodes)
    assert names(tmp_path / "c") == []


class Changing(Disk):
    """A disk that gives back other bytes than it was given, of manifests."""

    def write(self, file, data):
        super().write(file, memoryview(bytes(data).replace(b'"step": 1', b'"step": 2')))


def test_a_manifest_that_reads_back_otherwise_is_not_published(tmp_path):
    with pytest.raises(CheckpointError, match="step 1 was not saved: .*manifest.json: wrong checksum"):
        thread.run(1, lambda: odd(tmp_path / "c", disk=Changing())[1].save(1))
    assert names(tmp_path / "c") == []


def test_a_manifest_of_200_mb_is_refused_before_it_is_read(saved, tmp_path):
    (tmp_path / "rank-00000.safetensors").write_bytes(bytes(8))
    with open(tmp_path / "manifest.json", "wb") as file:
        file.truncate(200 << 20)
    with pytest.raises(Damaged, match="it has 209715200 bytes, more than a manifest of 8 bytes allows"):
        verify(tmp_path)
    assert (saved / "step-00000001" / "manifest.json").stat().st_size < SMALL


# -- weights that are no numbers


def poisoned(root, kind, value, asynchronous):
    """Two sound checkpoints, then one of weights with `value` in rank 1's part; what it says."""
    model, optimizer, checkpoints = made(root, keep_last=1)
    for step in (1, 2):
        train(model, optimizer, step - 1, step)
        checkpoints.save(step)
    if init_device_mesh("auto").rank == 1:
        piece = next(piece for piece in optimizer.slices if piece.name == "blocks.1.up.weight")
        (piece.storage.shard if kind == "parameter" else piece.state[kind])[0] = value
    with pytest.raises(NonfiniteWeights) as error:
        checkpoints.start(3) if asynchronous else checkpoints.save(3)
        checkpoints.wait()
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "value", "asynchronous"),
    [("parameter", nan, True), ("parameter", -inf, False), ("m", nan, True), ("v", nan, False)],
)
def test_weights_that_are_no_numbers_replace_no_sound_ones(tmp_path, kind, value, asynchronous):
    for message in thread.run(2, poisoned, tmp_path / "c", kind, value, asynchronous):
        assert message.startswith("step 3 was not saved: rank 1: NotFinite: ")
        assert ("'m' of 'blocks.1." in message) == (kind == "m") and "'blocks.1." in message
    assert names(tmp_path / "c") == ["step-00000002"]
    verify(tmp_path / "c" / "step-00000002")


@lab.on_ranks(1)
def test_what_is_not_trained_may_be_infinite(saved):
    model, checkpoints = odd(saved)
    checkpoints.restore()
    bound, mask, calls = map(np.array, (model.bound.data, model.mask, model.calls))
    assert np.isneginf(bound).all() and np.isneginf(mask).all() and calls.shape == () and calls == 5
