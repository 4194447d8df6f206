"""Muon on the GPU, where matrices of one shape are one batch: as on the CPU, but for the order of sums."""

import pytest

from shardrt.fsdp import CPUOffloadPolicy
from tests import lab
from tests.optim.test_muon import Wide, trained

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("offload", [None, CPUOffloadPolicy()])
def test_its_weights_are_those_of_the_cpu(offload):
    how = {"of_mesh": {"device": "cuda"}, "offload_policy": offload}
    expected = trained(2, make=Wide)[0]
    for ranks in (1, 2):
        found = lab.first(ranks, trained, 2, "FULL_SHARD", Wide, **how)[0]
        lab.assert_close(found, expected, rtol=0, atol=1e-5)
