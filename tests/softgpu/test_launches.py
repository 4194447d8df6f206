"""What a training step of GPT-2 asks of a GPU, counted on the GPU emulator."""

from collections import Counter
from dataclasses import replace

import pytest

from shardrt.comm import thread

pytest.importorskip("cupy")

# GPT-2 but for its widths: launches do not depend on them, nor on the batch or the length.
NARROW = {"dim": 96, "vocab": 64, "batch": 1, "seq": 8}


@pytest.fixture
def counts(software):
    """Calls by (what, a kernel's name or None) of the fourth step of one rank: FULL_SHARD in bfloat16."""
    from bench.gpu.job import SIZES
    from bench.gpu.ours import Trainer

    def rank():
        trainer = Trainer(replace(SIZES["gpt2"], **NARROW).settings())
        batch = trainer.batch(0)
        for _ in range(3):
            trainer.train(*batch)
        software.log.clear()
        trainer.train(*batch)

    thread.run(1, rank)
    return Counter((what, detail if what == "launch" else None) for what, _, detail in software.log)


def test_a_step_of_gpt2_is_at_most_336_launches(counts):
    """Kernels, matmuls and fills; with four kernels for attention in a layer, where cuDNN has two."""
    launches = sum(n for (what, _), n in counts.items() if what in ("launch", "product", "set"))
    assert 147 < launches <= 336
    assert counts["product", None] == 3 * (12 * 4 + 1)  # qkv, output, up, down; the head
    # One rank neither rounds weights for a gather nor copies gradients.
    assert not {("launch", "pack"), ("launch", "sum_parts")} & counts.keys()
    assert {what for what, _ in counts} >= {"launch", "product", "copy", "record", "wait"}
