"""The head and its loss in one op, by CUDA's kernels and cublasLt's binding: numbers, alignment, launches."""

import numpy as np
import pytest

from shardrt import Tensor, device
from shardrt import functional as F
from shardrt.device.cpu import CPUDevice
from shardrt.device.cuda import CUDADevice
from shardrt.kernels import cuda
from shardrt.kernels.cuda._cublaslt import CublasLt
from tests.cuda.numbers import assert_close, dtype_of, normal
from tests.cuda.test_cublaslt import Stage, library

__all__ = ["library"]

VOCAB, WIDTH, ROWS = 257, 16, 12  # 64 does not divide the vocabulary, nor does 8


class Recorded(CublasLt):
    """Keeps what is told of each operand of each product: its leading dimension and address."""

    def __init__(self, library):
        self.leading, self.products = {}, []
        super().__init__(library, Stage())

    def call(self, name, *args):
        super().call(name, *args)
        if name == "cublasLtMatrixLayoutCreate":
            layout, _, _, _, leading = args
            self.leading[layout._obj.value] = leading.value
        if name == "cublasLtMatmul":
            at = [(args[i].value, self.leading[args[i + 1].value]) for i in (3, 5, 8)]
            self.products.append(at)


class Emulated(CPUDevice):
    """CUDA's kernels and padding on arrays of the host, in 16 bits too."""

    kernels = cuda
    row_elements = CUDADevice.row_elements

    def compute_dtype(self, name):
        return dtype_of(name)

    def empty(self, shape, dtype):
        array = Stage().empty(shape if isinstance(shape, tuple) else (shape,), dtype)
        array.view(np.uint8).fill(0xFF)
        return array


@pytest.fixture
def lt(emulated, library):
    found = Recorded(library)
    emulated.gemm = found.gemm
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
def test_all_operands_of_the_heads_products_lie_at_16_bytes(lt, chunk):
    x, weight, targets = operands("bfloat16")
    F.linear_cross_entropy(x, weight, targets, chunk=chunk).backward()
    assert len(lt.products) >= 3
    for address, leading in (operand for product in lt.products for operand in product):
        assert address % 16 == 0 and leading * 2 % 16 == 0
    assert {leading for product in lt.products for _, leading in product} == {WIDTH, 320}


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_loss_and_gradients_are_those_in_float64(lt, element, reduction, chunk, factor):
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


def test_the_logits_are_read_once_and_their_gradient_is_written_once(lt, emulated):
    x, weight, targets = operands("bfloat16")
    F.linear_cross_entropy(x, weight, targets, chunk=0).backward()
    assert emulated.launches == ["in_place_held", "scale_rows", "scale_rows"]  # the two of dx and of x
    emulated.launches.clear()
    with device.use(device.current()):
        F.linear_cross_entropy(x.detach(), weight.detach(), targets, chunk=0)
    assert emulated.launches == ["forward"], "without a tape there is no gradient to write"
