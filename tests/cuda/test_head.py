"""The head and its loss in one op, by CUDA's kernels: numbers, alignment of the products, launches."""

import numpy as np
import pytest

from shardrt import Tensor, device
from shardrt import functional as F
from shardrt.device.cpu import CPUDevice
from shardrt.device.cuda import CUDADevice
from shardrt.kernels import cuda
from shardrt.kernels.cuda._cublaslt import Matrix
from tests.cuda.numbers import assert_close, dtype_of, normal

VOCAB, WIDTH, ROWS = 257, 16, 12  # 64 does not divide the vocabulary, nor does 8


class Emulated(CPUDevice):
    """CUDA's kernels and padding on arrays of the host, in 16 bits too."""

    kernels = cuda
    row_elements = staticmethod(CUDADevice.row_elements)

    def compute_dtype(self, name):
        return dtype_of(name)

    def empty(self, shape, dtype):
        shape = shape if isinstance(shape, tuple) else (shape,)
        memory = np.empty(np.prod(shape, dtype=int) * np.dtype(dtype).itemsize + 256, np.uint8)
        start = -memory.ctypes.data % 256  # aligned, as on a GPU
        array = memory[start : len(memory) - 256 + start].view(dtype).reshape(shape)
        array.view(np.uint8).fill(0xFF)
        return array


@pytest.fixture
def products(emulated):
    """What cublasLt is told of the three operands of each product."""
    found, gemm = [], emulated.gemm

    def message(a, b, out, **how):
        found.append([Matrix.of(x) for x in (b, a, out)])
        gemm(a, b, out, **how)

    emulated.gemm = message
    with device.use(Emulated()):
        yield found


def operands(element):
    """x, weight on the device; targets, some of them ignored."""
    targets = np.random.default_rng(0).integers(0, VOCAB, ROWS)
    targets[3:5] = -100
    here, made = device.current(), []
    for shape in ((ROWS, WIDTH), (VOCAB, WIDTH)):
        made.append(here.empty(shape, dtype_of(element)))
        made[-1][...] = normal(*shape).astype(dtype_of(element))
    return *(Tensor(array, requires_grad=True) for array in made), targets


@pytest.mark.parametrize("chunk", [0, 5])
def test_all_operands_of_the_heads_products_lie_at_16_bytes(products, chunk):
    x, weight, targets = operands("bfloat16")
    F.linear_cross_entropy(x, weight, targets, chunk=chunk).backward()
    assert len(products) == (12 if chunk else 3)
    operands_of_all = [matrix for product in products for matrix in product]
    assert all(matrix.alignment >= 16 and matrix.leading * 2 % 16 == 0 for matrix in operands_of_all)
    assert {matrix.leading for matrix in operands_of_all} == {WIDTH, 320}  # 320: of logits


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("reduction", "chunk", "factor"), [("mean", 0, 1.0), ("sum", 5, 0.3), ("none", 0, 0.3), ("none", 5, 1.0)]
)
def test_loss_and_gradients_are_those_in_float64(products, element, reduction, chunk, factor):
    x, weight, targets = operands(element)
    loss = F.linear_cross_entropy(x, weight, targets, reduction=reduction, chunk=chunk)
    upstream = np.full(loss.shape, factor, np.float32) * (1 + np.arange(loss.size).reshape(loss.shape))
    loss.backward(upstream.astype(loss.dtype))
    with device.use(device.get("cpu")):
        exact = [Tensor(t.data.astype(np.float64), requires_grad=True) for t in (x, weight)]
        expected = F.cross_entropy(F.linear(*exact), targets, reduction=reduction)
        expected.backward(upstream.astype(np.float64))
    assert_close(np.asarray(loss.data).astype(x.dtype), expected.data)  # as exact as the logits
    for found, wanted in zip((x, weight), exact, strict=True):
        assert_close(found.grad, wanted.grad, 2)


def test_the_logits_are_read_once_and_their_gradient_is_written_once(products, emulated):
    x, weight, targets = operands("bfloat16")
    F.linear_cross_entropy(x, weight, targets, chunk=0).backward()
    assert emulated.launches == ["in_place", "scale_rows", "scale_rows"]  # the two of dx and of x
    emulated.launches.clear()
    with device.use(device.current()):
        F.linear_cross_entropy(x.detach(), weight.detach(), targets, chunk=0)
    assert emulated.launches == ["forward"], "without a tape there is no gradient to write"
