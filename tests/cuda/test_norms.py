"""Layer norm and RMS norm: rows kept by a warp, by a block, by nobody; against the CPU's in float64."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from shardrt.kernels import cpu, cuda
from shardrt.kernels.cuda import _rows
from tests.cuda.numbers import ELEMENTS, assert_close, dtype_of, guarded, normal

EPS = 1e-5
SHAPES = [(1, 1), (3, 7), (9, 8), (5, 96), (11, 255), (3, 2056), (2, 2051)]
TALL = [(1, 8), (17, 40), (67, 24), (67, 5)]  # several blocks of rows, the last not full


def kept(element):
    """The type of what is kept of a row, and of sums."""
    return dtype_of("float64" if element == "float64" else "float32")


def in_double(arrays):
    return [array.astype(np.float64) for array in arrays]


@dataclass(frozen=True)
class Norm:
    """Its kernels; it has as many parameters as it keeps numbers of a row: weight, bias; mean, rstd."""

    cuda: Any
    cpu: Any
    count: int

    def parameters(self, array, width, offset=0):
        return [array((n == 0) + normal(width, seed=n + 1), offset) for n in range(self.count)]

    def exact_forward(self, x, *parameters):
        """y, then what is kept."""
        found = [np.empty(x.shape), *(np.empty(len(x)) for _ in range(self.count))]
        self.cpu.forward(*in_double([x, *parameters]), *found, EPS)
        return found

    def exact_backward(self, dy, x, weight, *kept):
        """dx, then the parameters' gradients."""
        found = [np.empty(x.shape), *(np.empty(x.shape[1]) for _ in range(self.count))]
        self.cpu.backward(*in_double([dy, x, weight, *kept]), *found, False)
        return found

    def inputs(self, array, element, shape, offset=0):
        """Of backward: dy, x, weight, what is kept."""
        dy, x = array(normal(*shape, seed=3), offset), array(normal(*shape), offset)
        parameters = self.parameters(array, shape[1], offset)
        rows = [array(v, dtype=kept(element)) for v in self.exact_forward(x, *parameters)[1:]]
        return [dy, x, parameters[0], *rows]

    def outputs(self, array, shape, offset=0):
        """Of backward."""
        return [array(np.full(size, np.nan), offset) for size in (shape, *[shape[1]] * self.count)]

    def rows(self, array, count, element):
        return [array(np.full(count, np.nan), dtype=kept(element)) for _ in range(self.count)]


LAYER = Norm(cuda.layer_norm, cpu.layer_norm, 2)
NORMS = {"layer_norm": LAYER, "rms_norm": Norm(cuda.rms_norm, cpu.rms_norm, 1)}


of_each = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)


def all_close(found, expected):
    for one, exactly in zip(found, expected, strict=True):
        assert_close(one, exactly, 2)


@of_each
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0, 1])
def test_forward(emulated, norm, element, shape, offset):
    with guarded(element) as array:
        x, parameters = array(2 + normal(*shape), offset), norm.parameters(array, shape[1], offset)
        found = [array(np.full(shape, np.nan), offset), *norm.rows(array, shape[0], element)]
        norm.cuda.forward(x, *parameters, *found, EPS)
        all_close(found, norm.exact_forward(x, *parameters))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("width", [7, 40, 2056])
def test_layer_norm_without_bias(emulated, element, width):
    with guarded(element) as array:
        x, (weight, _) = array(normal(3, width)), LAYER.parameters(array, width)
        y = array(np.full(x.shape, np.nan))
        LAYER.cuda.forward(x, weight, None, y, *LAYER.rows(array, 3, element), EPS)
        assert_close(y, LAYER.exact_forward(x, weight, np.zeros(width))[0], 2)


@pytest.mark.parametrize("width", [8, 1000, 1001, 2048])
def test_a_large_mean_costs_no_precision_of_the_deviation(emulated, width):
    with guarded("float32") as array:
        x, parameters = array(1000 + normal(2, width)), LAYER.parameters(array, width)
        mean, rstd = LAYER.rows(array, 2, "float32")
        LAYER.cuda.forward(x, *parameters, array(np.full(x.shape, np.nan)), mean, rstd, EPS)
        assert_close(rstd, LAYER.exact_forward(x, *parameters)[2], 2)


@of_each
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("shape", SHAPES[1:] + TALL)
@pytest.mark.parametrize("offset", [0, 1])
def test_backward(emulated, norm, element, shape, offset):
    with guarded(element) as array:
        given, found = norm.inputs(array, element, shape, offset), norm.outputs(array, shape, offset)
        norm.cuda.backward(*given, *found, False)
        all_close(found, norm.exact_backward(*given))
        assert emulated.launches[1:] == ["combine"]  # of both parameters


