"""Low-bit optimizer state on the host: the same bits as on the device, in parts, and the planned bytes."""

import numpy as np
import pytest

from shardrt.nn.storage import Offloaded
from shardrt.optim import offload
from shardrt.optim.low_bit import AdamW8bit, AdamWBF16, Lion8bit, LionBF16
from tests.optim.storages import HostStorage, assert_same_bits, gradients, snapshot

SIZES = (368, 1504, 2608, 992, 37)  # each begins with a block
OPTIMIZERS = [AdamW8bit, Lion8bit, AdamWBF16, LionBF16]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Parameters straddle several."""
    monkeypatch.setattr(offload, "CHUNK", 1024)


def train(make, placement=None, **settings):
    storage = HostStorage(placement, SIZES)
    optimizer = make(storage.groups(), lr=0.01, weight_decay=0.1, **settings)
    for gradient in gradients(3, SIZES):
        optimizer.zero_grad()
        storage.reduce(gradient)
        optimizer.step()
    return snapshot(storage, optimizer)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_update_of_what_is_on_the_host_changes_no_bit(make):
    expected = train(make)
    everything = (True, True, True)
    for placement in ((True, False, False), (False, False, True), everything, (*everything, "host")):
        assert_same_bits(train(make, Offloaded(*placement)), expected)
    assert_same_bits(train(make, in_backward=True), expected)
