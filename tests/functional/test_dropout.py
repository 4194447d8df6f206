"""functional/dropout.py: the mask is one of the global batch, and backward uses it again."""

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, nn
from shardrt import functional as F
from shardrt.comm import thread, world
from tests.gradcheck import check_gradients, leaf, normal, sliced


def seeded(function):
    """The same masks at every evaluation."""

    def run(*inputs):
        shardrt.manual_seed(7)
        return function(*inputs)

    return run


@pytest.mark.parametrize("shape", [(3, 5), (1,), (2, 1, 7), ()], ids=str)
def test_gradients(shape):
    check_gradients(seeded(lambda x: F.dropout(x, 0.4)), leaf(sliced(normal(*shape))))


def test_gradients_of_two_dropouts_one_after_the_other():
    check_gradients(seeded(lambda x: F.dropout(F.dropout(x, 0.2) * x, 0.4)), leaf(normal(40)))


def test_a_share_p_is_zero_and_the_mean_stays():
    shardrt.manual_seed(1)
    y = F.dropout(np.ones(200_000, np.float32), 0.25).data
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    assert np.mean(y == 0) == pytest.approx(0.25, abs=5e-3)


def test_each_call_and_each_step_and_each_seed_has_its_own_mask():
    x = np.ones(1000, np.float32)
    masks = []
    for seed, step in ((1, 0), (1, 1), (2, 0)):
        shardrt.manual_seed(seed, step)
        masks += [F.dropout(x, 0.5).data.tobytes(), F.dropout(x, 0.5).data.tobytes()]
    assert len(set(masks)) == 6


def test_a_seed_and_step_give_the_same_masks_again():
    x = np.ones(1000, np.float32)
    masks = []
    for _ in range(2):
        shardrt.manual_seed(3, 9)
        masks.append(F.dropout(x, 0.5).data)
    np.testing.assert_array_equal(*masks)


class Layers(nn.Module):
    """Each layer drops twice by one module, and once itself."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            masks = [self.drop(x), self.drop(x), F.dropout(x, 0.5)]
            return [mask.data.tobytes() for mask in masks]

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x):
        again = self.layers[1](x)
        return [layer(x) for layer in self.layers], again


def test_every_use_has_its_own_mask():
    x, model = Tensor(np.ones(300, np.float32)), Layers()
    shardrt.manual_seed(3, 4)
    calls = [model(x) for _ in range(2)]  # of two micro-batches, say
    masks = [mask for layers, again in calls for layer in (*layers, again) for mask in layer]
    assert len(set(masks)) == len(masks) == 24


def test_a_part_of_a_model_draws_the_masks_that_it_has_in_the_whole():
    """As a pipeline's stages do, which are called once for each micro-batch."""
    x, model = Tensor(np.ones(300, np.float32)), Layers()
    shardrt.manual_seed(3, 4)
    whole = [model(x)[0] for _ in range(2)]
    for number in (0, 2):
        shardrt.manual_seed(3, 4)
        assert [model.layers[number](x) for _ in range(2)] == [layers[number] for layers in whole]


def test_what_uses_no_random_numbers_does_not_count():
    x, model = Tensor(np.ones(300, np.float32)), Layers()
    shardrt.manual_seed(3, 4)
    first, second = model(x), model(x)
    shardrt.manual_seed(3, 4)
    assert model(x) == first
    model.eval()
    nn.Linear(300, 1)(x)
    model.train()
    assert model(x) == second


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_ranks_together_drop_what_one_rank_drops(ranks):
    whole = np.ones((12, 7), np.float32)

    def piece():
        shardrt.manual_seed(5)
        here = world.current()
        return F.dropout(whole[here.rank * 12 // ranks : (here.rank + 1) * 12 // ranks], 0.5).data

    shardrt.manual_seed(5)
    expected = F.dropout(whole, 0.5).data
    np.testing.assert_array_equal(np.concatenate(thread.run(ranks, piece)), expected)


def test_nothing_happens_in_evaluation_or_at_p_zero():
    x = leaf(normal(3))
    assert F.dropout(x, 0.5, training=False) is x
    assert F.dropout(x, 0.0) is x


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_p_outside_its_range_is_an_error(p):
    with pytest.raises(ValueError, match="p must be in"):
        F.dropout(Tensor([1.0]), p)
