"""Convolution by cuDNN: what its graphs are told and given, and when the reference stays."""

import warnings

import numpy as np
import pytest

from shardrt.kernels.cpu import conv2d as cpu
from shardrt.kernels.cuda import conv2d
from shardrt.kernels.cuda._cudnn import CuDNN
from shardrt.kernels.cuda._cudnn_conv2d import CuDNNConv2d
from tests.contracts.vision import CONVOLUTIONS, output_shape
from tests.cuda import fake_cudnn
from tests.cuda.numbers import assert_close, guarded, in_double, normal

HALVES = ["float16", "bfloat16"]
KINDS = ["conv_fprop", "conv_dgrad", "conv_wgrad"]


@pytest.fixture
def cudnn(emulated):
    """The stand-in; the emulator uses it."""
    module = fake_cudnn.module()
    emulated.stream = lambda: module.stream
    fused = CuDNNConv2d(CuDNN(module, emulated))
    emulated.convolution = lambda: fused
    return module


def everything(array, case, gradient=None, accumulate=True):
    """Forward with a bias and both gradients: [(what came out, what should)]. gradient: its dtype."""
    x_shape, w_shape, *geometry = case
    x, weight = array(normal(*x_shape)), array(normal(*w_shape, seed=1))
    bias, dy = array(normal(w_shape[0], seed=2)), array(normal(*output_shape(*case), seed=3))
    y, dx = array(np.full(dy.shape, np.nan)), array(np.full(x.shape, np.nan))
    dweight = array(normal(*w_shape, seed=4) if accumulate else np.full(w_shape, np.nan), dtype=gradient)
    expected = [np.full(dy.shape, np.nan), np.full(x.shape, np.nan), *in_double(dweight)]
    for kernels, numbers, outs in (
        (cpu, in_double(x, weight, bias, dy), expected),
        (conv2d, (x, weight, bias, dy), (y, dx, dweight)),
    ):
        x, weight, bias, dy = numbers
        kernels.forward(x, weight, bias, outs[0], *geometry)
        kernels.backward_input(dy, weight, outs[1], *geometry)
        kernels.backward_weight(x, dy, outs[2], accumulate, *geometry)
    return list(zip((y, dx, dweight), expected, strict=True))


@pytest.mark.parametrize("element", ["float32", *HALVES])
def test_every_geometry(cudnn, emulated, element):
    for case in CONVOLUTIONS:
        with guarded(element) as array:
            for found, expected in everything(array, case):
                assert_close(found, expected, 2)  # the bias and the old gradient come in a second pass
    assert [graph.kind for graph in cudnn.graphs] == ["forward", "backward_input", "backward_weight"] * 4
    assert emulated.launches == ["add_bias", "sum_parts"] * 4


@pytest.mark.parametrize("gradient", [np.float32, None])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_gradient_of_weights_is_float32_but_where_it_is_rounded_at_once(
    cudnn, emulated, gradient, accumulate
):
    with guarded("bfloat16") as array:
        *_, (dweight, expected) = everything(array, CONVOLUTIONS[0], gradient, accumulate)
        assert_close(dweight, expected)
    at_once = gradient is None and not accumulate
    assert cudnn.graphs[-1].tensors[-1].data_type == ("BFLOAT16" if at_once else "FLOAT")
    assert ("sum_parts" in emulated.launches) == accumulate


def test_where_no_plan_writes_float32_the_gradient_comes_in_16_bits(cudnn, emulated):
    cudnn.refuses = lambda graph: graph.tensors[-1].data_type == "FLOAT"
    for accumulate in (False, True):
        with guarded("bfloat16") as array, warnings.catch_warnings():
            warnings.simplefilter("error")
            *_, (dweight, expected) = everything(array, CONVOLUTIONS[0], np.float32, accumulate)
            difference = np.linalg.norm(dweight - expected) / np.linalg.norm(expected)
            assert 1e-5 < difference < 8e-3  # bfloat16's rounding, and no other
    assert "im2col" not in emulated.launches and emulated.launches.count("sum_parts") == 2


