"""Every schedule, and no pipeline at all, give the same bits; on any mesh they train as one rank."""

from functools import partial

import numpy as np
import pytest

from shardrt.parallel.schedules import SCHEDULES
from tests import lab
from tests.parallel import piped
from tests.parallel.piped import trained

LLAMA, GPT = (partial(make, n_layer=6) for make in (piped.llama, piped.gpt))  # eight pieces
JOBS = [(name, ranks) for name in SCHEDULES for ranks in (2, 4)]
JOBS[JOBS.index(("DualPipeV", 4))] = ("ZBVZeroBubble", 1)  # DualPipeV takes eight micro-batches there


@pytest.mark.parametrize(("schedule", "ranks"), JOBS)
def test_every_schedule_has_the_bits_of_no_pipeline(schedule, ranks):
    expected = trained((1, 1, 1), None, make=LLAMA, sharded=False)
    lab.assert_equal(trained((ranks, 1, 1), schedule, make=LLAMA, sharded=False), expected)


@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
def test_beside_sharding(schedule):
    lab.assert_equal(trained((2, 1, 2), schedule, make=LLAMA), trained((1, 1, 2), None, make=LLAMA))


@pytest.mark.parametrize(("schedule", "sequence"), [("1F1B", True), ("ZB-H1", False)])
def test_three_axes(schedule, sequence):
    how = {"make": LLAMA, "sequence": sequence}
    lab.assert_equal(trained((2, 1, 2, 2), schedule, **how), trained((1, 1, 2, 2), "GPipe", **how))


def test_tied_weights_are_one():
    how = {"make": GPT, "sharded": False}
    first = trained((2, 1, 1), "1F1B", **how)
    for schedule in ("GPipe", "ZB-H1", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"):
        lab.assert_equal(trained((2, 1, 1), schedule, **how), first)
    lab.assert_equal(trained((4, 1, 1), "ZB-H1", **how), first)
    alone = trained((1, 1, 1), None, **how)
    for what in ("losses", "norms"):
        np.testing.assert_allclose(first[what], alone[what], rtol=1e-6)
