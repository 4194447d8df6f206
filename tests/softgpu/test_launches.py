"""What a training step of GPT-2 asks of a GPU, counted on one that does nothing (idle.py)."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from tests.ranks import BACKSTOP, ROOT
from tests.softgpu.available import missing

# The fourth step of one rank: FULL_SHARD in bfloat16. Launches do not depend on the batch or the length.
STEP = """
import json, os
from dataclasses import replace
from tests.softgpu import idle
gpu = idle.start()
from bench.gpu.job import SIZES
from bench.gpu.ours import Trainer
trainer = Trainer(replace(SIZES["gpt2"], batch=1, seq=64).settings())
batch = trainer.batch(0)
for _ in range(3):
    trainer.train(*batch)
gpu.counts.clear()
trainer.train(*batch)
print(json.dumps([[*call, count] for call, count in gpu.counts.items()]), flush=True)
os._exit(0)  # when Python ends by itself, CuPy gives memory back to a GPU that is gone
"""


@pytest.fixture(scope="module")
def counts():
    """Calls by (what, a kernel's name or "")."""
    if missing():
        pytest.skip(missing())
    command = [sys.executable, "-c", STEP]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BACKSTOP)
    assert done.returncode == 0, done.stderr
    return Counter({(what, name): count for what, name, count in json.loads(done.stdout.splitlines()[-1])})


def test_a_step_of_gpt2_is_at_most_336_launches(counts):
    """Kernels, matmuls and fills; with four kernels for attention in a layer, where cuDNN has two."""
    launches = sum(n for (what, _), n in counts.items() if what in ("launch", "product", "set"))
    assert 147 < launches <= 336


def test_a_step_has_three_matmuls_for_each_matrix(counts):
    assert counts["product", ""] == 3 * (12 * 4 + 1)  # qkv, output, up, down; the head


def test_one_rank_neither_rounds_weights_for_a_gather_nor_copies_gradients(counts):
    assert not {("launch", "pack"), ("launch", "sum_parts")} & counts.keys()
    assert {what for what, _ in counts} >= {"launch", "product", "copy", "record", "wait"}
