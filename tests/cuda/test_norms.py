"""Layer norm and RMS norm: rows kept by a warp, by a block, by nobody; launches; blocks of rows."""

import numpy as np
import pytest

from shardrt.kernels import cuda
from shardrt.kernels.cuda import _rows
from tests.contracts import Call, Out, run
from tests.contracts.norms import NORMS

of_each = pytest.mark.parametrize("name", NORMS)


def backward(name, element, shape, offset=0):
    return run(getattr(cuda, name).backward, NORMS[name].backward(*shape), element, offset)


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
def test_backward_takes_the_form_for_its_width_and_adds_up_both_parameters_at_once(
    emulated, name, element, width, offset, form
):
    backward(name, element, (3, width), offset)
    assert emulated.launches == [f"backward_{form}", "combine"]


@of_each
def test_the_gradient_of_the_input_alone_takes_one_launch(emulated, name):
    norm = NORMS[name]
    args = *norm.given((9, 40)), Out(), *[None] * norm.parameters, False
    call = Call(args, lambda *arrays: norm.gradients(*arrays)[0], factor=2)
    run(getattr(cuda, name).backward, call, "float32")
    assert len(emulated.launches) == 1


@of_each
@pytest.mark.parametrize("width", [8, 5])
def test_blocks_may_have_any_number_of_rows(emulated, name, width, monkeypatch):
    monkeypatch.setattr(_rows, "_BLOCKS", 4)  # of 25 rows, though some are loaded at once
    backward(name, "float32", (97, width))


@of_each
def test_sums_do_not_depend_on_the_gpu(emulated, name):
    found = []
    for emulated.multiprocessors in (2, 132):
        found.append(np.stack(backward(name, "float32", (67, 24))[1:]))
    np.testing.assert_array_equal(*found)
