"""The functions that a port from PyTorch meets: against differences, and against PyTorch itself.

Each case: (ours, PyTorch's, inputs). Both get the same float64 arrays. docs/functions.md says what is where.
"""

import re

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests.gradcheck import LAYOUTS, check_gradients, leaf, normal
from tests.ranks import ROOT

INDEX = np.array([[2, 0, 3], [1, 1, 0]])  # into the last axis of (2, 4): as many rows
MASK = np.arange(24).reshape(2, 3, 4) % 3 == 0
TARGETS = np.array([3, -100, 0])
TAILS = np.array([[-20.0, -6.0, -3.0, -1.3, -0.2], [20.0, 6.0, 3.0, 1.3, 0.2]])


def positive(*shape):
    return np.abs(normal(*shape)) + 0.3


def share(*shape):
    """Probabilities, away from 0 and 1."""
    return 1 / (1 + np.exp(-normal(*shape, seed=3)))


def logs(*shape):
    x = normal(*shape)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


CASES = {
    "abs": (F.abs, "torch.abs(x)", [normal(2, 3)]),
    "sin": (F.sin, "torch.sin(x)", [normal(2, 3)]),
    "cos": (F.cos, "torch.cos(x)", [normal(2, 3)]),
    "erf": (F.erf, "torch.erf(x)", [normal(2, 3) * 2]),
    "exp": (F.exp, "torch.exp(x)", [normal(2, 3)]),
    "expm1": (F.expm1, "torch.expm1(x)", [normal(2, 3)]),
    "log": (F.log, "torch.log(x)", [positive(2, 3)]),
    "log1p": (F.log1p, "torch.log1p(x)", [positive(2, 3)]),
    "sqrt": (F.sqrt, "torch.sqrt(x)", [positive(2, 3)]),
    "rsqrt": (F.rsqrt, "torch.rsqrt(x)", [positive(2, 3)]),
    "square": (F.square, "torch.square(x)", [normal(2, 3)]),
    "tanh": (F.tanh, "torch.tanh(x)", [normal(2, 3)]),
    "sign": (F.sign, "torch.sign(x)", [normal(2, 3)]),
    "floor": (F.floor, "torch.floor(x)", [normal(2, 3)]),
    "ceil": (F.ceil, "torch.ceil(x)", [normal(2, 3)]),
    "round": (F.round, "torch.round(x)", [normal(2, 3) * 3]),
    "pow": (F.pow, "torch.pow(x, y)", [positive(2, 3), normal(3)]),
    "clamp": (lambda x: F.clamp(x, -0.5, 0.7), "torch.clamp(x, -0.5, 0.7)", [normal(4, 5)]),
    "where": (
        lambda x, y: F.where(MASK, x, y),
        "torch.where(torch.from_numpy(MASK), x, y)",
        [normal(2, 3, 4), normal(3, 1)],
    ),
    "masked_fill": (
        lambda x: F.masked_fill(x, MASK, -3.0),
        "x.masked_fill(torch.from_numpy(MASK), -3.0)",
        [normal(2, 3, 4)],
    ),
    "masked_scatter": (
        lambda x, y: F.masked_scatter(x, MASK, y),
        "x.masked_scatter(torch.from_numpy(MASK), y)",
        [normal(2, 3, 4), normal(9)],
    ),
    "min": (lambda x: F.min(x, 1), "torch.amin(x, 1)", [normal(2, 3)]),
    "max": (lambda x: F.max(x, (0, 2), True), "torch.amax(x, (0, 2), True)", [normal(2, 3, 4)]),
    "var": (lambda x: F.var(x, 1), "torch.var(x, 1)", [normal(2, 3)]),
    "var of all": (lambda x: F.var(x, correction=0), "torch.var(x, correction=0)", [normal(2, 3)]),
    "std": (
        lambda x: F.std(x, (0, 2), keepdims=True),
        "torch.std(x, (0, 2), keepdim=True)",
        [normal(2, 3, 4)],
    ),
    "norm": (lambda x: F.norm(x, 2, -1), "torch.linalg.vector_norm(x, dim=-1)", [normal(2, 3)]),
    "norm of all": (F.norm, "torch.linalg.vector_norm(x)", [normal(2, 3)]),
    "logsumexp": (lambda x: F.logsumexp(x, 1), "torch.logsumexp(x, 1)", [normal(2, 3) * 30]),
    "cumsum": (lambda x: F.cumsum(x, 1), "torch.cumsum(x, 1)", [normal(2, 3, 4)]),
    "flatten": (lambda x: F.flatten(x, 1), "torch.flatten(x, 1)", [normal(2, 3, 4)]),
    "flip": (lambda x: F.flip(x, (0, -1)), "torch.flip(x, (0, -1))", [normal(2, 3, 4)]),
    "roll": (lambda x: F.roll(x, -1, 1), "torch.roll(x, -1, 1)", [normal(2, 3)]),
    "tile": (lambda x: F.tile(x, (2, 1, 3)), "x.repeat(2, 1, 3)", [normal(2, 3)]),
    "repeat_interleave": (
        lambda x: F.repeat_interleave(x, 2, 1),
        "torch.repeat_interleave(x, 2, 1)",
        [normal(2, 3)],
    ),
    "repeat_interleave by counts": (
        lambda x: F.repeat_interleave(x, [2, 0, 1], 1),
        "torch.repeat_interleave(x, torch.tensor([2, 0, 1]), 1)",
        [normal(2, 3)],
    ),
    "unbind": (lambda x: F.unbind(x, 1), "torch.unbind(x, 1)", [normal(2, 3)]),
    "tril": (F.tril, "torch.tril(x)", [normal(2, 3, 4)]),
    "triu": (lambda x: F.triu(x, 1), "torch.triu(x, 1)", [normal(3, 4)]),
    "gather": (
        lambda x: F.gather(x, 1, INDEX),
        "torch.gather(x, 1, torch.from_numpy(INDEX))",
        [normal(2, 4)],
    ),
    "gather of fewer rows": (
        lambda x: F.gather(x, 0, INDEX[:, :1] * 0),
        "torch.gather(x, 0, torch.from_numpy(INDEX[:, :1] * 0))",
        [normal(2, 4)],
    ),
    "index_select": (
        lambda x: F.index_select(x, -1, [3, 0, 3]),
        "torch.index_select(x, -1, torch.tensor([3, 0, 3]))",
        [normal(2, 4)],
    ),
    "scatter": (
        lambda x, y: F.scatter(x, 1, [[2, 0, 3], [1, 2, 0]], y),
        "torch.scatter(x, 1, torch.tensor([[2, 0, 3], [1, 2, 0]]), y)",
        [normal(2, 4), normal(2, 3)],
    ),
    "scatter of a number": (
        lambda x: F.scatter(x, 1, INDEX, 7.0),
        "torch.scatter(x, 1, torch.from_numpy(INDEX), 7.0)",
        [normal(2, 4)],
    ),
    "scatter_add": (
        lambda x, y: F.scatter_add(x, 1, INDEX, y),
        "torch.scatter_add(x, 1, torch.from_numpy(INDEX), y)",
        [normal(2, 4), normal(2, 3)],
    ),
    "index_add": (
        lambda x, y: F.index_add(x, 1, [0, 2, 0], y),
        "torch.index_add(x, 1, torch.tensor([0, 2, 0]), y)",
        [normal(2, 4), normal(2, 3)],
    ),
    "sort": (lambda x: F.sort(x, 1, descending=True)[0], "torch.sort(x, 1, True)[0]", [normal(2, 5)]),
    "topk": (lambda x: F.topk(x, 2)[0], "torch.topk(x, 2)[0]", [normal(3, 5)]),
    "smallest": (lambda x: F.topk(x, 2, 0, False)[0], "torch.topk(x, 2, 0, False)[0]", [normal(3, 5)]),
    "pad": (lambda x: F.pad(x, (1, 2), value=3.0), "TF.pad(x, (1, 2), value=3.0)", [normal(2, 3)]),
    "pad and crop": (lambda x: F.pad(x, (-1, 2, 0, 1)), "TF.pad(x, (-1, 2, 0, 1))", [normal(1, 2, 3)]),
    "pad by reflection": (
        lambda x: F.pad(x, (2, 1, 1, 0), "reflect"),
        "TF.pad(x, (2, 1, 1, 0), 'reflect')",
        [normal(1, 2, 3, 4)],
    ),
    "pad by the border": (
        lambda x: F.pad(x, (2, 1), "replicate"),
        "TF.pad(x, (2, 1), 'replicate')",
        [normal(1, 2, 3)],
    ),
    "pad in a circle": (
        lambda x: F.pad(x, (2, 1), "circular"),
        "TF.pad(x, (2, 1), 'circular')",
        [normal(1, 2, 3)],
    ),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.1), "TF.leaky_relu(x, 0.1)", [normal(2, 5)]),
    "elu": (F.elu, "TF.elu(x)", [normal(2, 5)]),
    "softplus": (F.softplus, "TF.softplus(x)", [normal(2, 5) * 9]),
    "logsigmoid": (F.logsigmoid, "TF.logsigmoid(x)", [normal(2, 5) * 9]),
    "glu": (lambda x: F.glu(x, 1), "TF.glu(x, 1)", [normal(2, 4)]),
    "relu6": (F.relu6, "TF.relu6(x)", [normal(2, 5) * 6]),
    "hardswish": (F.hardswish, "TF.hardswish(x)", [normal(2, 5) * 3]),
    "hardsigmoid": (F.hardsigmoid, "TF.hardsigmoid(x)", [normal(2, 5) * 3]),
    "mish": (F.mish, "TF.mish(x)", [normal(2, 5)]),
    "mse_loss": (F.mse_loss, "TF.mse_loss(x, y)", [normal(2, 3), normal(2, 3, seed=1)]),
    "l1_loss": (F.l1_loss, "TF.l1_loss(x, y)", [normal(2, 3), normal(2, 3, seed=1)]),
    "huber_loss": (
        lambda x, y: F.huber_loss(x, y, "sum", 0.7),
        "TF.huber_loss(x, y, 'sum', 0.7)",
        [normal(2, 5), normal(2, 5, seed=1)],
    ),
    "smooth_l1_loss": (
        lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.7),
        "TF.smooth_l1_loss(x, y, reduction='none', beta=0.7)",
        [normal(2, 5), normal(2, 5, seed=1)],
    ),
    "binary_cross_entropy": (F.binary_cross_entropy, "TF.binary_cross_entropy(x, y)", [share(4), share(4)]),
    "binary_cross_entropy_with_logits": (
        lambda x: F.binary_cross_entropy_with_logits(x, share(2, 3), normal(3) ** 2, pos_weight=share(3)),
        "TF.binary_cross_entropy_with_logits(x, *map(torch.from_numpy, (share(2, 3), normal(3) ** 2)), "
        "pos_weight=torch.from_numpy(share(3)))",
        [normal(2, 3) * 20],
    ),
    "kl_div": (
        lambda x, y: F.kl_div(x, y, reduction="batchmean"),
        "TF.kl_div(x, y, reduction='batchmean')",
        [logs(2, 3), share(2, 3)],
    ),
    "kl_div of logarithms": (
        lambda x, y: F.kl_div(x, y, log_target=True),
        "TF.kl_div(x, y, log_target=True)",
        [logs(2, 3), logs(2, 3) - 1],
    ),
    "nll_loss": (
        lambda x: F.nll_loss(x, TARGETS),
        "TF.nll_loss(x, torch.from_numpy(TARGETS))",
        [logs(3, 4)],
    ),
    "normalize": (F.normalize, "TF.normalize(x)", [normal(3, 4)]),
    "cosine_similarity": (
        lambda x, y: F.cosine_similarity(x, y, 1),
        "TF.cosine_similarity(x, y, 1)",
        [normal(3, 4), normal(3, 4, seed=1)],
    ),
    "group_norm": (
        lambda x, w, b: F.group_norm(x, 2, w, b),
        "TF.group_norm(x, 2, y, z)",
        [normal(2, 4, 3), normal(4), normal(4, seed=1)],
    ),
    "conv1d": (
        lambda x, w, b: F.conv1d(x, w, b, 2, 1, 1, 2),
        "TF.conv1d(x, y, z, 2, 1, 1, 2)",
        [normal(2, 4, 7), normal(2, 2, 3), normal(2)],
    ),
    "adaptive_avg_pool2d": (
        lambda x: F.adaptive_avg_pool2d(x, (2, 1)),
        "TF.adaptive_avg_pool2d(x, (2, 1))",
        [normal(1, 2, 4, 3)],
    ),
    "interpolate nearest": (
        lambda x: F.interpolate(x, scale_factor=2),
        "TF.interpolate(x, scale_factor=2)",
        [normal(1, 2, 2, 3)],
    ),
    "interpolate bilinear": (
        lambda x: F.interpolate(x, (5, 2), mode="bilinear"),
        "TF.interpolate(x, (5, 2), mode='bilinear')",
        [normal(1, 2, 3, 4)],
    ),
    "interpolate bicubic": (
        lambda x: F.interpolate(x, scale_factor=(1.7, 0.6), mode="bicubic"),
        "TF.interpolate(x, scale_factor=(1.7, 0.6), mode='bicubic')",
        [normal(1, 2, 3, 4)],
    ),
    "interpolate between corners": (
        lambda x: F.interpolate(x, (5, 1), mode="bilinear", align_corners=True),
        "TF.interpolate(x, (5, 1), mode='bilinear', align_corners=True)",
        [normal(1, 2, 3, 4)],
    ),
}
# By kernels, on the CPU; tests/contracts has their numbers in other sizes and types.
BY_KERNELS = {
    "gelu": (F.gelu, "TF.gelu(x)", [TAILS]),
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), "TF.gelu(x, approximate='tanh')", [TAILS]),
    "silu": (F.silu, "TF.silu(x)", [TAILS]),
    "relu": (F.relu, "TF.relu(x)", [TAILS]),
    "relu of one number": (F.relu, "TF.relu(x)", [normal()]),
    "swiglu": (F.swiglu, "TF.silu(x[..., :3]) * x[..., 3:]", [3 * normal(2, 1, 6)]),
    "softmax": (F.softmax, "torch.softmax(x, -1)", [3 * normal(2, 3, 4)]),
    "softmax over rows": (lambda x: F.softmax(x, 1), "torch.softmax(x, 1)", [3 * normal(2, 3, 4)]),
    "log_softmax": (F.log_softmax, "torch.log_softmax(x, -1)", [3 * normal(2, 3, 4)]),
    "log_softmax over columns": (lambda x: F.log_softmax(x, 0), "torch.log_softmax(x, 0)", [normal(4, 1)]),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, 5, w, b),
        "TF.layer_norm(x, (5,), y, z)",
        [normal(2, 1, 5), normal(5), normal(5, seed=1)],
    ),
    "layer_norm without a bias": (
        lambda x, w: F.layer_norm(x, 7, w, eps=0.1),
        "TF.layer_norm(x, (7,), y, eps=0.1)",
        [normal(4, 7), normal(7)],
    ),
    "rms_norm": (
        lambda x, w: F.rms_norm(x, 5, w, 1e-3),
        "TF.rms_norm(x, (5,), y, 1e-3)",
        [normal(3, 5), normal(5)],
    ),
    **{
        f"cross_entropy, {how}": (
            lambda x, how=how: F.cross_entropy(x, TARGETS, reduction=how),
            f"TF.cross_entropy(x, torch.from_numpy(TARGETS), reduction='{how}')",
            [3 * normal(3, 4)],
        )
        for how in ("mean", "sum", "none")
    },
    "linear": (F.linear, "TF.linear(x, y, z)", [normal(2, 3, 5), normal(4, 5), normal(4)]),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
        "TF.scaled_dot_product_attention(x, y, z, scale=0.3)",
        [normal(2, 2, 4, 3), normal(2, 2, 5, 3), normal(2, 2, 5, 3, seed=1)],
    ),
    "causal attention of shared heads": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "TF.scaled_dot_product_attention(x, y, z, is_causal=True, enable_gqa=True)",
        [normal(2, 4, 5, 3), normal(2, 2, 5, 3), normal(2, 2, 5, 3, seed=1)],
    ),
    **{
        f"{name} {shape} {geometry}": (
            lambda x, name=name, geometry=geometry: getattr(F, name)(x, *geometry),
            f"TF.{name}(x, *{geometry})",
            [normal(*shape)],
        )
        for name in ("max_pool2d", "avg_pool2d")
        for shape, *geometry in (
            ((2, 3, 6, 7), 2, None, 0),
            ((1, 2, 7, 5), 3, 2, 1),
            ((2, 1, 5, 6), (2, 3), (1, 2), (1, 0)),
            ((1, 1, 9, 4), (3, 1), (4, 1), 0),  # pixels that no window sees
        )
    },
    **{
        f"conv2d {x} {weight} {geometry}": (
            lambda x, w, b, geometry=geometry: F.conv2d(x, w, b, *geometry),
            f"TF.conv2d(x, y, z, *{geometry})",
            [normal(*x), normal(*weight), normal(weight[0])],
        )
        for x, weight, *geometry in (  # stride, padding, dilation, groups
            ((2, 3, 5, 4), (2, 3, 3, 2), 1, (1, 0), 1, 1),
            ((1, 4, 5, 6), (6, 2, 2, 3), (2, 1), (0, 2), (1, 2), 2),
            ((2, 2, 4, 5), (4, 1, 3, 3), (1, 2), 1, 1, 2),  # depthwise, two outputs for each channel
            ((1, 2, 3, 3), (3, 2, 1, 1), 2, 0, 1, 1),  # pixels that no window sees
            ((1, 2, 7, 7), (2, 1, 3, 2), (3, 2), (2, 1), 2, 2),
        )
    },
    **{
        f"conv_transpose2d {x} {weight} {geometry}": (
            lambda x, w, b, geometry=geometry: F.conv_transpose2d(x, w, b, *geometry),
            f"TF.conv_transpose2d(x, y, z, *{geometry})",
            [normal(*x), normal(*weight), normal(outputs)],
        )
        for outputs, x, weight, *geometry in (  # stride, padding, output_padding, groups, dilation
            (2, (2, 3, 4, 3), (3, 2, 3, 2)),
            (4, (1, 4, 3, 4), (4, 2, 3, 3), (2, 3), (1, 0), (1, 2), 2, (1, 2)),
            (4, (2, 4, 2, 3), (4, 1, 2, 2), 2, 0, 0, 4),
            (3, (1, 2, 3, 3), (2, 3, 1, 1), 3, 0, 2),  # rows and columns that nothing adds to
        )
    },
    "global_avg_pool2d": (F.global_avg_pool2d, "x.mean((2, 3))", [normal(2, 3, 4, 5)]),
}
FORMULAS = {
    "bhqd,bhkd->bhqk": [(2, 2, 3, 4), (2, 2, 5, 4)],
    "bqd , bkd": [(2, 3, 4), (2, 5, 4)],
    "...ij,jk->...ik": [(2, 3, 4), (4, 2)],
    "i,j->ij": [(3,), (4,)],
    "bij->b": [(2, 3, 4)],
    "ij->ji": [(2, 3)],
    "bi,ij,bj->b": [(2, 3), (3, 4), (2, 4)],
    "i,i->": [(3,), (3,)],
    "Ab...,A->b...": [(2, 3, 4), (2,)],
}
ALL = CASES | BY_KERNELS


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_differences(name, layout):
    op, _, arrays = ALL[name]
    check_gradients(op, *(leaf(layout(array)) for array in arrays))


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", ALL)
def test_values_and_gradients_are_those_of_pytorch(name):
    torch = pytest.importorskip("torch")
    op, theirs, arrays = ALL[name]
    ours = [leaf(array.copy()) for array in arrays]
    names = dict(zip("xyz", (torch.from_numpy(a.copy()).requires_grad_() for a in arrays), strict=False))
    got = op(*ours)
    expected = eval(theirs, globals() | {"torch": torch, "TF": torch.nn.functional} | names)
    pairs = list(zip(got, expected, strict=True)) if isinstance(got, tuple) else [(got, expected)]
    for one, other in pairs:
        np.testing.assert_allclose(one.data, other.detach().numpy(), rtol=1e-10, atol=1e-12)
        weights = normal(*one.shape, seed=5)
        (one * weights).sum().backward(retain_graph=True)
        (other * torch.from_numpy(weights)).sum().backward(retain_graph=True)
    for x, other in zip(ours, names.values(), strict=True):
        np.testing.assert_allclose(x.grad, other.grad.numpy(), rtol=1e-7, atol=1e-12)  # its 1/6 is float32


