"""functional/conv2d.py: all ways of the CPU against PyTorch; bits, nan, bad arguments. Small cases are in
test_beside_pytorch.py.
"""

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from shardrt.kernels import cpu
from shardrt.kernels.cpu import _conv2d_plan, _conv2d_planes, _threads, conv2d
from shardrt.kernels.cpu._vectors import WIDE
from tests.gradcheck import normal

# x, weight, stride, padding, dilation, groups: whole vectors and what is left of them.
LARGE = [
    ((3, 3, 32, 32), (24, 3, 7, 7), 2, 3, 1, 1),  # few channels: rows of the window in one piece
    ((2, 40, 9, 14), (36, 40, 3, 3), 1, 1, 1, 1),
    ((2, 33, 14, 14), (10, 33, 1, 1), 1, 1, 1, 1),
    ((2, 48, 12, 7), (72, 16, 3, 3), 2, 1, 1, 3),
    ((5, 40, 9, 14), (40, 8, 3, 3), (1, 2), 1, 1, 5),
    ((1, 80, 9, 14), (80, 40, 2, 3), (1, 2), (2, 1), (2, 1), 2),
    ((2, 3, 16, 16), (64, 3, 4, 4), 4, 0, 1, 1),  # patches; outputs fill vectors better
    ((29, 7, 45, 40), (30, 7, 3, 3), 2, (1, 2), 1, 1),  # the same, a row of the window in two pieces
    ((2, 24, 13, 7), (24, 1, 3, 3), (2, 1), 1, 1, 24),
    ((1, 4, 11, 14), (8, 1, 5, 3), 2, 2, (1, 2), 4),
    ((9, 64, 56, 20), (16, 64, 1, 1), 1, 0, 1, 1),  # more than one chunk of images
    # Lane by lane: groups of 4 and 2, three outputs for each channel, a window wider than a tile.
    ((2, 28, 9, 14), (28, 4, 5, 3), (2, 1), 2, (1, 2), 7),
    ((2, 6, 5, 7), (6, 2, 3, 1), 1, (1, 0), 1, 3),
    ((2, 20, 9, 7), (60, 1, 3, 3), (2, 1), (1, 2), (1, 2), 20),
    ((2, 17, 4, 7), (17, 1, 2, 15), (3, 1), (0, 7), 1, 17),
    ((2, 24, 8, 7), (36, 8, 3, 3), 1, 0, 1, 3),  # the last vector of a group reaches into the next
    # Plane by plane, with AVX-512: more rows of results than of x, and less; many taps; rows far apart.
    ((2, 18, 9, 11), (24, 3, 2, 5), 1, (2, 2), 1, 6),
    ((2, 10, 14, 8), (15, 2, 3, 3), 1, (0, 2), 2, 5),
    ((3, 20, 13, 7), (40, 1, 5, 5), 1, 2, 1, 20),
    ((2, 34, 7, 7), (34, 17, 3, 3), 1, 1, 1, 2),
    ((2, 5, 4, 4), (5, 1, 3, 3), 1, 6, 6, 5),
    # Windows of one pixel: plane by plane as well, and the weight's gradient from y to x.
    ((9, 68, 16, 14), (20, 68, 1, 1), 1, 0, 1, 1),
    # Weight's gradient: planes of a whole number of 2048 bytes; groups that fill vectors with a row of taps.
    ((2, 48, 16, 32), (20, 24, 3, 3), 1, 1, 1, 2),
    ((3, 24, 7, 9), (48, 12, 1, 3), (2, 1), (0, 1), (2, 1), 2),
]
# Nearly from y to x, but for strides, groups, the window, padding.
NEARLY = [
    ((2, 40, 13, 12), (4, 40, 1, 1), 2, 0, 1, 1),
    ((2, 40, 9, 8), (4, 20, 1, 1), 1, 0, 1, 2),
    ((2, 40, 9, 8), (4, 40, 3, 3), 1, 0, 1, 1),
    ((2, 40, 9, 8), (4, 40, 1, 1), 1, (1, 0), 1, 1),
]
PLANES = LARGE[16:22]
BY_OUTPUTS = LARGE[6:8]
SWAPPED = [LARGE[10], LARGE[21]]
MANY = ((3, 257, 27, 29), (130, 257, 1, 1), 1, 0, 1, 1)
THREADS = [LARGE[1], LARGE[3], LARGE[4], LARGE[7], LARGE[8], *PLANES[:3], MANY]


