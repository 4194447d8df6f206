"""Weights go to one file and come back at any world size; a bad file is refused by name."""

import errno
import os
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

import shardrt
from shardrt.checkpoint import CheckpointError, full_state_dict, load, save, weights
from shardrt.comm import init_device_mesh, thread
from tests.fsdp.nets import Block, Nested, Net, shard


def made(kind, seed):
    shardrt.manual_seed(seed)
    model = kind()
    shard(model, init_device_mesh("auto"))
    return model


def saved(kind, directory):
    model = made(kind, 1)
    save(directory, model, step=7)
    return full_state_dict(model)


def loaded(kind, directory):
    model = made(kind, 2)
    return load(directory, model), full_state_dict(model)


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_weights_come_back_to_the_bit_at_any_world_size(tmp_path, before, after):
    expected = thread.run(before, saved, Nested, tmp_path)[0]
    step, found = thread.run(after, loaded, Nested, tmp_path)[0]
    assert step == 7
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_the_file_holds_each_parameter_once_under_its_name(tmp_path):
    thread.run(2, saved, Net, tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == dict(Net().named_parameters()).keys()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_another_models_file_is_refused_with_the_names(tmp_path):
    thread.run(2, saved, Net, tmp_path)
    with pytest.raises(ValueError, match="missing .*'down.bias'.* not expected .*'blocks.0.down.bias'"):
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
        model = made(Net, 1)
        save(tmp_path, model)
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
            save(tmp_path, made(Net, 2))

    monkeypatch.setattr(os, "fsync", full)
    thread.run(2, job)
    assert (tmp_path / "model.safetensors").read_bytes() == before
