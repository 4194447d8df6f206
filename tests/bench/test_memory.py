"""bench.memory: smaps by kind; what it prints agrees with itself."""

import json

import pytest

from bench import memory
from shardrt.fsdp.options import chunks
from shardrt.kernels.cpu import linear
from tests.bench.test_compare import TINY
from tests.ranks import mpirun

SMAPS = """\
00400000-00401000 r--p 00000000 08:01 17    /usr/lib/libllvm.so (x)
Rss:                1000 kB
Pss:                 500 kB
7f00-7f10 rw-s 00000000 00:01 3    /memfd:shardrt (deleted)
Size:               9999 kB
Rss:                2000 kB
Pss:                1000 kB
7f20-7f30 rw-p 00000000 00:00 0
Rss:                 300 kB
Pss:                 300 kB
7f40-7f50 rw-p 00000000 00:00 0    [heap]
Rss:                  40 kB
Pss:                  40 kB
"""


def test_memory_by_kind():
    found = memory.by_kind(SMAPS.splitlines())
    assert found == {
        "of ranks together": pytest.approx((2.048, 1.024)),
        "libraries": pytest.approx((1.024, 0.512)),
        "heap and arrays": pytest.approx((0.34816, 0.34816)),
    }


def test_ways_last_for_their_steps():
    before = chunks.IN_CHUNKS, linear.INPUT_AGAIN
    with memory.set_to("all of these"):
        assert chunks.IN_CHUNKS > 1 << 50 and not linear.INPUT_AGAIN
    assert before == (chunks.IN_CHUNKS, linear.INPUT_AGAIN) == (1 << 25, True)


def rows_of(*options):
    words = ["-m", "bench.memory", *TINY.arguments(), *options]
    done = mpirun(2, words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_what_is_measured_holds_what_is_planned():
    (row,) = rows_of("--ways", "inputs kept")
    rss, pss = (sum(pair[place] for pair in row["rss_and_pss_mb"].values()) for place in (0, 1))
    assert pss == pytest.approx(row["pss_mb"], abs=0.2)
    assert pss < rss <= row["peak_rss_mb"] + 1
    assert row["rss_and_pss_mb"]["heap and arrays"][0] > row["planned_mb"]["optimizer state"]
    assert row["pss_mb"] < row["job_pss_mb"] < 2.2 * row["pss_mb"]


def test_by_turns_all_ways_train_alike():
    rows = rows_of("--ways", "default,all of these", "--turns", "2")
    assert [row["way"] for row in rows] == ["default", "all of these"]
    assert rows[0]["of_the_first"] == 1.0 and rows[0]["loss"] == rows[1]["loss"]
