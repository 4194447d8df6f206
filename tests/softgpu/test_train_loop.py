"""The training command on the GPU emulator: the update is launched before the host knows the norm."""

from dataclasses import replace
from threading import get_ident

import pytest

from shardrt.comm.backends import CARRIERS
from shardrt.optim import AdamW
from shardrt.train import config as settings
from shardrt.train import loop
from shardrt.train.errors import NONFINITE
from tests.train.plain import leave_out
from tests.train.test_command import furnish
from tests.train.test_resume import CONFIG, curves, launch
from tests.train.test_stop import at_step, codes, poison

pytest.importorskip("cupy")
SHORT = {"steps": 4, "checkpoint": settings.CheckpointConfig()}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(furnish(tmp_path))
    leave_out(monkeypatch.setattr)
    return tmp_path


@pytest.fixture
def nccl(software, monkeypatch):
    """Ranks that are threads have a GPU each."""
    monkeypatch.setitem(CARRIERS, "nccl", CARRIERS["nccl"]._replace(suits=lambda *_: True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_host_waits_for_nothing_from_backward_to_the_update(folder, nccl, waits, monkeypatch, ranks):
    backward, step, waited = loop.backward, AdamW.step, {}

    def begins(*args):
        waits[get_ident()].clear()
        return backward(*args)

    def ends(optimizer):
        step(optimizer)
        waited[get_ident()] = list(
            waits[get_ident()]
        )  # of the latest step; the first ones compile and allocate

    monkeypatch.setattr(loop, "backward", begins)
    monkeypatch.setattr(AdamW, "step", ends)
    launch(ranks, "short", **SHORT)
    assert list(waited.values()) == [[]] * ranks


@pytest.mark.parametrize("stages", [1, 2])
def test_it_trains_to_the_bits_of_a_host_that_waits(folder, nccl, monkeypatch, stages):
    parallel = settings.ParallelConfig(pp=stages)
    launch(2, "late", parallel=parallel, **SHORT)
    monkeypatch.setattr(loop, "updates_first", lambda recipe: False)
    launch(2, "waiting", parallel=parallel, **SHORT)
    assert curves(folder, "late") == curves(folder, "waiting")


@pytest.mark.parametrize("nonfinite", settings.Nonfinite)
def test_gradients_that_are_no_numbers_do_what_they_do_on_the_cpu(
    folder, nccl, monkeypatch, capfd, nonfinite
):
    optimizer = replace(CONFIG.optimizer, on_nonfinite=nonfinite)
    at_step(monkeypatch, 2, poison(1))
    if nonfinite is settings.Nonfinite.skip:
        launch(2, "skipping", optimizer=optimizer, **SHORT)
        assert "step 2: the norm of the gradients is nan, so this update is skipped" in capfd.readouterr().out
        return
    assert codes({"name": "bad", **SHORT}, {"name": "bad", **SHORT}) == [NONFINITE] * 2
    (line,) = capfd.readouterr().err.splitlines()
    message = "error: step 2: the norm of the gradients is nan: that of 'blocks.1.mlp.up.weight' first, "
    assert line == message + "in the part of rank 1"
