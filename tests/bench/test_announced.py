"""The simulated experiment of Accelerate's announcement: what runs out of memory there does so here."""

from bench.announced import LIBRARIES, MEMORY, ROWS, step
from shardrt.simulate.machine import Machine

BY_TITLE = {(row.size, row.title): row for row in ROWS}


def bytes_of(size, title, batch):
    report = step(BY_TITLE[size, title], batch, 128, Machine.load("titan-rtx-2"))
    assert not report.measured
    return max(report.device_bytes.values()) + LIBRARIES


def test_xl_fits_sharded_and_not_replicated():
    assert bytes_of("gpt2-xl", "DDP", 1) > MEMORY
    assert bytes_of("gpt2-xl", "FULL_SHARD, 2K", 5) < MEMORY
