"""The functions that a port from PyTorch meets: against differences, and against PyTorch itself.

The calls of test_positional.py, and more of functions that are kernels: (ours, PyTorch's, inputs). Both get
the same float64 arrays. docs/functions.md says what is where.
"""

import re

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests.functional import test_positional as positional
from tests.functional.test_positional import Ours, inputs_of, result_of
from tests.gradcheck import LAYOUTS, check_direction, check_gradients, leaf, normal
from tests.ranks import ROOT

TARGETS = np.array([3, -100, 0])
TAILS = np.array([[-20.0, -6.0, -3.0, -1.3, -0.2], [20.0, 6.0, 3.0, 1.3, 0.2]])


def case(call):
    """(ours, inputs) of a text."""
    inputs = inputs_of(call)

    def function(*given):
        return result_of(call, Ours(), dict(zip(inputs, given, strict=True)))

    return function, list(inputs.values())


POSITIONS = ("argmax", "argmin", "argsort", "one_hot")  # arrays
ONE_WAY = ("embedding(IDS, X, 1)", "embedding(IDS, X, -3)")  # one row has no gradient
CALLS = {
    call: case(call) for call in positional.CASES if not call.startswith(POSITIONS) and call not in ONE_WAY
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
ALL = CALLS | {name: (op, arrays) for name, (op, _, arrays) in BY_KERNELS.items()}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_differences(name, layout):
    """Of an image along one direction."""
    op, arrays = ALL[name]
    check = check_direction if sum(array.size for array in arrays) > 200 else check_gradients
    check(op, *(leaf(layout(array)) for array in arrays))


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", BY_KERNELS)
def test_values_and_gradients_are_those_of_pytorch(name):
    torch = pytest.importorskip("torch")
    op, theirs, arrays = BY_KERNELS[name]
    ours = [leaf(array.copy()) for array in arrays]
    names = dict(zip("xyz", (torch.from_numpy(a.copy()).requires_grad_() for a in arrays), strict=False))
    one, other = op(*ours), eval(theirs, globals() | {"torch": torch, "TF": torch.nn.functional} | names)
    np.testing.assert_allclose(one.data, other.detach().numpy(), rtol=1e-10, atol=1e-12)
    weights = normal(*one.shape, seed=5)
    (one * weights).sum().backward()
    (other * torch.from_numpy(weights)).sum().backward()
    for x, other in zip(ours, names.values(), strict=True):
        np.testing.assert_allclose(x.grad, other.grad.numpy(), rtol=1e-7, atol=1e-12)  # its 1/6 is float32


@pytest.mark.parametrize("formula", FORMULAS)
def test_einsum(formula):
    arrays = [normal(*shape, seed=i) for i, shape in enumerate(FORMULAS[formula])]
    check_gradients(lambda *x: F.einsum(formula, *x), *map(leaf, arrays))
    got = F.einsum(formula, *arrays).data
    np.testing.assert_allclose(got, np.einsum(formula.replace(" ", ""), *arrays), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ALL)
def test_float32_stays_float32(name):
    op, arrays = ALL[name]
    if not re.search(r"\w_\b", name):  # without numbers in float64
        assert op(*(Tensor(array.astype(np.float32)) for array in arrays)).dtype == np.float32


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
