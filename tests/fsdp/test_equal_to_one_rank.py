"""Sharded training computes what the plain model computes, whatever the shape of the model."""

import numpy as np
import pytest

from shardrt import optim
from tests.fsdp.nets import (
    CalledTwice,
    Frozen,
    Nested,
    Net,
    NeverCalled,
    PartlyUsed,
    TiedInside,
    Viewed,
    plain,
    train_on,
)

MODELS = [Net, CalledTwice, NeverCalled, TiedInside, Nested, Frozen, Viewed]


def assert_same_training(found, expected, tolerance=2e-5):
    (found_history, found_weights), (history, weights) = found, expected
    for step, ((found_loss, found_gradients), (loss, gradients)) in enumerate(
        zip(found_history, history, strict=True)
    ):
        assert found_loss == pytest.approx(loss, rel=tolerance), f"loss of step {step}"
        for name, gradient in gradients.items():
            np.testing.assert_allclose(
                found_gradients[name], gradient, rtol=0, atol=tolerance * np.abs(gradient).max(), err_msg=name
            )
    assert found_weights.keys() == weights.keys()
    for name in weights:
        np.testing.assert_allclose(found_weights[name], weights[name], rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_training_equals_the_unsharded_model(make, ranks):
    assert_same_training(train_on(ranks, make), plain(0, make))


@pytest.mark.parametrize("settings", [{"reshard_after_forward": True}, {"reshard_after_forward": False}])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_settings_do_not_change_the_result(settings, prefetch):
    found = train_on(2, Net, prefetch=prefetch, **settings)
    assert_same_training(found, plain(0))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_unused_parameter_of_a_unit_that_took_part_has_gradient_zero(ranks):
    """In the plain model it has none: the optimizer's decay and momentum act in one and not in the other."""

    def sgd(parameters):
        return optim.SGD(parameters, lr=0.1)

    found = train_on(ranks, PartlyUsed, make_optimizer=sgd)
    expected = train_on(0, PartlyUsed, make_optimizer=sgd)
    assert "blocks.1.spare.weight" not in expected[0][0][1]
    assert not found[0][0][1]["blocks.1.spare.weight"].any()
    assert_same_training(found, expected)


def test_more_ranks_than_some_units_have_lines():
    assert_same_training(train_on(12, Net), plain(0))
