"""The functions made of array operations, by CuPy on the GPU in software: it takes no array of the host."""

import numpy as np
import pytest

from shardrt import Tensor, device
from shardrt import functional as F
from tests.functional.test_beside_pytorch import CASES, FORMULAS
from tests.functional.test_operands import NUMBERS, OPS, positive
from tests.gradcheck import normal

KERNELS = {"adaptive_avg_pool2d", "conv1d"}  # by CUDA's own kernels, which are tested beside these


def results(function, arrays):
    """Values and gradients, as NumPy arrays."""
    inputs = [Tensor(device.current().asarray(array), requires_grad=True) for array in arrays]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for output in outputs:
        output.sum().backward(retain_graph=True)
    here = device.current()
    return [here.to_numpy(x) for x in (*(y.data for y in outputs), *(x.grad for x in inputs))]


def compare(function, arrays):
    """On the CPU and on the device that is current."""
    got = results(function, arrays)
    with device.use(device.get("cpu")):
        expected = results(function, arrays)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", sorted(CASES.keys() - KERNELS))
def test_functions(gpu, name):
    function, _, arrays = CASES[name]
    compare(function, arrays)


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
