"""Quantised collectives in the training command: with other axes, what is refused, the held-out loss."""

import numpy as np
import pytest

from tests.lab import jobs

BITS = ("--precision.gather-bits", "8", "--precision.reduce-bits", "8", "--precision.host-size")
RUNS = {
    "exact": (2, ()),
    "bits": (2, (*BITS, "1")),
    "with tp": (4, (*BITS, "2", "--parallel.tp", "2")),
    "with pp": (4, (*BITS, "1", "--parallel.pp", "2", "--precision.error-feedback", "true")),
}
pytestmark = pytest.mark.usefixtures("here")
folder = jobs.folder_of(RUNS, ("--batch-size", "8"))


@pytest.mark.parametrize("name", [name for name in RUNS if name != "exact"])
def test_held_out_loss_stays_within_one_percent(folder, name):
    losses = {
        each: [line["held_out_loss"] for line in jobs.records(folder, each, "evaluation")]
        for each in ("exact", name)
    }
    assert len(losses[name]) > 0
    np.testing.assert_allclose(losses[name], losses["exact"], rtol=0.01)
    assert losses[name] != losses["exact"]


test_other_bits_are_refused_before_anything_is_written = jobs.one_line_tests(
    ("precision.gather_bits must be 8, 4 or 0, got 3", "--precision.gather-bits", "3"),
    ("precision.error_feedback needs reduce_bits=8", "--precision.error-feedback", "true"),
)
