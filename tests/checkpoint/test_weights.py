"""Weights go to one file and come back at any world size; a bad file is refused by name."""

import errno
import os
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from shardrt.checkpoint import CheckpointError, full_state_dict, load, save, weights
from shardrt.comm import thread
from tests import lab
from tests.lab import Block, Nested, Net


def saved(kind, directory):
    model, _ = lab.build(kind, seed=1)
    save(directory, model, step=7)
    return full_state_dict(model)


def loaded(kind, directory):
    model, _ = lab.build(kind, seed=2)
    return load(directory, model), full_state_dict(model)


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_weights_come_back_to_the_bit_at_any_world_size(tmp_path, before, after):
    expected = thread.run(before, saved, Nested, tmp_path)[0]
    step, found = thread.run(after, loaded, Nested, tmp_path)[0]
    assert step == 7
    lab.assert_equal(found, expected)


def test_the_file_holds_each_parameter_once_under_its_name(tmp_path):
    thread.run(2, saved, Net, tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == dict(Net().named_parameters()).keys()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_another_models_file_is_refused_with_the_names(tmp_path):
    thread.run(2, saved, Net, tmp_path)
    with pytest.raises(
        ValueError, match="missing keys .*'down.bias'.* unexpected keys .*'blocks.0.down.bias'"
    ):
        load(tmp_path, Block())


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_damaged_file_is_refused_by_name(tmp_path, keep):
    thread.run(1, saved, Net, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load(tmp_path, Net())


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load(tmp_path, Net())


def test_the_file_is_there_for_every_rank_when_save_returns(tmp_path, monkeypatch):
    written = threading.Event()
    slowly = weights._write

    def write(path, state, step):
        time.sleep(0.2)
        slowly(path, state, step)
        written.set()

    def job():
        save(tmp_path, lab.build()[0])
        return written.is_set()

    monkeypatch.setattr(weights, "_write", write)
    assert thread.run(3, job) == [True, True, True]


def test_a_failed_save_is_an_error_on_every_rank_and_leaves_the_file(tmp_path, monkeypatch):
    thread.run(1, saved, Net, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def job():
        with pytest.raises(CheckpointError, match="was not written: rank 0: OSError.*No space left"):
            save(tmp_path, lab.build(seed=2)[0])

    monkeypatch.setattr(os, "fsync", full)
    thread.run(2, job)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def loaded_from_first(kind, directory, plain):
    """As `loaded`, where rank 0 alone can see the folder, or has the arrays."""
    model, mesh = lab.build(kind, seed=2)
    first = mesh.rank == 0
    if plain is None:
        step = load(directory if first else "/nowhere", model, broadcast_from_rank0=True)
    else:
        model.load_state_dict(plain if first else None, broadcast_from_rank0=True)
        step = 7
    return step, full_state_dict(model)


@pytest.mark.parametrize("from_file", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weights_come_from_rank_0_alone(tmp_path, ranks, from_file):
    expected = thread.run(2, saved, Nested, tmp_path)[0]
    results = thread.run(ranks, loaded_from_first, Nested, tmp_path, None if from_file else expected)
    assert [step for step, _ in results] == [7] * ranks
    lab.assert_equal(results[0][1], expected)


class Unreadable(dict):
    """Arrays of which one can't be read when its turn comes."""

    def __getitem__(self, name):
        if name == "norm.weight":
            raise OSError(errno.EIO, "Input/output error")
        return super().__getitem__(name)


def refused_from_first(state, text):
    model, _ = lab.build(seed=2)
    with pytest.raises(ValueError, match=text):
        model.load_state_dict(state, broadcast_from_rank0=True)


def test_what_rank_0_cannot_give_is_an_error_on_every_rank(tmp_path):
    state = thread.run(1, saved, Net, tmp_path)[0]
    for wrong, text in (
        (Unreadable(state), "rank 0 can't read 'norm.weight': OSError: .*Input/output error"),
        ({**state, "more": state["norm.bias"]}, r"unexpected keys \['more'\]"),
        ({**state, "norm.bias": np.zeros(3)}, r"'norm.bias': values must have shape \(7,\), got \(3,\)"),
    ):
        thread.run(2, refused_from_first, wrong, text)

    def nothing_there():
        with pytest.raises(CheckpointError, match="was not read: rank 0: FileNotFoundError"):
            load(tmp_path / "none", lab.build()[0], broadcast_from_rank0=True)

    thread.run(2, nothing_there)


@lab.on_ranks(2)
def test_a_plain_model_on_several_ranks_cannot_be_broadcast_to():
    with pytest.raises(ValueError, match="broadcast_from_rank0 needs a sharded model"):
        Net().load_state_dict({}, broadcast_from_rank0=True)
