"""Sharded training computes what the plain model computes, whatever the shape of the model.

Other strategies have the bits of FULL_SHARD (test_strategies.py), and so has all that moves things
(test_pairs.py).
"""

import pytest

from shardrt import optim
from tests import lab

MODELS = [*(lab.Net, lab.CalledTwice, lab.NeverCalled, lab.TiedInside, lab.Nested, lab.Frozen, lab.Viewed)]


def assert_same_training(found, expected):
    lab.assert_close(found.losses, expected.losses, "losses", rtol=2e-5)
    lab.assert_close(found.gradients, expected.gradients, "gradients", of_largest=2e-5, more=True)
    lab.assert_close(found.weights, expected.weights, "weights", atol=2e-5)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_training_equals_the_unsharded_model(make, ranks):
    assert_same_training(lab.train_on(ranks, make), lab.train_on(0, make))


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_unused_parameter_of_a_unit_that_took_part_has_gradient_zero(ranks):
    """In the plain model it has none: the optimizer's decay and momentum act in one and not in the other."""

    def sgd(parameters):
        return optim.SGD(parameters, lr=0.1)

    found, expected = (lab.train_on(n, lab.PartlyUsed, optimizer=sgd) for n in (ranks, 0))
    assert "blocks.1.spare.weight" not in expected.gradients[0]
    assert not found.gradients[0]["blocks.1.spare.weight"].any()
    assert_same_training(found, expected)


def test_more_ranks_than_some_units_have_lines():
    assert_same_training(lab.train_on(12), lab.train_on(0))
