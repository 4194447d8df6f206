"""Linear layers in float8: results and gradients are products of what was rounded, in float64 on the host."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import shardrt
from shardrt import device, nn
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard
from shardrt.kernels.cuda.float8 import E4M3, E5M2
from shardrt.tensor import Tensor
from tests.cuda.test_float8 import scaled

pytestmark = pytest.mark.gpu
BFLOAT16 = MixedPrecisionPolicy("bfloat16", "float32", full_precision=(nn.LayerNorm,))
FLOAT8 = replace(BFLOAT16, float8=True)
INPUTS, OUTPUTS, ROWS = 144, 80, 64


def rounded(x, kind):
    """What a product takes of x, in float64."""
    bits, factor, _ = scaled(x, kind)
    return bits.view(getattr(ml_dtypes, kind)).astype(np.float64) * np.float64(factor)


def low(x):
    return x.astype(ml_dtypes.bfloat16)


def alone(layer, policy=FLOAT8):
    """A layer that is the whole model of one rank."""
    return fully_shard(layer, mesh=init_device_mesh("cuda"), mp_policy=policy)


def layer(accumulated, gelu):
    """(x, weight, bias, dy), (y, dx, dweight, dbias) of a rank."""
    if why := device.get("cuda").lacks_float8():
        pytest.skip(why)
    shardrt.manual_seed(1)
    model, here = alone(nn.Linear(INPUTS, OUTPUTS, gelu=gelu)), device.current()
    random = np.random.default_rng(0)
    x, dy = (low(random.normal(size=(2, ROWS // 2, size)).astype(np.float32)) for size in (INPUTS, OUTPUTS))
    given = Tensor(here.asarray(x), requires_grad=True)
    for _ in range(accumulated):
        y = model(given)
        y.backward(here.asarray(dy))
    arrays = (
        here.to_numpy(y.data),
        here.to_numpy(given.grad),
        *(here.to_numpy(p.grad) for p in model.parameters()),
    )
    shapes = (ROWS, OUTPUTS), (ROWS, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,)
    found = [each.astype(np.float64).reshape(shape) for each, shape in zip(arrays, shapes, strict=True)]
    weight, bias = map(low, full_state_dict(model).values())
    return (x.reshape(ROWS, -1), weight, bias, dy.reshape(ROWS, -1)), found


def assert_product(found, a, b, error, added=0.0):
    """found = a b + added, to an error beside the sum of magnitudes."""
    magnitudes = np.abs(a) @ np.abs(b) + np.abs(added)
    assert (np.abs(found - (a @ b + added)) <= error * magnitudes).all()


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_layer_and_its_gradients(accumulated):
    (x, weight, bias, dy), (y, dx, dweight, dbias) = thread.run(1, layer, accumulated, False)[0]
    x8, weight8, dy8 = rounded(x, E4M3), rounded(weight, E4M3), rounded(dy, E5M2)
    assert_product(y, x8, weight8.T, 2**-8, bias.astype(np.float64))
    assert_product(dx, accumulated * dy8, weight8, 2**-7)
    assert_product(
        dweight, accumulated * dy8.T, x8, 2**-12
    )  # a float32, of sums as exact as tensor cores are
    np.testing.assert_allclose(dbias, accumulated * dy.astype(np.float64).sum(0), rtol=1e-5, atol=1e-4)


def test_with_a_gelu_it_is_about_that_of_float32():
    (x, weight, bias, dy), found = thread.run(1, layer, 1, True)[0]
    x, weight, bias, dy = (each.astype(np.float64) for each in (x, weight, bias, dy))
    inner = x @ weight.T + bias
    bend = np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3))
    slope = 0.5 * (1 + bend) + 0.5 * inner * (1 - bend**2) * np.sqrt(2 / np.pi) * (
        1 + 3 * 0.044715 * inner**2
    )
    dinner = dy * slope
    expected = 0.5 * inner * (1 + bend), dinner @ weight, dinner.T @ x, dinner.sum(0)
    for each, exact in zip(found, expected, strict=True):
        assert np.linalg.norm(each - exact) <= 0.1 * np.linalg.norm(exact)