@pytest.mark.parametrize("formula", FORMULAS)
def test_einsum(formula):
    arrays = [normal(*shape, seed=i) for i, shape in enumerate(FORMULAS[formula])]
    check_gradients(lambda *x: F.einsum(formula, *x), *map(leaf, arrays))
    got = F.einsum(formula, *arrays).data
    np.testing.assert_allclose(got, np.einsum(formula.replace(" ", ""), *arrays), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"binary_cross_entropy_with_logits"}))
def test_float32_stays_float32(name):
    op, _, arrays = ALL[name]
    results = op(*(Tensor(array.astype(np.float32)) for array in arrays))
    for result in results if isinstance(results, tuple) else (results,):
        assert result.dtype == np.float32


def test_erf_in_float32_is_off_by_4e_7_at_the_most():
    x = np.linspace(-5, 5, 4001, dtype=np.float32)
    exact = F.erf(x.astype(np.float64)).data
    assert np.abs(F.erf(x).data - exact).max() < 4e-7
    assert np.isnan(F.erf(np.full(1, np.nan, np.float32)).data).all()
    assert F.erf(np.arange(2)).dtype == np.float32


def test_positions_are_arrays():
    x = Tensor([[3.0, 1.0, 3.0], [0.0, 2.0, 1.0]])
    for array, expected in (
        (x.argmax(), 0),
        (x.argmax(1), [0, 1]),
        (x.argmin(-1), [1, 0]),
        (x.argsort(1, descending=True), [[0, 2, 1], [1, 2, 0]]),
        (x.topk(2)[1], [[0, 2], [1, 2]]),
        (x.sort(0)[1], [[1, 0, 1], [0, 1, 0]]),
        (F.one_hot([[0, 2]]), [[[1, 0, 0], [0, 0, 1]]]),
        (F.one_hot(np.array([1]), 2), [[0, 1]]),
    ):
        assert isinstance(array, np.ndarray) and array.dtype == np.int64 and array.tolist() == expected


