"""Products by cublasLt: the twelve of GPT-2's layers, and layouts, against float64 on the host."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from bench.gpu.products import layers
from shardrt.kernels.cuda import _launch
from tests.contracts.elementwise import gelu_slope
from tests.contracts.products import LINEAR, grouped_calls
from tests.gpu.sizes import ROWS, WIDTH

pytestmark = pytest.mark.gpu

TYPES = {"float32": (np.dtype(np.float32), 1e-5), "bfloat16": (np.dtype(ml_dtypes.bfloat16), 1e-2)}
LAYERS = layers(WIDTH)


def random(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).normal(size=shape)


def there(gpu, values, dtype):
    """(on the GPU, rounded as there but in float64)."""
    rounded = values.astype(dtype)
    return gpu.asarray(rounded), rounded.astype(np.float64)


def poisoned(gpu, shape, dtype):
    return gpu.asarray(np.full(shape, np.nan, dtype))


def off(gpu, found, expected):
    found = gpu.to_numpy(found).astype(np.float64)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def assert_repeats(gpu, run):
    """run() gives arrays of the same bits each time."""
    first, *others = ([gpu.to_numpy(array).tobytes() for array in run()] for _ in range(3))
    assert others == [first] * 2


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rows", [ROWS, 77])
def test_the_products_of_a_layer(on_gpu, kind, layer, rows):
    for kernel in ("forward", "backward_input", "backward_weight", "backward_parameters"):
        on_gpu(f"linear.{kernel}", kind, LINEAR[f"linear.{kernel}"](rows, *LAYERS[layer]))


@pytest.mark.parametrize("kind", TYPES)
def test_layouts_odd_sizes_and_a_batch(on_gpu, kind):
    on_gpu("matmul.matmul", kind)


@pytest.mark.parametrize("kind", TYPES)
def test_gelu_in_the_epilogue(gpu, on_gpu, kind):
    """Also says, for 16 bits, that cublasLt has the product at all: else it is two kernels."""
    calls = LINEAR["linear.forward_gelu"](72, 40, 24)
    on_gpu("linear.forward_gelu", kind, [replace(call, factor=(4, 8)) for call in calls])
    if kind == "bfloat16":
        shapes = (72, 40), (24, 40), (24,), (72, 24), (72, 24)
        x, weight, bias, inner, y = (there(gpu, random(*shape), TYPES[kind][0])[0] for shape in shapes)
        assert _launch.backend().matmuls.gemm_gelu(x, weight.T, bias, inner, y, lambda y: None)


@pytest.mark.parametrize("kind", TYPES)
def test_the_gradient_goes_on_through_gelu_in_the_epilogue(gpu, kind):
    dtype, limit = TYPES[kind]
    dy, exact_dy = there(gpu, random(72, 40), dtype)
    weight, exact_weight = there(gpu, random(40, 24, seed=1), dtype)
    inner, exact_inner = there(gpu, random(72, 24, seed=2), dtype)
    dinner, apart = (poisoned(gpu, (72, 24), dtype) for _ in range(2))
    exact = exact_dy @ exact_weight * gelu_slope(exact_inner)
    if gpu.kernels.linear.backward_input_gelu(dy, weight, inner, dinner):  # else it takes longer
        assert off(gpu, dinner, exact) < limit
    gpu.kernels.linear.backward_input(dy, weight, apart)
    gpu.kernels.linear.backward_gelu(apart, inner, apart, None, False)
    assert off(gpu, apart, exact) < 2 * limit


def test_experts_in_one_call(gpu, on_gpu):
    """Also says that cuBLAS has the products at all: else other kernels compute them."""
    for kernel, calls in grouped_calls.items():
        for call in calls((1, 0, 77, 3, 0, ROWS), WIDTH, 40):
            wide = any(getattr(arg, "wide", False) for arg in call.args)
            on_gpu(f"grouped.{kernel}", "bfloat16", [replace(call, factor=4 if wide else 2)])
    cublas = _launch.backend()._cublas_grouped
    assert cublas._handle is not None and not cublas._refused


def test_a_plan_gives_the_same_bits_again(gpu):
    dtype = TYPES["bfloat16"][0]
    x, weight = gpu.asarray(random(77, 40).astype(dtype)), gpu.asarray(random(24, 40).astype(dtype))

    def run():
        y = poisoned(gpu, (77, 24), dtype)
        gpu.kernels.linear.forward(x, weight, None, y)
        return [y]

    assert_repeats(gpu, run)
