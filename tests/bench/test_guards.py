"""`bench.guards` runs, and its parts are those that a step calls."""

import json

import pytest

from tests.ranks import mpirun

SMALL = """batch_size = 2
data = ["text.txt"]
[model]
n_layer = 1
n_head = 1
n_embd = 8
block_size = 8
vocab_size = 256
"""


@pytest.mark.mpi
def test_every_part_is_timed_and_called_in_a_step(tmp_path):
    (tmp_path / "text.txt").write_text("to be, or not to be " * 20)
    config = tmp_path / "small.toml"
    config.write_text(SMALL.replace("text.txt", str(tmp_path / "text.txt")))
    done = mpirun(2, ["-m", "bench.guards", "--config", str(config), "--steps", "2"])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ranks"] == 2
    assert result["us_per_call"].keys() == {"record", "name", "plan", "compare", "tick"}
    assert all(value > 0 for part in ("us_per_call", "calls_per_step") for value in result[part].values())
    assert result["us_per_step"].keys() == {"record", "name", "plan", "compare", "watchdog"}