@pytest.mark.skipif(not WIDE, reason="other vectors, other ways")
def test_cases_reach_what_they_are_for():
    def shapes(case):
        x, weight, *geometry, groups = case
        stride, padding, dilation = ((n, n) if isinstance(n, int) else n for n in geometry)
        y = (
            (x[2 + i] + 2 * padding[i] - dilation[i] * (weight[2 + i] - 1) - 1) // stride[i] + 1
            for i in (0, 1)
        )
        return x[1:], weight, (weight[0], *y), stride, padding, dilation, groups, np.dtype("float32")

    for case in PLANES:
        assert _conv2d_planes.plan(*shapes(case), False) is not None
    for case in LARGE + NEARLY:
        assert _conv2d_plan.weight_plan(*shapes(case)).by_outputs == (case in BY_OUTPUTS)
        x, weight, _, *how, _ = shapes(case)
        assert conv2d._swaps(case[0][0] * x[1] * x[2], weight, *how) == (case in SWAPPED)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.rest)])
def test_equal_to_torch(dtype):
    torch = pytest.importorskip("torch")
    tolerance = 2e-5 if dtype == "float32" else 1e-12
    for x, weight, stride, padding, dilation, groups in (
        LARGE if dtype == "float32" else LARGE[1:4] + LARGE[11:12] + PLANES[:2]
    ):
        arrays = [normal(*shape).astype(dtype) for shape in (x, weight, weight[:1])]
        ours = [Tensor(a, requires_grad=True) for a in arrays]
        theirs = [torch.tensor(a, requires_grad=True) for a in arrays]
        y = F.conv2d(*ours, stride, padding, dilation, groups)
        expected = torch.nn.functional.conv2d(*theirs, stride, padding, dilation, groups)
        dy = normal(*y.shape, seed=1).astype(dtype)
        y.backward(dy)
        expected.backward(torch.tensor(dy))
        pairs = [(y.data, expected.detach())] + [
            (one.grad, other.grad) for one, other in zip(ours, theirs, strict=True)
        ]
        for name, (one, other) in zip(("y", "dx", "dweight", "dbias"), pairs, strict=True):
            other = other.numpy()
            error = np.abs(one - other).max() / np.abs(other).max()
            assert error < tolerance, f"{name} of {x} by {weight} is off by {error:.1e}"


@pytest.mark.parametrize("case", [LARGE[1], LARGE[4], LARGE[6], LARGE[8], LARGE[21], PLANES[0]], ids=str)
def test_a_weight_used_twice_gets_both_gradients(case):
    x, weight, *geometry = case

    def gradient(*images):
        w = Tensor(normal(*weight).astype("float32"), requires_grad=True)
        sum(F.conv2d(image, w, None, *geometry) for image in images).sum().backward()
        return w.grad

    images = [normal(*x, seed=seed).astype("float32") for seed in range(2)]
    apart, both = sum(map(gradient, images)), gradient(*images)
    np.testing.assert_allclose(both, apart, rtol=0, atol=1e-5 * np.abs(apart).max())


