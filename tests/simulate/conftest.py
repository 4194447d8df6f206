"""What is recorded leaves another device: each test of this folder begins with that of before."""

import re

import pytest

from shardrt import device
from tests.ranks import ROOT


@pytest.fixture(autouse=True)
def _same_device():
    before = device.current()
    yield
    device.set_current(before)


@pytest.fixture
def readme(tmp_path):
    """A file with the program of the README."""
    file = tmp_path / "train.py"
    file.write_text(re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)[1])
    return str(file)


@pytest.fixture
def text(tmp_path, monkeypatch):
    """The folder in which the test runs, with a text to train on."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question. " * 500)
    return tmp_path