@of_each
@pytest.mark.parametrize(
    ("element", "width", "offset", "form"),
    [
        ("bfloat16", 2048, 0, "1"),
        ("bfloat16", 2056, 0, "2"),
        ("bfloat16", 4096, 1, "any"),
        ("float32", 1024, 0, "1"),
        ("float32", 4096, 0, "2"),
        ("float32", 4100, 0, "any"),
        ("float64", 514, 0, "2"),
    ],
)
def test_backward_takes_the_form_for_its_width(emulated, norm, element, width, offset, form):
    with guarded(element) as array:
        given = norm.inputs(array, element, (3, width), offset)
        found = norm.outputs(array, (3, width), offset)
        norm.cuda.backward(*given, *found, False)
        assert emulated.launches[0] == f"backward_{form}"
        all_close(found, norm.exact_backward(*given))


@of_each
@pytest.mark.parametrize("element", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(67, 40), (67, 7), (19, 4096)])
def test_gradients_of_16_bits_are_added_in_float32(emulated, norm, element, shape):
    with guarded(element) as array:
        given = norm.inputs(array, element, shape)
        before = [normal(shape[1], seed=4 + n).astype(np.float32) for n in range(norm.count)]
        found = [array(values, dtype=np.float32) for values in before]
        norm.cuda.backward(*given, None, *found, True)
        sums = norm.exact_backward(*given)[1:]
        all_close(found, [start + own for start, own in zip(in_double(before), sums, strict=True)])


@of_each
@pytest.mark.parametrize("width", [40, 2048, 7])
@pytest.mark.parametrize("wanted", ["dx", "weight", "bias"])
def test_only_what_is_wanted_is_made(emulated, norm, width, wanted):
    index = ("dx", "weight", "bias").index(wanted)
    if index > norm.count:
        return
    with guarded("float32") as array:
        given, outs = norm.inputs(array, "float32", (9, width)), norm.outputs(array, (9, width))
        norm.cuda.backward(*given, *(out if n == index else None for n, out in enumerate(outs)), False)
        assert_close(outs[index], norm.exact_backward(*given)[index], 2)
        assert len(emulated.launches) == 1 or wanted != "dx"


@of_each
@pytest.mark.parametrize("width", [40, 2048, 7])
def test_the_gradient_may_be_written_over_that_of_the_output(emulated, norm, width):
    with guarded("float32") as array:
        given, outs = norm.inputs(array, "float32", (9, width)), norm.outputs(array, (9, width))
        expected = norm.exact_backward(*given)
        outs[0] = given[0]
        norm.cuda.backward(*given, *outs, False)
        all_close(outs, expected)


@of_each
@pytest.mark.parametrize("width", [8, 5])
def test_blocks_may_have_any_number_of_rows(emulated, norm, width, monkeypatch):
    monkeypatch.setattr(_rows, "_BLOCKS", 4)  # of 25 rows, though some are loaded at once
    with guarded("float32") as array:
        given, found = norm.inputs(array, "float32", (97, width)), norm.outputs(array, (97, width))
        norm.cuda.backward(*given, *found, False)
        all_close(found, norm.exact_backward(*given))


@of_each
def test_sums_do_not_depend_on_the_gpu(emulated, norm):
    with guarded("float32") as array:
        given, found = norm.inputs(array, "float32", (67, 24)), []
        for emulated.multiprocessors in (2, 132):
            _, *sums = norm.outputs(array, (67, 24))
            norm.cuda.backward(*given, None, *sums, False)
            found.append(np.stack(sums))
        np.testing.assert_array_equal(*found)


@of_each
@pytest.mark.parametrize("accumulate", [False, True])
def test_no_rows_give_no_gradient(emulated, norm, accumulate):
    none, ones, row = np.empty((0, 8), np.float32), np.ones(8, np.float32), np.empty(0, np.float32)
    sums = [np.full(8, 3, np.float32) for _ in range(norm.count)]
    norm.cuda.forward(none, *[ones] * norm.count, none, *[row] * norm.count, EPS)
    norm.cuda.backward(none, none, ones, *[row] * norm.count, none, *sums, accumulate)
    np.testing.assert_array_equal(sums, np.full((norm.count, 8), 3.0 * accumulate))


@of_each
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(("width", "offset"), [(7, 0), (40, 0), (40, 1), (2056, 0)])
def test_of_a_sum(emulated, norm, element, width, offset):
    with guarded(element) as array:
        x, added, dtotal, dy = (array(normal(5, width, seed=seed), offset) for seed in range(4))
        parameters = norm.parameters(array, width, offset)
        total, y = (array(np.full(x.shape, np.nan), offset) for _ in range(2))
        rows = norm.rows(array, 5, element)
        norm.cuda.forward(x, *parameters, y, *rows, EPS, added, total)
        assert_close(total, x.astype(np.float64) + added.astype(np.float64))
        all_close([y, *rows], norm.exact_forward(total, *parameters))
        found = [array(np.full(x.shape, np.nan), offset)]
        found += [array(np.full(width, np.nan)) for _ in range(norm.count)]
        norm.cuda.backward(dy, total, parameters[0], *rows, *found, False, dtotal)
        own, *sums = norm.exact_backward(dy, total, parameters[0], *rows)
        all_close(found, [own + dtotal.astype(np.float64), *sums])
