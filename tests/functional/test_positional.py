"""Calls by position as a user of PyTorch writes them: one text for both, and the same order of parameters.

test_beside_pytorch.py holds these calls to differences, and tests/cuda/test_functions.py has them on the GPU.
"""

import inspect
import re

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests.gradcheck import leaf, normal

# Each text is run with F of PyTorch and F of shardrt; `torch`'s own functions are of F as well.
X, Y = normal(4, 6), normal(4, 6, seed=1)
CUBE, IMAGE = normal(2, 4, 6), normal(2, 4, 6, 6)
ROW, COLUMN, SQUARE = (
    normal(6, seed=2) ** 2 + 0.5,
    normal(4, seed=3) ** 2 + 0.5,
    normal(4, 6, seed=4) ** 2 + 0.3,
)
SHARE = 1 / (1 + np.exp(-Y))
LOGS = X - np.log(np.exp(X).sum(-1, keepdims=True))
TARGETS, LABELS = np.array([3, -100, 0, 5]), np.array([3, 1, 0, 5])
IDS, MASK = np.array([[2, 0, 3], [1, 1, 0]]), X > 0
KERNEL, KERNEL1, UP, UP1 = normal(4, 2, 3, 3), normal(4, 2, 3), normal(4, 3, 3, 2), normal(4, 3, 3)
COUNTS = np.array([2, 0, 1, 0, 3, 1])
INPUTS = {
    **{"X": X, "Y": Y, "CUBE": CUBE, "IMAGE": IMAGE, "ROW": ROW, "COLUMN": COLUMN, "SQUARE": SQUARE},
    **{"SHARE": SHARE, "LOGS": LOGS, "KERNEL": KERNEL, "KERNEL1": KERNEL1, "UP": UP, "UP1": UP1},
}
# Of no gradient: those with a _ are numbers of the inputs.
PLAIN = {"TARGETS": TARGETS, "LABELS": LABELS, "IDS": IDS, "MASK": MASK, "COUNTS": COUNTS}
PLAIN |= {"ROW_": ROW, "COLUMN_": COLUMN, "SQUARE_": SQUARE, "SHARE_": SHARE}
CALLS = """
abs(X) | add(X, Y) | sub(X, Y) | mul(X, Y) | div(X, SQUARE) | neg(X) | pow(SQUARE, 1.5) | maximum(X, Y)
minimum(X, Y) | exp(X) | expm1(X) | log(SQUARE) | log1p(SQUARE) | sqrt(SQUARE) | rsqrt(SQUARE) | square(X)
sin(X) | cos(X) | tanh(X) | erf(X) | sign(X) | floor(X) | ceil(X) | round(X) | clamp(X, -0.5, 0.7)
clamp(X, None, 0.7) | where(MASK, X, Y) | masked_fill(X, MASK, 2.0) | masked_scatter(X, MASK, Y) | sum(X)
sum(X, 1) | sum(CUBE, (0, 2), True) | mean(X, 1, True) | var(X) | var(X, 1) | std(X, (0, 1))
std(X, 1, correction=0) | amax(CUBE, 1, True) | amin(CUBE, (0, 2)) | argmax(X) | argmax(X, 1, True)
argmin(X, 0) | argsort(X, 0, True) | norm(X) | norm(X, 2, 1) | norm(X, 1, 0, True)
norm(CUBE, "fro", (1, 2)) | norm(X, float("inf"), 1) | logsumexp(X, 1) | logsumexp(X, (0, 1), True)
cumsum(X, 1) | sort(X, 1, True)[0] | topk(X, 2, 1, False, True)[0] | cat((X, Y), 1) | stack((X, Y), 1)
split(X, [2, 4], 1)[1] | chunk(X, 3, 1)[2] | unbind(X, 1)[3] | flatten(CUBE, 1, 2) | reshape(X, (3, 8))
permute(CUBE, (2, 0, 1)) | transpose(CUBE, 0, 2) | squeeze(X[:1], 0) | unsqueeze(X, 1) | tile(X, (2, 1))
flip(X, (0, 1)) | roll(X, 2, 1) | roll(X, (1, -2), (0, 1)) | roll(X, 7) | repeat_interleave(X, 2)
repeat_interleave(X, 2, 1) | tril(X, 1) | triu(X, -1) | gather(X, 1, IDS) | scatter(X, 1, IDS[:, :1], 7.0)
scatter_add(X, 0, IDS, Y[:2, :3]) | index_add(X, 0, IDS[0], Y[:3]) | index_select(X, 1, IDS[0]) | one_hot(IDS)
one_hot(IDS, 5) | embedding(IDS, X) | embedding(IDS, X, 1) | embedding(IDS, X, -3) | matmul(X, CUBE[0].T)
einsum("ij,kj->ik", X, Y) | linear(X, Y, COLUMN) | softmax(X, 0) | log_softmax(CUBE, 1) | sigmoid(X)
relu(X) | relu(X, False) | relu6(X, False) | silu(X, False) | gelu(X) | gelu(X, approximate="tanh")
elu(X, 0.7) | leaky_relu(X, 0.2, False) | mish(X) | hardswish(X) | hardsigmoid(X) | logsigmoid(X)
softplus(X) | softplus(X, 2, 1) | glu(X, 1) | glu(CUBE) | dropout(X, 0.0, True, False)
dropout(X, 0.5, False) | layer_norm(X, (6,)) | layer_norm(X, (6,), ROW, Y[0])
layer_norm(CUBE, [4, 6], SQUARE, Y, 1e-3) | layer_norm(X, X.shape[-1:], None, ROW) | rms_norm(X, (6,))
rms_norm(X, (6,), ROW, 1e-3) | rms_norm(CUBE, (4, 6), SQUARE) | group_norm(IMAGE, 2)
group_norm(IMAGE, 2, COLUMN, Y[:, 0], 1e-3) | batch_norm(IMAGE, COLUMN_, COLUMN_)
batch_norm(IMAGE, None, None, None, None, True)
batch_norm(IMAGE, COLUMN_ * 1, COLUMN_ * 1, COLUMN, Y[:, 0], True, 0.3, 1e-3)
normalize(CUBE) | normalize(CUBE, 1.0) | normalize(X, 2.0, 0, 1e-6) | cosine_similarity(CUBE, CUBE[:1] * 2)
cosine_similarity(X, Y, 0, 1e-6) | conv1d(CUBE, KERNEL1, COLUMN, 2, 1, 1, 2)
conv2d(IMAGE, KERNEL, COLUMN, 2, 1, 1, 2) | conv_transpose2d(IMAGE, UP)
conv_transpose2d(IMAGE, UP, ROW, (2, 3), (1, 0), (1, 2), 2, (1, 2))
conv_transpose2d(IMAGE, UP, None, 2, 1, 1, 1, 2) | max_pool2d(IMAGE, 2)
max_pool2d(IMAGE, 3, 2, 1, 1, False, False) | avg_pool2d(IMAGE, 3, 2, 1)
avg_pool2d(IMAGE, 3, 2, 1, False, False) | avg_pool2d(IMAGE, 2, 2, 0, False, True, 3)
adaptive_avg_pool2d(IMAGE, (3, 2)) | interpolate(IMAGE, 9)
interpolate(IMAGE, None, 1.7, "bilinear", False, True) | interpolate(IMAGE, (9, 4), None, "bicubic", True)
pad(X, (1, 2)) | pad(X, (1, 2, 0, 1), "constant", 3.0) | pad(CUBE, (2, 1), "reflect") | mse_loss(X, Y)
mse_loss(X, Y, None, None, "sum") | mse_loss(X, Y, None, None, "mean", SQUARE)
l1_loss(X, Y, None, None, "mean", SQUARE) | huber_loss(X, Y, "mean", 0.7)
huber_loss(X, Y, "mean", 0.7, SQUARE) | smooth_l1_loss(X, Y, None, None, "sum", 0.7)
binary_cross_entropy(SHARE, SHARE_, SQUARE_)
binary_cross_entropy(SHARE, SHARE_, None, None, None, "sum")
binary_cross_entropy_with_logits(X, SHARE_, SQUARE_, None, None, "sum", ROW_)
kl_div(LOGS, SHARE)
kl_div(LOGS, SHARE, None, None, "batchmean") | kl_div(LOGS, LOGS * 2, None, None, "sum", True)
nll_loss(LOGS, TARGETS) | nll_loss(LOGS, TARGETS, ROW_)
nll_loss(LOGS, LABELS, ROW_, None, 3, None, "none") | cross_entropy(X, TARGETS)
cross_entropy(X, TARGETS, ROW_)
cross_entropy(X, TARGETS, ROW_, None, -100, None, "sum", 0.2)
cross_entropy(X, LABELS, None, None, 0, None, "mean", 0.1)
cross_entropy(X, LABELS, ROW_, None, 5, None, "mean", 0.1)
cross_entropy(X, TARGETS, None, None, -100, None, "none", 0.3)
linear_cross_entropy(X, Y, LABELS % 4) | scaled_dot_product_attention(IMAGE, IMAGE, IMAGE * 2)
scaled_dot_product_attention(IMAGE, IMAGE, IMAGE, None, 0.0, True, scale=0.3) | pow(SQUARE, ROW)
logsumexp(X * 30, 1) | repeat_interleave(X, COUNTS, 1) | gather(X, 0, IDS[:, :1] * 0) | var(CUBE, (0, 2))
scatter(X, 1, IDS[:1], Y[:1, :3]) | scatter_add(X, 1, IDS, Y[:2, :3]) | index_add(X, 1, IDS[0], Y[:, :3])
unbind(CUBE, 1)[0] | flip(CUBE, (0, -1)) | roll(X, -1, 1) | tile(X, (2, 1, 3)) | tril(CUBE)
pad(CUBE, (-1, 2, 0, 1)) | pad(IMAGE, (2, 1, 1, 0), "reflect") | pad(CUBE, (2, 1), "replicate")
pad(CUBE, (2, 1), "circular") | softplus(X * 9) | logsigmoid(X * 9) | relu6(X * 6) | hardswish(X * 3)
hardsigmoid(X * 3) | erf(X * 2) | round(X * 3) | smooth_l1_loss(X, Y, None, None, "none", 0.7)
huber_loss(X, Y, "sum", 0.7) | binary_cross_entropy(SHARE, SHARE * 0.9)
binary_cross_entropy_with_logits(X * 20, SHARE_, SQUARE_, None, None, "mean", ROW_) | topk(X, 2)[0]
cosine_similarity(X, Y, 1) | interpolate(IMAGE, None, 2) | interpolate(IMAGE, (5, 2), None, "bilinear")
interpolate(IMAGE, None, (1.7, 0.6), "bicubic") | interpolate(IMAGE, (5, 1), None, "bilinear", True)
pow(X, 2) | pow(X, 3.0) | pow(SQUARE, -1) | pow(SQUARE, 0.5) | pow(X, 0) | clamp(X, 0.7)
where(MASK, X, 3.0) | where(MASK, X[0], Y) | gelu(X * 6) | gelu(X * 6, approximate="tanh") | silu(X * 6)
relu(X[0, 0]) | softmax(X * 3, -1) | softmax(CUBE, 1) | log_softmax(X, -1) | log_softmax(X[:, :1], 0)
linear(CUBE, Y, COLUMN) | linear(X[0], Y, COLUMN)
cross_entropy(X, TARGETS, None, None, -100, None, "sum")
cross_entropy(X, TARGETS, None, None, -100, None, "none")
scaled_dot_product_attention(IMAGE, IMAGE[:, :, 1:], IMAGE[:, :, :5])
max_pool2d(IMAGE, (2, 3), (1, 2), (1, 0)) | avg_pool2d(IMAGE, (2, 3), (1, 2), (1, 0))
max_pool2d(IMAGE, (3, 1), (4, 1)) | avg_pool2d(IMAGE, (3, 1), (4, 1))
conv2d(IMAGE, KERNEL[:, :, :2], COLUMN, (2, 1), (0, 2), (1, 2), 2)
conv2d(IMAGE, UP.transpose(0, 1), None, 2) | conv2d(IMAGE, KERNEL[:, :1], COLUMN, (1, 2), 1, 1, 4)
conv2d(IMAGE, KERNEL[:, :, 1:2, :1], COLUMN, 2, 0, 1, 2)
conv_transpose2d(IMAGE, UP[:, :1], COLUMN, 2, 0, 0, 4)
conv_transpose2d(IMAGE, UP[:, :, :1, :1], None, 3, 0, 2)
"""
CASES = [call for line in CALLS.strip().split("\n") for call in line.split(" | ")]
HERE = {"amax": "max", "amin": "min", "cat": "concatenate"}  # PyTorch's name, and that of shardrt


