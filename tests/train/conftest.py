"""Runs in this process leave out what takes longer than they do, and is tested for itself."""

import pytest

from tests.lab.jobs import furnish
from tests.train.plain import leave_out


@pytest.fixture(scope="module", autouse=True)
def plain_runs():
    """What plain.py leaves out. (test_metrics has the picture.)"""
    with pytest.MonkeyPatch.context() as patch:
        leave_out(patch.setattr)
        yield


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A furnished folder of its own, which is the present one of the test."""
    monkeypatch.chdir(furnish(tmp_path))
    return tmp_path


@pytest.fixture
def here(folder, monkeypatch):
    """Tests run in the folder of the module's runs."""
    monkeypatch.chdir(folder)
