"""Lion beside its paper's five lines in NumPy, wherever its arrays are and however they are cut."""

from functools import partial

import numpy as np
import pytest

from shardrt import optim
from shardrt.nn.storage import Offloaded
from tests import lab
from tests.optim.storages import SIZES, HostStorage, assert_same_bits, gradients, snapshot

STEPS = 20


def reference(weights, grads, lr, beta1, beta2, decay):
    """Algorithm 2 of the paper, in float64."""
    weights, m = weights.astype(np.float64), np.zeros(weights.size)
    for grad in grads:
        direction = np.sign(beta1 * m + (1 - beta1) * grad)
        weights = weights - lr * (direction + decay * weights)
        m = beta2 * m + (1 - beta2) * grad
    return weights, m


def trained(placement=None, dtype=np.float32, **how):
    storage = HostStorage(placement, dtype=dtype)
    first, *others = storage.parameters
    groups = [{"params": [first], "lr": 3e-2, "betas": (0.8, 0.9)}, {"params": others}]
    optimizer = optim.Lion(groups, lr=1e-2, weight_decay=0.1, **how)
    for gradient in gradients(STEPS):
        storage.reduce(gradient)
        lab.update(optimizer)
    return storage, optimizer


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 3e-6), (np.float64, 1e-14)])
def test_it_takes_the_steps_of_the_paper(dtype, tolerance):
    storage, optimizer = trained(dtype=dtype)
    start, cut = HostStorage(dtype=dtype).shard, SIZES[0]
    grads = [g.astype(np.float64) for g in gradients(STEPS)]
    settings = ((slice(None, cut), 3e-2, 0.8, 0.9), (slice(cut, None), 1e-2, 0.9, 0.99))
    for part, lr, beta1, beta2 in settings:
        weights, m = reference(start[part], [g[part] for g in grads], lr, beta1, beta2, 0.1)
        np.testing.assert_allclose(storage.shard[part], weights, rtol=0, atol=tolerance)
        np.testing.assert_allclose(optimizer.slices[0].state["m"][part], m, rtol=0, atol=tolerance)


@pytest.mark.parametrize("step", ["device", "host"])
def test_it_has_the_same_bits_on_the_host_piece_by_piece_and_in_backward(step, monkeypatch):
    monkeypatch.setattr(optim.offload, "CHUNK", 1000)
    found = snapshot(*trained(Offloaded(True, True, True, step=step), in_backward=True))
    assert_same_bits(found, snapshot(*trained()))


def test_a_sharded_model_trains_to_the_weights_of_one_rank():
    lion = partial(optim.Lion, lr=1e-3, weight_decay=0.1)
    expected = lab.train_on(0, optimizer=lion)
    for ranks in (1, 2, 3):
        found = lab.train_on(ranks, optimizer=lion)
        lab.assert_close(found.losses, expected.losses, rtol=1e-5)
        for name, values in expected.weights.items():
            # a sign turns where a gradient is 0 but for rounding: at most a few elements
            differs = np.abs(found.weights[name] - values) > 1e-6
            assert differs.mean() < 0.02, name


test_betas_that_cannot_be_are_refused = lab.refusals(
    (
        lambda: optim.Lion(HostStorage().parameters, betas=(0.9, 1.0)),
        ValueError,
        r"Lion: betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)",
    )
)
