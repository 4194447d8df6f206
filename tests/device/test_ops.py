"""Every op on the simulated device: results and gradients have the shapes and types that the CPU gives."""

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, device, nn
from shardrt import functional as F
from shardrt.device.cpu import CPUDevice
from shardrt.device.simulated import SimulatedDevice

IDS = np.array([[0, 3, 2], [1, 1, 0]])
ROWS = np.array([1, 0])
SHAPES = (2, 3, 4), (3, 4), (2, 4, 6, 6)
MASK = np.tri(2, 3, dtype=bool)
# Functions of x (2, 3, 4), y (3, 4) and square images z (2, 4, 6, 6), leaves of float32.
OPS = {
    "add": lambda x, y, z: x + y,
    "sub": lambda x, y, z: 1 - x - y,
    "mul": lambda x, y, z: x * y * 2,
    "div": lambda x, y, z: x / y,
    "pow": lambda x, y, z: x**3,
    "pow of tensors": lambda x, y, z: x**y,
    "power of 0": lambda x, y, z: x**0,
    "maximum": lambda x, y, z: F.maximum(x, y),
    "clamp": lambda x, y, z: F.clamp(x, -1, 1),
    "clamp by tensors": lambda x, y, z: F.clamp(x, y),
    "where": lambda x, y, z: F.where(x > 0, x, y),
    "masked_fill": lambda x, y, z: F.masked_fill(x[..., 0], MASK, 0.0),
    "neg": lambda x, y, z: -x,
    "matmul": lambda x, y, z: x @ y.T,
    "batches of products": lambda x, y, z: x @ x.transpose(1, 2),
    "einsum": lambda x, y, z: F.einsum("btc,tc->bt", x, y),
    "linear": lambda x, y, z: F.linear(x, y, y[:, 0]),
    "sum": lambda x, y, z: x.sum(1),
    "mean": lambda x, y, z: x.mean((0, 1), keepdims=True),
    "var": lambda x, y, z: F.var(x, 1),
    "std": lambda x, y, z: F.std(x),
    "norm": lambda x, y, z: F.norm(x, 2, 2),
    "logsumexp": lambda x, y, z: F.logsumexp(x, 1),
    "cumsum": lambda x, y, z: F.cumsum(x, 1),
    "max": lambda x, y, z: x.max(1),
    "min": lambda x, y, z: x.min(),
    "softmax": lambda x, y, z: F.softmax(x, 1),
    "log_softmax": lambda x, y, z: F.log_softmax(x),
    "reshape": lambda x, y, z: x.transpose(0, 1).reshape(-1, 2) * 1,
    "expand": lambda x, y, z: F.expand(y, (5, 3, 4)) * 1,
    "tile": lambda x, y, z: F.tile(y, (2, 1)),
    "repeat": lambda x, y, z: F.repeat_interleave(x, 2, 1),
    "split": lambda x, y, z: F.split(x, [1, 2], 1)[1] * 1,
    "unbind": lambda x, y, z: F.unbind(x, 1)[1] * 1,
    "concatenate": lambda x, y, z: F.concatenate([x, y.reshape(1, 3, 4)]),
    "stack": lambda x, y, z: F.stack([y, y], 1),
    "flip": lambda x, y, z: F.flip(x, 1) * 1,
    "roll": lambda x, y, z: F.roll(x, 1, 2),
    "slice": lambda x, y, z: x[:, 1, ::2] * 1,
    "index": lambda x, y, z: x[ROWS],
    "gather": lambda x, y, z: F.gather(x[:, 0], 1, IDS),
    "index_select": lambda x, y, z: F.index_select(x, 1, ROWS),
    "scatter": lambda x, y, z: F.scatter(x[:, 0], 1, IDS, x[:, 1, :3]),
    "scatter_add": lambda x, y, z: F.scatter_add(x[:, 0], 1, IDS, x[:, 1, :3]),
    "index_add": lambda x, y, z: F.index_add(x, 1, ROWS, x[:, :2]),
    "sort": lambda x, y, z: F.sort(x, 1)[0],
    "topk": lambda x, y, z: F.topk(x, 2)[0],
    "tril": lambda x, y, z: F.tril(x),
    "embedding": lambda x, y, z: F.embedding(IDS % 3, y),
    "layer_norm": lambda x, y, z: F.layer_norm(x, y[0].shape, y[0], y[1]),
    "rms_norm": lambda x, y, z: F.rms_norm(x, y[0].shape, y[0]),
    "group_norm": lambda x, y, z: F.group_norm(z, 2, y[0], y[1]),
    "batch_norm": lambda x, y, z: nn.BatchNorm2d(4)(z),
    "conv2d": lambda x, y, z: nn.Conv2d(4, 8, 3, padding=1)(z),
    "conv_transpose2d": lambda x, y, z: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2)(z),
    "max_pool2d": lambda x, y, z: F.max_pool2d(z, 2),
    "avg_pool2d": lambda x, y, z: F.avg_pool2d(z, 2),
    "nearest": lambda x, y, z: F.interpolate(z, 12),
    "bilinear": lambda x, y, z: F.interpolate(z, 9, mode="bilinear"),
    "pad": lambda x, y, z: F.pad(z, (1, 1, 0, 2)),
    "attention": lambda x, y, z: F.scaled_dot_product_attention(z, z, z, is_causal=True),
    "swiglu": lambda x, y, z: F.swiglu(x),
    "dropout": lambda x, y, z: F.dropout(x, 0.5),
    "mse_loss": lambda x, y, z: F.mse_loss(x, x * 2),
    "huber_loss": lambda x, y, z: F.huber_loss(x, x * 2),
    "nll_loss": lambda x, y, z: F.nll_loss(x, IDS),
    "cross_entropy": lambda x, y, z: F.cross_entropy(x, IDS),
    "cross_entropy of each": lambda x, y, z: F.cross_entropy(x, IDS, reduction="none"),
    "linear_cross_entropy": lambda x, y, z: F.linear_cross_entropy(x, y, IDS % 3),
    "cosine_similarity": lambda x, y, z: F.cosine_similarity(x, y, -1),
    "bce": lambda x, y, z: F.binary_cross_entropy_with_logits(x, F.sigmoid(x)),
    "cast": lambda x, y, z: F.cast(x, np.float64),
}
OF_ONE = (
    *(
        "abs",
        "ceil",
        "cos",
        "erf",
        "exp",
        "expm1",
        "floor",
        "log",
        "log1p",
        "round",
        "rsqrt",
        "sign",
        "sin",
        "sqrt",
    ),
    *("square", "tanh", "elu", "gelu", "glu", "hardswish", "leaky_relu", "logsigmoid", "mish", "relu"),
    *("relu6", "sigmoid", "silu", "softplus", "hardsigmoid", "normalize"),
)


def outcome(here, function):
    """(shape, dtype) of the result and of the gradients."""
    rng = np.random.default_rng(0)
    with device.use(here):
        shardrt.manual_seed(1)
        values = (rng.uniform(0.1, 0.9, shape).astype(np.float32) for shape in SHAPES)
        leaves = [Tensor(numbers, requires_grad=True) for numbers in values]
        result = function(*leaves)
        F.sum(result).backward()
        assert device.of(result.data) is here
        arrays = [result.data, *(leaf.grad for leaf in leaves)]
        return [None if array is None else (array.shape, array.dtype.name) for array in arrays]


@pytest.mark.parametrize("name", [*OPS, *OF_ONE])
def test_results_and_gradients_have_the_shapes_and_types_of_the_cpu(name):
    cpu, simulated = device.get("cpu"), SimulatedDevice(CPUDevice)
    op = OPS.get(name) or (lambda x, y, z: getattr(F, name)(x))
    assert outcome(simulated, op) == outcome(cpu, op)
