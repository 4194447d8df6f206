"""`bench.launches` counts what a training step asks of a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import BACKSTOP
from tests.softgpu.available import missing

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def counted():
    """Of a step of GPT-2 on one rank."""
    if missing():
        pytest.skip(missing())
    command = [sys.executable, "-m", "bench.launches", "--steps", "1", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BACKSTOP)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    return result | {"by_name": {(row["what"], row["name"]): row["per_step"] for row in result["counts"]}}


def test_a_step_has_three_products_for_each_matrix(counted):
    assert counted["by_name"]["product", ""] == 3 * (12 * 4 + 1)  # qkv, output, up, down; the head


def test_one_rank_neither_rounds_weights_for_a_gather_nor_copies_gradients(counted):
    assert not {("launch", "pack"), ("launch", "sum_parts")} & counted["by_name"].keys()


def test_a_step_is_at_most_350_launches(counted):
    """With four kernels for attention in a layer; cuDNN's are two."""
    assert counted["launches"] <= 350


def test_all_kinds_of_calls_are_told(counted):
    assert {what for what, _ in counted["by_name"]} >= {"launch", "product", "copy", "record", "wait"}
    launched = ("launch", "product", "set")
    assert counted["launches"] == sum(n for (what, _), n in counted["by_name"].items() if what in launched)
    assert counted["python_calls"] > counted["launches"]
    assert counted["host_per_yardstick"] > 0