class Theirs:
    """PyTorch's function of a name: torch.nn.functional's, else torch's."""

    def __init__(self, torch):
        self.torch = torch

    def __getattr__(self, name):
        own = getattr(self.torch.nn.functional, name, None)
        return own if own is not None and name != "tanh" else getattr(self.torch, name)


class Ours:
    def __getattr__(self, name):
        return getattr(F, HERE.get(name, name))


def inputs_of(call):
    """The arrays by name whose gradients it has."""
    return {name: array for name, array in INPUTS.items() if re.search(rf"\b{name}\b", call)}


def result_of(call, functions, inputs, plain=PLAIN):
    """Of the text; its function is one of `functions`."""
    return eval("functions." + call, {"functions": functions}, inputs | plain)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides", "ignore:.*divides the total loss")
@pytest.mark.parametrize("call", CASES)
def test_a_call_by_position_is_pytorchs(call):
    torch = pytest.importorskip("torch")
    inputs = {name: leaf(array.copy()) for name, array in inputs_of(call).items()}
    their_inputs = {name: torch.tensor(x.data, requires_grad=True) for name, x in inputs.items()}
    plain = {name: torch.from_numpy(array) for name, array in PLAIN.items()}
    ours, theirs = result_of(call, Ours(), inputs), result_of(call, Theirs(torch), their_inputs, plain)
    expected = theirs.detach().numpy()
    if not isinstance(ours, Tensor):
        return np.testing.assert_array_equal(ours, expected)
    np.testing.assert_allclose(ours.data, expected, rtol=1e-10, atol=1e-12)
    if theirs.requires_grad:
        dy = normal(*expected.shape, seed=9)
        (ours * dy).sum().backward()
        (theirs * torch.from_numpy(dy)).sum().backward()
        for one, other in zip(inputs.values(), their_inputs.values(), strict=True):
            zero = np.zeros(one.shape)
            gradients = (zero if g is None else np.asarray(g) for g in (one.grad, other.grad))
            np.testing.assert_allclose(*gradients, rtol=1e-7, atol=1e-10)  # its 1/6 is float32


