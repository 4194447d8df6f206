"""Convolution as networks call it: cuDNN's where it is there, else our own, against float64 on the host."""

import pytest

from tests.contracts.vision import CALLS, output_shape
from tests.cuda.numbers import dtype_of
from tests.gpu.sizes import CONVOLUTIONS, ELEMENTS
from tests.gpu.test_products import assert_repeats, poisoned, random, there

pytestmark = pytest.mark.gpu

# x, weight, stride, padding, dilation, groups
CASES = {
    "stem": ((2, 3, 56, 56), (64, 3, 7, 7), (2, 2), (3, 3), (1, 1), 1),
    "3 x 3": ((4, 64, 14, 14), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "widen": ((4, 64, 14, 14), (256, 64, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    "shortcut": ((4, 64, 14, 14), (128, 64, 1, 1), (2, 2), (0, 0), (1, 1), 1),
    "groups of 16": ((2, 48, 14, 14), (48, 16, 3, 3), (2, 2), (1, 1), (1, 1), 3),
    "depthwise": ((2, 32, 14, 14), (32, 1, 3, 3), (1, 1), (1, 1), (1, 1), 32),
    "dilated, odd": ((3, 5, 17, 13), (7, 5, 3, 2), (1, 2), (2, 0), (2, 1), 1),
    "patches": ((2, 3, 32, 32), (64, 3, 16, 16), (16, 16), (0, 0), (1, 1), 1),
}


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("case", CONVOLUTIONS or CASES)
def test_forward_and_gradients(on_gpu, element, case):
    for kernel, calls in CALLS.items():
        on_gpu(kernel, element, calls(CASES[case]))


@pytest.mark.parametrize("element", ELEMENTS)
def test_the_same_bits_every_time(gpu, element):
    dtype, (x_shape, w_shape, *geometry) = dtype_of(element), CASES["3 x 3"]
    x, weight = (there(gpu, random(*shape), dtype)[0] for shape in (x_shape, w_shape))
    dy = there(gpu, random(*output_shape(*CASES["3 x 3"])), dtype)[0]

    def run():
        outs = [poisoned(gpu, like.shape, dtype) for like in (dy, x, weight)]
        gpu.kernels.conv2d.forward(x, weight, None, outs[0], *geometry)
        gpu.kernels.conv2d.backward_input(dy, weight, outs[1], *geometry)
        gpu.kernels.conv2d.backward_weight(x, dy, outs[2], False, *geometry)
        return outs

    assert_repeats(gpu, run)
