"""Every op on the simulated device: results and gradients have the shapes and types that the CPU gives."""

import re

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, device, nn
from shardrt import functional as F
from shardrt.device.cpu import CPUDevice
from shardrt.device.simulated import SimulatedDevice
from tests.functional.test_beside_pytorch import ALL
from tests.gradcheck import normal

ROWS = np.array([1, 0])
X, Y, IMAGES = normal(2, 3, 4) ** 2 + 0.1, normal(3, 4) ** 2 + 0.1, normal(2, 4, 6, 6)
# Texts with an array that is no input, as ROW_, have it in float64.
FUNCTIONS = {name: op for name, op in ALL.items() if not re.search(r"[A-Z]_\b", name)}
OTHERS = {  # operators, modules, and functions that PyTorch does not have
    "+": (lambda x, y: x + y, (X, Y)),
    "-": (lambda x, y: 1 - x - y, (X, Y)),
    "*": (lambda x, y: x * y * 2, (X, Y)),
    "/": (lambda x, y: x / y, (X, Y)),
    "**": (lambda x, y: x**y, (X, Y)),
    "** 3": (lambda x: x**3, (X,)),
    "** 0": (lambda x: x**0, (X,)),
    "@": (lambda x, y: x @ y.T, (X, Y)),
    "@ of batches": (lambda x: x @ x.transpose(1, 2), (X,)),
    "max": (lambda x: x.max(1), (X,)),
    "min": (lambda x: x.min(), (X,)),
    "reshape": (lambda x: x.transpose(0, 1).reshape(-1, 2) * 1, (X,)),
    "slice": (lambda x: x[:, 1, ::2] * 1, (X,)),
    "index": (lambda x: x[ROWS], (X,)),
    "clamp by tensors": (F.clamp, (X, Y)),
    "dropout": (lambda x: F.dropout(x, 0.5), (X,)),
    "cast": (lambda x: F.cast(x, np.float64), (X,)),
    "BatchNorm2d": (lambda z: nn.BatchNorm2d(4)(z), (IMAGES,)),
    "Conv2d": (lambda z: nn.Conv2d(4, 8, 3, padding=1)(z), (IMAGES,)),
    "ConvTranspose2d": (lambda z: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2)(z), (IMAGES,)),
}
OPS = FUNCTIONS | OTHERS


def outcome(here, function, arrays):
    """(shape, dtype) of the result and of the gradients, of inputs in float32."""
    with device.use(here):
        shardrt.manual_seed(1)
        leaves = [Tensor(array.astype(np.float32), requires_grad=True) for array in arrays]
        result = function(*leaves)
        F.sum(result).backward()
        assert device.of(result.data) is here
        found = [result.data, *(leaf.grad for leaf in leaves)]
        return [None if array is None else (array.shape, array.dtype.name) for array in found]


@pytest.mark.parametrize("name", OPS)
def test_results_and_gradients_have_the_shapes_and_types_of_the_cpu(name):
    assert outcome(SimulatedDevice(CPUDevice), *OPS[name]) == outcome(device.get("cpu"), *OPS[name])