SAME = {  # our word: PyTorch's, of which one is used
    "x": ("input", "self", "tensor", "x1"),
    "y": ("other", "x2"),
    "q": ("query",),
    "k": ("key", "k"),
    "v": ("value",),
    "axis": ("dim", "dims"),
    "axes": ("dims",),
    "axis0": ("dim0",),
    "axis1": ("dim1",),
    "keepdims": ("keepdim",),
    "logits": ("input",),
    "indices": ("input",),
    "values": ("tensor",),
    "targets": ("target",),
    "source": ("src", "source"),
    "sizes": ("split_size_or_sections",),
    "low": ("min",),
    "high": ("max",),
    "first": ("start_dim",),
    "last": ("end_dim",),
    "counts": ("repeats", "dims"),
    "shift": ("shifts",),
    "widths": ("pad",),
    "weight": ("linear_weight",),
}
# Without a signature, or with one of several: what their documentation says.
DOCUMENTED = {
    "argmax": "input, dim=None, keepdim=False",
    "max": "input, dim=None, keepdim=False",  # torch.amax
    "min": "input, dim=None, keepdim=False",
    "mean": "input, dim=None, keepdim=False",
    "sum": "input, dim=None, keepdim=False",
    "scaled_dot_product_attention": "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False",
    "max_pool2d": "input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, "
    "return_indices=False",
    "masked_fill": "input, mask, value",
    "masked_scatter": "input, mask, source",
    "linear_cross_entropy": "input, linear_weight, target",
    "softmax": "input, dim",  # behind it PyTorch has an argument of its own
    "log_softmax": "input, dim",
}
OTHER_DEFAULTS = {
    **dict.fromkeys(("softmax", "log_softmax"), "PyTorch warns where dim is left out"),
    **dict.fromkeys(("logsumexp", "topk"), "PyTorch needs a dim, or takes the last one for None"),
}
NOT_THEIRS = {"getitem", "expand", "cast", "einsum"}  # methods, operators, a list of operands


