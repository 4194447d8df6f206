"""Low-bit optimizer state on the GPU: a captured step, whose numbers of updates differ between replays."""

import pytest

from shardrt.comm import thread
from shardrt.optim.low_bit import AdamW8bit, AdamWBF16, Lion8bit, LionBF16
from tests.gpu.test_captured_step import assert_same, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


@pytest.mark.parametrize("optimizer", [AdamW8bit, Lion8bit, AdamWBF16, LionBF16])
def test_replays_train_as_steps_that_are_not_captured(gpu, optimizer):
    expected, found = (thread.run(1, train, captured, optimizer=optimizer) for captured in (False, True))
    assert_same(found, expected)
