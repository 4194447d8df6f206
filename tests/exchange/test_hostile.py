"""500 damaged or forged files for each reader: one line each, nothing run, nothing written elsewhere."""

import re
import subprocess
import sys

import pytest

from shardrt.__main__ import main
from tests.exchange.made import adapter, checkpoint, write


@pytest.mark.parametrize("source", ["shardrt", "safetensors", "peft"])
def test_mutants_of_a_checkpoint_are_refused_in_one_line(source, tmp_path):
    valid, to = write(checkpoint(), tmp_path / "run"), "safetensors"
    if source == "peft":
        valid, to = adapter(tmp_path / "adapter"), "peft"
    if source == "safetensors":
        assert main(["ckpt", "convert", str(valid), str(tmp_path / "hub"), "--to", to]) == 0
        valid, to = tmp_path / "hub", "shardrt"
        (valid / "tokenizer.json").write_text('{"version": "1.0"}')
    (tmp_path / "scratch").mkdir()
    words = [str(valid), str(tmp_path / "scratch"), "0", "500", to, source]
    done = subprocess.run(
        [sys.executable, "-m", "tests.exchange.hostile", *words], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    refused = int(re.search(r"(\d+) of 500 refused", done.stdout)[1])
    assert 250 < refused < 500  # a change of a weight is none that safetensors could notice