def test_where_the_slope_is_not_defined_the_gradient_is_0_as_in_pytorch():
    x = leaf(np.zeros((2, 3)))
    for op in (F.norm, F.std, F.abs, lambda x: F.normalize(x)):
        x.grad = None
        op(x).sum().backward()
        if op in (F.norm, F.std, F.abs):
            assert x.grad.tolist() == [[0.0] * 3] * 2
        assert np.isfinite(x.grad).all()


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda x: F.mse_loss(x, np.ones((2, 1))), ValueError, r"one shape, got \(2, 3\) and \(2, 1\)"),
        (
            lambda x: F.mse_loss(x, x, reduction="avg"),
            ValueError,
            "reduction must be 'mean', 'sum' or 'none'",
        ),
        (lambda x: F.gather(x, 1, [0]), ValueError, "does not fit"),
        (lambda x: F.gather(x, 1, [[3]]), ValueError, r"index\[0, 0\] is 3, not in \[0, 3\)"),
        (lambda x: F.gather(x, 1, [[0.5]]), TypeError, "index must be integers"),
        (lambda x: F.index_add(x, 0, [0], x), ValueError, r"source must be \(1, 3\)"),
        (lambda x: F.scatter_add(x, 0, [[0]], np.ones((1, 1), np.float32)), TypeError, "float64 and source"),
        (lambda x: F.masked_scatter(x, x.data == x.data, [1.0]), ValueError, "1 elements for 6 places"),
        (lambda x: F.topk(x, 4), ValueError, "k 4 of 3"),
        (lambda x: F.one_hot([2], 2), ValueError, r"values\[0\] is 2, not in \[0, 2\)"),
        (lambda x: F.nll_loss(x, [0]), ValueError, "needs targets"),
        (lambda x: F.nll_loss(x, [0, 3]), ValueError, r"targets\[1\] is 3"),
        (lambda x: F.pad(x, (1,)), ValueError, "before, after"),
        (lambda x: F.pad(x, (-2, -2)), ValueError, "more than there is"),
        (lambda x: F.pad(x, (3, 0), "reflect"), ValueError, "can't pad axis 1"),
        (lambda x: F.pad(x, (1, 0), "mirror"), ValueError, "mode must be"),
        (lambda x: F.glu(x), ValueError, "even size"),
        (lambda x: F.flatten(x, 1, 0), ValueError, "axis 1 comes after axis 0"),
        (lambda x: F.repeat_interleave(x, [1, 2], 1), ValueError, "2 counts for 3"),
        (lambda x: F.group_norm(x, 2), ValueError, "in 2 groups"),
        (lambda x: F.conv1d(x, x), ValueError, "conv1d: x must be"),
        (lambda x: F.adaptive_avg_pool2d(x, 1), ValueError, "multiples of"),
        (lambda x: F.interpolate(x, 2), ValueError, "must be .batch"),
        (lambda x: F.interpolate(x[None, None], 2, 2.0), ValueError, "either size or scale_factor"),
        (lambda x: F.einsum("ij,jk->ik", x), ValueError, "names 2 operands, got 1"),
        (lambda x: F.einsum("ij,jk->ik", x, x), ValueError, "'j' of 'ij,jk->ik' is 3 and 2"),
        (lambda x: F.einsum("ii->i", x[:, :2]), ValueError, "twice"),
        (lambda x: F.einsum("ijk->i", x), ValueError, "does not fit shape"),
        (lambda x: F.einsum("ij->k", x), ValueError, "no formula"),
        (lambda x: F.cat, AttributeError, r"use F\.concatenate"),
        (lambda x: F.zeros, AttributeError, "use NumPy's"),
        (lambda x: F.no_such, AttributeError, "has no 'no_such'$"),
        (lambda x: x.cuda(), AttributeError, "on the device that init_device_mesh names"),
        (lambda x: x.no_such, AttributeError, "no attribute 'no_such'$"),
    ],
)
def test_what_does_not_fit_is_a_sentence(call, error, text):
    with pytest.raises(error, match=text):
        call(leaf(normal(2, 3)))


def test_the_page_of_functions_names_what_is_there():
    named = set(re.findall(r"`F\.(\w+)`", (ROOT / "docs" / "functions.md").read_text()))
    assert len(named) > 60 and named <= set(F.__all__)
