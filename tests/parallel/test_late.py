"""Backwards in two halves beside tensor and sequence parallelism: the same bits, and as many collectives."""

import numpy as np
import pytest

import shardrt
from tests import lab
from tests.deferred import always, as_a_pipeline, reducing_last, usual
from tests.parallel.nets import batch_of, build, mesh_of
from tests.ranks import run_ranks


def gradients(way, kind, axes, sequence, sharded, changes):
    """Of this rank, and the calls of all communicators."""
    counts = lab.Counts()
    mesh = mesh_of(**axes, wrap=counts)
    model = build(kind, mesh, sequence, sharded=sharded, changes=changes)
    shardrt.manual_seed(3, step=1)
    way(lambda number: model(*batch_of(number, mesh)), reducing_last(model) if sharded else always)
    return {name: p.grad for name, p in model.named_parameters()}, counts.all_calls()


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(
    ("kind", "axes", "sharded", "changes"),
    [
        ("llama", {"tp": 2}, False, None),  # each backward sums what sequence parallelism leaves partial
        ("gpt", {"shards": 2, "tp": 2}, True, {"loss_chunk": 5}),
    ],
)
def test_the_bits_and_collectives_of_usual_backwards(kind, axes, sequence, sharded, changes):
    how = (kind, axes, sequence, sharded, changes)
    expected = run_ranks(int(np.prod([*axes.values()])), gradients, usual, *how)
    found = run_ranks(int(np.prod([*axes.values()])), gradients, as_a_pipeline, *how)
    lab.assert_equal(found, expected)
    assert all(gradient is not None for gradients, _ in expected for gradient in gradients.values())
