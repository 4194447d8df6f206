"""Quantised collectives on GPUs: training follows that in float32."""

import numpy as np
import pytest

from shardrt.comm import thread
from shardrt.fsdp import MixedPrecisionPolicy
from shardrt.fsdp.options.quantisation import Quantisation
from tests.gpu.test_training import losses_of

pytestmark = pytest.mark.gpu


def test_training_in_bfloat16_follows_float32():
    how = Quantisation(8, 8, host_size=1, secondary=True, error_feedback=True)
    policy = MixedPrecisionPolicy("bfloat16", "float32", quantised=how)
    found = thread.run(2, losses_of, "cuda", mp_policy=policy)[0]
    exact = thread.run(2, losses_of, "cuda")[0]
    np.testing.assert_allclose(found, exact, rtol=0.02)
    assert (found != exact).any()