def test_the_same_bits_on_any_number_of_threads(monkeypatch):
    monkeypatch.setattr(_threads, "_WORTH", 1)  # or turning and packing these would not be shared

    def everything(threads):
        cpu.set_threads(threads)
        try:
            for x, weight, *geometry in THREADS:
                inputs = [Tensor(normal(*s).astype("float32"), requires_grad=True) for s in (x, weight)]
                y = F.conv2d(*inputs, None, *geometry)
                y.backward(normal(*y.shape).astype("float32"))
                yield from (y.data, *(tensor.grad for tensor in inputs))
        finally:
            cpu.set_threads(1)

    for one, other in zip(everything(1), everything(3), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("case", [LARGE[4], LARGE[11], LARGE[15], PLANES[0]], ids=str)
def test_what_is_not_finite_stays_in_its_group(case):
    x, weight, *geometry = case
    groups, outputs = geometry[-1], weight[0] // geometry[-1]
    inputs = [Tensor(normal(*shape).astype("float32"), requires_grad=True) for shape in (x, weight)]
    inputs[0].data[:, weight[1] : 2 * weight[1]] = np.inf
    y = F.conv2d(*inputs, None, *geometry)
    dy = normal(*y.shape).astype("float32")
    dy[:, :outputs] = np.nan
    y.backward(dy)
    found = y.data, inputs[0].grad, inputs[1].grad.reshape(1, groups, -1)
    for array, spoiled in zip(found, ([1], [0], [0, 1]), strict=True):
        whole = np.isfinite(array.reshape(len(array), groups, -1)).all((0, 2))
        assert np.flatnonzero(~whole).tolist() == spoiled


@pytest.mark.parametrize("case", PLANES, ids=str)
def test_nothing_around_the_images_counts(case):
    def within(array):
        room = np.full(array.size + 128, np.nan, "float32")
        room[64:-64] = array.reshape(-1)
        return room[64:-64].reshape(array.shape)

    x, weight, *geometry = case
    found = []
    for place in (np.array, within):
        inputs = [Tensor(place(normal(*s).astype("float32")), requires_grad=True) for s in (x, weight)]
        y = F.conv2d(*inputs, None, *geometry)
        y.backward(place(normal(*y.shape).astype("float32")))
        found.append((y.data, *(tensor.grad for tensor in inputs)))
    for one, other in zip(*found, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)


BAD = [
    (((3, 4, 4), (1, 3, 1, 1)), {}, r"x must be \(batch, channels, height, width\)"),
    (((1, 3, 4, 4), (1, 3, 1)), {}, "weight must be"),
    (((1, 3, 4, 4), (1, 2, 1, 1)), {}, "do not fit with 1 groups"),
    (((1, 4, 4, 4), (3, 2, 1, 1)), {"groups": 2}, "do not fit with 2 groups"),
    (((1, 4, 4, 4), (3, 2, 1, 1)), {"groups": 0}, "do not fit with 0 groups"),
    (((1, 3, 4, 4), (1, 3, 5, 1)), {}, "larger than x"),
    (((1, 3, 4, 4), (1, 3, 2, 2)), {"dilation": 4}, "larger than x"),
    (((1, 3, 4, 4), (1, 3, 1, 1)), {"stride": 0}, "stride must be one or two integers of at least 1, got 0"),
    (((1, 3, 4, 4), (1, 3, 1, 1)), {"padding": (1, -1)}, "padding must be"),
    (((1, 3, 4, 4), (2, 3, 1, 1), (3,)), {}, r"bias must be \(2,\)"),
]


def test_bad_arguments_are_an_error():
    for shapes, options, message in BAD:
        with pytest.raises(ValueError, match=f"conv2d: .*{message}"):
            F.conv2d(*(normal(*shape) for shape in shapes), **options)
    with pytest.raises(TypeError, match="x float64, weight float32"):
        F.conv2d(normal(1, 1, 2, 2), normal(1, 1, 1, 1).astype("float32"))


@pytest.mark.parametrize(
    "shapes, options, text",
    [
        (((3, 4, 4), (3, 1, 1, 1)), {}, "x must be"),
        (((1, 3, 4, 4), (2, 1, 1, 1)), {}, "do not fit with 1 groups"),
        (((1, 3, 4, 4), (3, 2, 1, 1), (3,)), {}, r"bias must be \(2,\)"),
        (
            ((1, 3, 4, 4), (3, 2, 1, 1)),
            {"output_padding": 1},
            r"output_padding \(1, 1\) must be smaller than",
        ),
        (((1, 3, 2, 2), (3, 2, 1, 1)), {"padding": 1}, "leaves nothing"),
    ],
)
def test_bad_arguments_of_the_transposed_are_an_error(shapes, options, text):
    with pytest.raises(ValueError, match=f"conv_transpose2d: .*{text}"):
        F.conv_transpose2d(*(normal(*shape) for shape in shapes), **options)