def their_parameters(torch, name):
    """[(name, default or empty), ...] by position, as signature or documentation say; None without."""
    text = DOCUMENTED.get(name)
    function = getattr(Theirs(torch), {"concatenate": "cat"}.get(name, name), None)
    if function is None and text is None:
        return None
    if text is None:
        try:
            text = str(inspect.signature(function)).partition(" -> ")[0][1:-1]
        except ValueError:
            word = f"(?:{name}|{function.__name__})"  # log_sigmoid is documented as logsigmoid
            text = re.search(rf"^{word}\((.*?)\)(\s*->|$)", function.__doc__, re.M)[1]
    found = []
    for part in re.sub(r"\[[^()]*?\]", "", re.sub(r"\([^()]*\)", "None", text)).split(","):
        word, _, default = part.strip().partition("=")
        if word == "*":
            break
        found.append((word.partition(":")[0].strip(), default.strip() or inspect.Parameter.empty))
    return found


@pytest.mark.torch
def test_parameters_have_pytorchs_order_and_defaults():
    torch = pytest.importorskip("torch")
    compared = 0
    for name in sorted(set(F.__all__) - NOT_THEIRS):
        theirs = their_parameters(torch, name)
        if theirs is None:
            continue
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
        ours = [p for p in inspect.signature(getattr(F, name)).parameters.values() if p.kind in kinds]
        compared += 1
        extra = [p.name for p in ours[len(theirs) :]]
        assert extra in ([], ["communicator"]), (name, extra)
        for own, (word, default) in zip(ours, theirs, strict=False):
            assert own.name == word or word in SAME.get(own.name, ()), (name, own.name, word)
            if default is inspect.Parameter.empty or name in OTHER_DEFAULTS or word in ("out", "dtype"):
                continue
            assert own.default == eval(default), (name, word, own.default, default)
        missing = [word for word, _ in theirs[len(ours) :] if word not in ("out", "dtype", "_stacklevel")]
        assert not missing, (name, missing)
    assert compared > 95


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda x: F.scaled_dot_product_attention(x, x, x, np.ones((6, 6))), "mask.*softmax"),
        (lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5), "F.dropout"),
        (
            lambda x: F.cross_entropy(x[0, 0, :4], TARGETS, None, True),
            "size_average must be None, got True.*reduct",
        ),
        (lambda x: F.kl_div(x, x, "batchmean"), "size_average must be None, got 'batchmean'"),
        (lambda x: F.max_pool2d(x, 2, 2, 0, 2), "dilation must be 1, got 2"),
        (lambda x: F.max_pool2d(x, 2, 2, 0, 1, True), "ceil_mode must be False"),
        (lambda x: F.embedding([0], x[0, 0], None, 1.0), "max_norm must be None"),
        (lambda x: F.embedding([0], x[0, 0], 6), "padding_idx must be a row"),
        (lambda x: F.interpolate(x, 3, antialias=True), "antialias must be False"),
        (lambda x: F.norm(x, 3), "p must be 'fro', 2, 1, inf or -inf, got 3"),
        (lambda x: F.layer_norm(x, Tensor(ROW)), "normalized_shape must be the last sizes of x, got Tensor"),
        (lambda x: F.layer_norm(x, 5), r"got \(5,\) for x \(2, 4, 6, 6\)"),
        (lambda x: F.batch_norm(x, None, None), "pass running_mean and running_var"),
        (lambda x: F.roll(x, (1, 2), 0), "got 2 shifts and 1 axes"),
        (lambda x: F.cross_entropy(x[0, 0], TARGETS[:, None], COLUMN), "need targets"),
        (lambda x: F.nll_loss(x[0, 0, :4], TARGETS, COLUMN), r"weight must be \(6,\)"),
    ],
)
def test_what_pytorchs_argument_asks_for_and_is_not_served_is_a_sentence(call, text):
    with pytest.raises(ValueError, match=text):
        call(Tensor(IMAGE))


def test_a_boolean_is_no_axis():
    with pytest.raises(TypeError, match="axis must be integers or None, got False"):
        F.var(Tensor(X), False)
