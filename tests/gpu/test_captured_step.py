"""Whole steps as CUDA graphs: the tests of tests/cuda, on the GPU."""

import pytest

from tests.cuda.test_captured_step import test_replays_train_as_steps_that_are_not_captured

__all__ = ["test_replays_train_as_steps_that_are_not_captured"]

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
