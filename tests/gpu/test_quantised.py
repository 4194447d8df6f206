"""Quantised collectives on GPUs: training follows that in float32, and repeats."""

import numpy as np
import pytest

from shardrt.comm import thread
from shardrt.fsdp import MixedPrecisionPolicy
from shardrt.fsdp.options.quantisation import Quantisation
from tests.gpu.test_training import losses_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("hybrid", [False, True])
def test_training_in_bfloat16_follows_float32(hybrid):
    kind = {"strategy": "HYBRID_SHARD", "shape": (2, 1)} if hybrid else {}
    how = Quantisation(None if hybrid else 8, 8, host_size=1, secondary=not hybrid, error_feedback=True)
    policy = MixedPrecisionPolicy("bfloat16", "float32", quantised=how)
    found, again = (thread.run(2, losses_of, "cuda", mp_policy=policy, **kind)[0] for _ in range(2))
    exact = thread.run(2, losses_of, "cuda", **kind)[0]
    np.testing.assert_array_equal(again, found)
    np.testing.assert_allclose(found, exact, rtol=0.02)
    assert (found != exact).any()
