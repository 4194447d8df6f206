"""nn/layers.py and nn/init.py: gradients of whole layers, what parameters start as, errors."""

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, nn, random
from shardrt import functional as F
from tests import lab
from tests.gradcheck import normal


def test_dropout_acts_in_training_only():
    layer, x = nn.Dropout(0.5), Tensor(np.ones(1000, np.float32))
    assert (layer(x).data == 0).any()
    assert layer.eval()(x) is x


def test_layers_are_the_functions_of_their_parameters():
    """Whose gradients tests/functional checks."""
    x = Tensor(normal(4, 6).astype(np.float32))
    for bias in (True, False):
        linear, norm = nn.Linear(6, 3, bias=bias), nn.LayerNorm(6, eps=1e-3, bias=bias)
        norm.weight.data = normal(6)
        np.testing.assert_array_equal(linear(x), F.linear(x, linear.weight, linear.bias))
        expected = F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, 1e-3)
        np.testing.assert_array_equal(norm(x), expected)
        assert (linear.bias is not None) == (norm.bias is not None) == bias
    rms = nn.RMSNorm(6, eps=1e-3)
    rms.weight.data = normal(6)
    np.testing.assert_array_equal(rms(x), F.rms_norm(x, rms.weight.shape, rms.weight, 1e-3))


def test_parameters_start_as_in_torch():
    shardrt.manual_seed(1)
    linear, table = nn.Linear(400, 300), nn.Embedding(300, 400)
    bound = 1 / 20
    for parameter in (linear.weight, linear.bias):
        assert -bound <= parameter.data.min() < -0.98 * bound and 0.98 * bound < parameter.data.max() <= bound
        assert parameter.data.std() == pytest.approx(bound / np.sqrt(3), rel=0.05)
    assert table.weight.data.mean() == pytest.approx(0, abs=0.02)
    assert table.weight.data.std() == pytest.approx(1, rel=0.02)
    norm = nn.LayerNorm(4)
    assert norm.weight.data.tolist() == [1] * 4 and norm.bias.data.tolist() == [0] * 4


def test_a_chosen_start_leaves_the_bias_at_zero():
    linear = nn.Linear(50, 40, init=nn.init.Normal(0.0, 0.02))
    assert linear.weight.data.std() == pytest.approx(0.02, rel=0.1)
    assert (linear.bias.data == 0).all()


SPECIFICATIONS = [nn.init.Normal(1.0, 2.0), nn.init.Uniform(-3.0, -1.0), nn.init.Constant(4.0)]
SPECIFICATIONS += [nn.init.Zeros(), nn.init.Ones()]


@pytest.mark.parametrize("init", SPECIFICATIONS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_pieces_have_the_bits_of_the_whole(init, dtype):
    key = random.name_key("blocks.3.weight")
    whole = np.empty(1001, dtype)
    init.fill(whole, 3, key, 0)
    for cuts in ([0, 1, 2, 5, 500, 1001], [0, 333, 1001], [0, 64, 128, 1000, 1001]):
        for start, stop in zip(cuts, cuts[1:], strict=False):
            piece = np.empty(stop - start, dtype)
            init.fill(piece, 3, key, start)
            np.testing.assert_array_equal(piece, whole[start:stop])


def test_specifications_have_their_moments():
    out = np.empty(100_000)
    nn.init.Normal(1.0, 2.0).fill(out, 0, 1, 0)
    assert (out.mean(), out.std()) == (pytest.approx(1, abs=0.03), pytest.approx(2, rel=0.02))
    nn.init.Uniform(-3.0, -1.0).fill(out, 0, 1, 0)
    assert out.min() >= -3 and out.max() <= -1
    assert (out.mean(), out.std()) == (pytest.approx(-2, abs=0.01), pytest.approx(2 / 12**0.5, rel=0.02))


test_what_does_not_fit_is_an_error = lab.refusals(
    (lambda: nn.Linear(0, 3), "Linear: in_features must be at least 1, got 0"),
    (lambda: nn.Linear(3, -1), "out_features"),
    (lambda: nn.Embedding(0, 3), "num_embeddings"),
    (lambda: nn.LayerNorm(0), "LayerNorm: width"),
    (lambda: nn.RMSNorm(0), "RMSNorm: width"),
    (lambda: nn.Dropout(1.0), "p must be in"),
    (lambda: nn.GELU("erf"), "'none' or 'tanh'"),
    (lambda: nn.init.Normal(0.0, -1.0), "std must not be negative"),
    (lambda: nn.init.Uniform(1.0, 0.0), "low must not be above high"),
)


@pytest.mark.parametrize("size", [(8,), [8], 8.0, None], ids=str)
def test_sizes_that_are_no_integers_are_named(size):
    with pytest.raises(TypeError, match="LayerNorm: width must be an integer, got"):
        nn.LayerNorm(size)
    with pytest.raises(TypeError, match="Linear: out_features must be an integer, got"):
        nn.Linear(4, size)
    assert nn.LayerNorm(np.int64(3)).weight.shape == (3,)