def test_a_gradient_that_does_not_begin_at_16_bytes_is_made_beside_it(cudnn, emulated):
    x_shape, w_shape, *geometry = CONVOLUTIONS[0]
    with guarded("bfloat16") as array:
        x, dy = array(normal(*x_shape)), array(normal(*output_shape(*CONVOLUTIONS[0])))
        dweight, expected = array(np.full(w_shape, np.nan), 1, np.float32), np.zeros(w_shape)
        conv2d.backward_weight(x, dy, dweight, False, *geometry)
        cpu.backward_weight(*in_double(x, dy), expected, False, *geometry)
        assert_close(dweight, expected)
    assert emulated.launches == ["sum_parts"]


@pytest.mark.parametrize(("element", "notes"), [("float32", set()), *[(e, {"TENSOR_CORE"}) for e in HALVES]])
def test_plans_sum_products_of_what_was_given_in_float32_in_one_order(cudnn, element, notes):
    """float32 is float32, not TF32; nothing is nondeterministic, transformed or summed in 16 bits."""
    with guarded(element) as array:
        everything(array, CONVOLUTIONS[0])
    assert [graph.plans[0] for graph in cudnn.graphs] == [notes] * 3


def test_a_graph_is_built_once_for_each_kind_of_convolution(cudnn):
    cases = [
        CONVOLUTIONS[0],
        ((3, 3, 9, 8), (5, 3, 3, 3), (2, 1), (1, 0), (1, 1), 1),  # another dilation
        ((3, 3, 9, 8), (5, 3, 3, 3), (1, 1), (1, 0), (1, 2), 1),  # stride
        ((3, 3, 9, 8), (5, 3, 3, 3), (2, 1), (1, 1), (1, 2), 1),  # padding
        ((1, 3, 9, 8), (5, 3, 3, 3), (2, 1), (1, 0), (1, 2), 1),  # batch
    ]
    for _ in range(2):
        for case in cases:
            for element in ("float16", "bfloat16"):
                with guarded(element) as array:
                    everything(array, case, np.float32)
    assert [graph.runs for graph in cudnn.graphs] == [2] * 3 * len(cases) * 2


def test_what_does_not_suit_runs_by_the_reference(cudnn, emulated):
    case = CONVOLUTIONS[0]
    with guarded("float64") as array:
        for found, expected in everything(array, case):
            assert_close(found, expected)
    with guarded("bfloat16") as array:
        x, weight = array(normal(*case[0]), 1), array(normal(*case[1]))  # x begins between 16 bytes
        y, expected = array(np.full(output_shape(*case), np.nan)), np.zeros(output_shape(*case))
        conv2d.forward(x, weight, None, y, *case[2:])
        cpu.forward(*in_double(x, weight), None, expected, *case[2:])
        assert_close(y, expected, 2)
        flat = array(normal(*case[0][1:]))[None]  # with a stride of 0
        conv2d.forward(flat, weight, None, y[:1], *case[2:])
        nothing = array(np.zeros((0, *case[0][1:])))
        conv2d.forward(nothing, weight, None, array(np.zeros((0, *y.shape[1:]))), *case[2:])
    assert (
        cudnn.graphs == [] and emulated.launches.count("im2col") == 4 and "add_bias" not in emulated.launches
    )


def test_an_array_that_32_bits_can_not_count_runs_by_the_reference(cudnn, emulated, monkeypatch):
    monkeypatch.setattr("shardrt.kernels.cuda._cudnn_conv2d._LARGEST", 3 * 3 * 9 * 8 - 1)  # less than x
    with guarded("bfloat16") as array:
        for found, expected in everything(array, CONVOLUTIONS[0]):
            assert_close(found, expected, 3)
    assert cudnn.graphs == [] and {"im2col", "col2im"} <= set(emulated.launches)


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
def test_what_cudnn_refuses_runs_by_the_reference_and_is_said_once(cudnn, emulated, element):
    cudnn.refuses = lambda graph: True
    with guarded(element) as array:
        with pytest.warns(UserWarning) as report:
            for found, expected in everything(array, CONVOLUTIONS[0]):
                assert_close(found, expected, 3)
        assert [str(each.message).partition(" of ")[0] for each in report] == [
            f"conv2d: cuDNN refuses {kind}" for kind in KINDS
        ]
        assert f"image (3, 3, 9, 8) and weight (5, 3, 3, 3) of {element}; slower" in str(report[0].message)
        built = len(cudnn.graphs)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            everything(array, CONVOLUTIONS[0])
    assert len(cudnn.graphs) == built and {"im2col", "col2im"} <= set(emulated.launches)
    assert "add_bias" not in emulated.launches
