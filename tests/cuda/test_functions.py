"""The functions made of array operations, by CuPy on the GPU emulator: it takes no array of the host."""

import re

import numpy as np
import pytest

from shardrt import Tensor, device
from shardrt import functional as F
from tests.functional.test_beside_pytorch import CALLS, FORMULAS
from tests.functional.test_operands import NUMBERS, OPS, positive
from tests.gradcheck import normal

# By CUDA's own kernels, which are tested beside these, or changed by them in arrays of the device.
KERNELS = (
    r"adaptive_avg_pool2d|conv|max_pool|avg_pool|(log_)?softmax|relu\(|silu|gelu|.*(layer|rms|batch)_norm|"
)
KERNELS += r"linear|cross_entropy|scaled_dot|embedding|matmul|dropout"


def results(function, arrays):
    """Values and gradients, as NumPy arrays."""
    inputs = [Tensor(device.current().asarray(array), requires_grad=True) for array in arrays]
    output = function(*inputs)
    output.sum().backward()
    return [device.current().to_numpy(x) for x in (output.data, *(x.grad for x in inputs))]


def compare(function, arrays):
    """On the CPU and on the device that is current."""
    got = results(function, arrays)
    with device.use(device.get("cpu")):
        expected = results(function, arrays)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in CALLS if not re.match(KERNELS, name)])
def test_functions(gpu, name):
    compare(*CALLS[name])


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers(gpu, kind):
    for name in OPS.keys() - {"where"}:
        op = OPS[name][0]
        for shape in ((), (3,)):
            compare(lambda x: op(x, NUMBERS[kind]), [positive(shape, np.float64)])  # noqa: B023
            compare(lambda x: op(NUMBERS[kind], x), [positive(shape, np.float64)])  # noqa: B023


def test_einsum_of_one_operand_and_positions(gpu):
    for formula, shapes in FORMULAS.items():
        if len(shapes) == 1:
            compare(lambda x: F.einsum(formula, x), [normal(*shapes[0])])  # noqa: B023
    for function in (F.argmax, F.argmin, F.argsort, lambda x: F.one_hot([[0, 2]])):
        with device.use(device.get("cpu")):
            expected = function(normal(3, 4))
        array = function(Tensor(gpu.asarray(normal(3, 4))))
        np.testing.assert_array_equal(gpu.to_numpy(array), expected)
