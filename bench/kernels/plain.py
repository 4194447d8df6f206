"""The ops as one would write them in NumPy, without kernels: each gives a tuple of arrays.

In float64 they are the truth that kernels are held against, so they are derived apart from them. NumPy's
functions pass CuPy's arrays on to CuPy.
"""

from typing import Any

import numpy as np

Array = Any
EPS = 1e-5
_ROOT = 0.7978845608028654  # sqrt(2 / pi)


# -- elementwise


def gelu(x: Array) -> tuple:
    return (0.5 * x * (1 + np.tanh(_ROOT * (x + 0.044715 * x * x * x))),)


def gelu_backward(dy: Array, x: Array) -> tuple:
    t = np.tanh(_ROOT * (x + 0.044715 * x * x * x))
    return (dy * 0.5 * (1 + t + x * (1 - t * t) * _ROOT * (1 + 0.134145 * x * x)),)


def gelu_bias_backward(dy: Array, x: Array) -> tuple:
    (dx,) = gelu_backward(dy, x)
    return dx, dx.sum(axis=0)


def silu(x: Array) -> tuple:
    return (x / (1 + np.exp(-x)),)


def silu_backward(dy: Array, x: Array) -> tuple:
    s = 1 / (1 + np.exp(-x))
    return (dy * s * (1 + x * (1 - s)),)


def relu(x: Array) -> tuple:
    return (np.maximum(x, 0),)


def relu_backward(dy: Array, x: Array) -> tuple:
    return (np.where(x > 0, dy, 0),)


def swiglu(x: Array) -> tuple:
    a, b = _halves(x)
    return (a / (1 + np.exp(-a)) * b,)


def swiglu_backward(dy: Array, x: Array) -> tuple:
    a, b = _halves(x)
    return (np.concatenate([silu_backward(dy * b, a)[0], dy * silu(a)[0]], axis=1),)


def _halves(x: Array) -> tuple:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


# -- rows


def layer_norm(x: Array, weight: Array, bias: Array) -> tuple:
    normal, _ = _normal(x)
    return (normal * weight + bias,)


def layer_norm_backward(dy: Array, x: Array, weight: Array, bias: Array) -> tuple:
    normal, deviation = _normal(x)
    g = dy * weight
    dx = g - g.mean(axis=1, keepdims=True) - normal * (g * normal).mean(axis=1, keepdims=True)
    return dx / deviation, (dy * normal).sum(axis=0), dy.sum(axis=0)


def add_layer_norm(x: Array, added: Array, weight: Array, bias: Array) -> tuple:
    total = x + added
    return total, *layer_norm(total, weight, bias)


def add_layer_norm_backward(dtotal: Array, dy: Array, total: Array, weight: Array, bias: Array) -> tuple:
    dx, *rest = layer_norm_backward(dy, total, weight, bias)
    return dx + dtotal, *rest


def rms_norm(x: Array, weight: Array) -> tuple:
    return (x / _root_mean_square(x) * weight,)


def rms_norm_backward(dy: Array, x: Array, weight: Array) -> tuple:
    size = _root_mean_square(x)
    normal, g = x / size, dy * weight
    dx = (g - normal * (g * normal).mean(axis=1, keepdims=True)) / size
    return dx, (dy * normal).sum(axis=0)


def add_rms_norm(x: Array, added: Array, weight: Array) -> tuple:
    total = x + added
    return total, *rms_norm(total, weight)


def add_rms_norm_backward(dtotal: Array, dy: Array, total: Array, weight: Array) -> tuple:
    dx, dweight = rms_norm_backward(dy, total, weight)
    return dx + dtotal, dweight


def softmax(x: Array) -> tuple:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return (e / e.sum(axis=-1, keepdims=True),)


def softmax_backward(dy: Array, y: Array) -> tuple:
    return (y * (dy - (dy * y).sum(axis=-1, keepdims=True)),)


def rotary(x: Array, cos: Array, sin: Array) -> tuple:
    """x (batch, time, heads, head_dim); cos, sin (time, 1, head_dim / 2)."""
    a, b = _halves(x)
    return (np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1),)


def rotary_backward(dy: Array, cos: Array, sin: Array) -> tuple:
    return rotary(dy, cos, -sin)


def cross_entropy(logits: Array, targets: Array) -> tuple:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return (np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(targets)), targets],)


def cross_entropy_backward(logits: Array, targets: Array) -> tuple:
    """Of the mean over the rows."""
    (dlogits,) = softmax(logits)
    dlogits[np.arange(len(targets)), targets] -= 1
    return (dlogits / len(targets),)


def linear_cross_entropy(x: Array, weight: Array, targets: Array) -> tuple:
    """Loss, mean over the rows, and both gradients."""
    logits = x @ weight.T
    (dlogits,) = cross_entropy_backward(logits, targets)
    return cross_entropy(logits, targets)[0].mean().reshape(1), dlogits @ weight, dlogits.T @ x


def embedding(indices: Array, table: Array) -> tuple:
    return (table[indices],)


def embedding_backward(dy: Array, indices: Array, table: Array) -> tuple:
    dtable = np.zeros_like(table)
    np.add.at(dtable, indices, dy)
    return (dtable,)


def _normal(x: Array) -> tuple:
    centred = x - x.mean(axis=1, keepdims=True)
    deviation = np.sqrt((centred * centred).mean(axis=1, keepdims=True) + EPS)
    return centred / deviation, deviation


def _root_mean_square(x: Array) -> Array:
    return np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS)


# -- products


def matmul(a: Array, b: Array) -> tuple:
    return (a @ b,)


def matmul_backward(dy: Array, a: Array, b: Array) -> tuple:
    return dy @ b.T, a.T @ dy


def linear(x: Array, weight: Array, bias: Array) -> tuple:
    return (x @ weight.T + bias,)


def linear_backward(dy: Array, x: Array, weight: Array, bias: Array) -> tuple:
    return dy @ weight, dy.T @ x, dy.sum(axis=0)


def linear_gelu(x: Array, weight: Array, bias: Array) -> tuple:
    return gelu(*linear(x, weight, bias))


def linear_gelu_backward(dy: Array, x: Array, weight: Array, bias: Array) -> tuple:
    (dinner,) = gelu_backward(dy, *linear(x, weight, bias))
    return linear_backward(dinner, x, weight, bias)


def attention(q: Array, k: Array, v: Array, causal: bool) -> tuple:
    """q, k, v (batch, heads, time, head_dim); fewer heads of k and v are those of several of q in a row."""
    group = q.shape[1] // k.shape[1]
    return (_probabilities(q, k, causal) @ v.repeat(group, axis=1),)


def attention_backward(dy: Array, q: Array, k: Array, v: Array, causal: bool) -> tuple:
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    p = _probabilities(q, k, causal)
    (dscores,) = softmax_backward(dy @ v.repeat(group, axis=1).swapaxes(2, 3), p)
    dq = dscores @ k.repeat(group, axis=1) * scale
    grouped = (q.shape[0], k.shape[1], group, *k.shape[2:])
    dk, dv = dscores.swapaxes(2, 3) @ q * scale, p.swapaxes(2, 3) @ dy
    return dq, dk.reshape(grouped).sum(axis=2), dv.reshape(grouped).sum(axis=2)


def _probabilities(q: Array, k: Array, causal: bool) -> Array:
    scores = q @ k.repeat(q.shape[1] // k.shape[1], axis=1).swapaxes(2, 3) * q.shape[-1] ** -0.5
    if causal:
        scores[..., ~np.tri(*scores.shape[2:], dtype=bool, like=scores)] = -np.inf
    return softmax(scores)[0]


# -- images


def conv2d(x: Array, weight: Array, stride: int, padding: int, groups: int) -> tuple:
    outputs, channels, *window = weight.shape
    patches = _patches(_padded(x, padding), window, stride)
    batch, _, high, wide = patches.shape[:4]
    patches = patches.reshape(batch, groups, channels, high, wide, *window)
    columns = patches.transpose(1, 0, 3, 4, 2, 5, 6).reshape(groups, batch * high * wide, -1)
    matrix = weight.reshape(groups, outputs // groups, -1)
    y = (columns @ matrix.swapaxes(1, 2)).reshape(groups, batch, high, wide, outputs // groups)
    return (np.ascontiguousarray(y.transpose(1, 0, 4, 2, 3)).reshape(batch, outputs, high, wide),)


def conv2d_input(dy: Array, x: Array, weight: Array, stride: int, padding: int, groups: int) -> tuple:
    outputs, channels, rows, columns = weight.shape
    batch, _, high, wide = dy.shape
    upper = dy.reshape(batch, groups, outputs // groups, high * wide)
    matrix = weight.reshape(1, groups, outputs // groups, -1)
    parts = (matrix.swapaxes(2, 3) @ upper).reshape(batch, x.shape[1], rows, columns, high, wide)
    dx = np.zeros_like(_padded(x, padding))
    for i in range(rows):
        for j in range(columns):
            dx[:, :, i : i + high * stride : stride, j : j + wide * stride : stride] += parts[:, :, i, j]
    return (dx[:, :, padding : padding + x.shape[2], padding : padding + x.shape[3]],)


def conv2d_weight(dy: Array, x: Array, weight: Array, stride: int, padding: int, groups: int) -> tuple:
    outputs, channels, *window = weight.shape
    patches = _patches(_padded(x, padding), window, stride)
    batch, _, high, wide = patches.shape[:4]
    patches = patches.reshape(batch, groups, channels, high, wide, *window)
    columns = patches.transpose(1, 0, 3, 4, 2, 5, 6).reshape(groups, batch * high * wide, -1)
    upper = dy.reshape(batch, groups, outputs // groups, high * wide).transpose(1, 2, 0, 3)
    return ((upper.reshape(groups, outputs // groups, -1) @ columns).reshape(weight.shape),)


def batch_norm(x: Array, weight: Array, bias: Array) -> tuple:
    """x (batch, channels, height, width), by the statistics of the batch."""
    y, _ = _normal(_channels(x))
    return (_images(y * weight[:, None] + bias[:, None], x.shape),)


def batch_norm_backward(dy: Array, x: Array, weight: Array, bias: Array) -> tuple:
    normal, deviation = _normal(_channels(x))
    upper = _channels(dy)
    dweight, dbias, count = (upper * normal).sum(axis=1), upper.sum(axis=1), upper.shape[1]
    dx = (upper - dbias[:, None] / count - normal * dweight[:, None] / count) / deviation
    return _images(dx * weight[:, None], x.shape), dweight, dbias


def max_pool(x: Array, window: int, stride: int, padding: int) -> tuple:
    return (_patches(_padded(x, padding, -np.inf), (window, window), stride).max(axis=(4, 5)),)


def max_pool_backward(dy: Array, x: Array, window: int, stride: int, padding: int) -> tuple:
    padded = _padded(x, padding, -np.inf)
    patches = _patches(padded, (window, window), stride)
    first = patches.reshape(*patches.shape[:4], -1).argmax(axis=4)
    dx, (high, wide) = np.zeros_like(padded), dy.shape[2:]
    for i in range(window):
        for j in range(window):
            mine = np.where(first == i * window + j, dy, 0)
            dx[:, :, i : i + high * stride : stride, j : j + wide * stride : stride] += mine
    return (dx[:, :, padding : padding + x.shape[2], padding : padding + x.shape[3]],)


def mean_pool(x: Array, window: int, stride: int, padding: int) -> tuple:
    return (_patches(_padded(x, padding), (window, window), stride).mean(axis=(4, 5)),)


def mean_pool_backward(dy: Array, x: Array, window: int, stride: int, padding: int) -> tuple:
    dx, (high, wide) = np.zeros_like(_padded(x, padding)), dy.shape[2:]
    share = dy / window**2
    for i in range(window):
        for j in range(window):
            dx[:, :, i : i + high * stride : stride, j : j + wide * stride : stride] += share
    return (dx[:, :, padding : padding + x.shape[2], padding : padding + x.shape[3]],)


def _padded(x: Array, padding: int, number: float = 0.0) -> Array:
    edges = ((0, 0), (0, 0), (padding, padding), (padding, padding))
    return np.pad(x, edges, constant_values=number)


def _patches(x: Array, window: Any, stride: int) -> Array:
    """(batch, channels, high, wide, rows, columns), a view."""
    views = np.lib.stride_tricks.sliding_window_view(x, tuple(window), axis=(2, 3))
    return views[:, :, ::stride, ::stride]


def _channels(x: Array) -> Array:
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def _images(x: Array, shape: tuple[int, ...]) -> Array:
    return x.reshape(shape[1], shape[0], *shape[2:]).swapaxes(0, 1)


# -- flat


def pack(x: Array, kind: str) -> tuple:
    """The bits of a 16-bit type."""
    x = x.astype(np.float32)
    if kind == "float16":
        return (x.astype(np.float16).view(np.uint16),)
    bits = x.view(np.uint32)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16),)


def unpack(bits: Array, kind: str) -> tuple:
    if kind == "float16":
        return (bits.view(np.float16).astype(np.float32),)
    return ((bits.astype(np.uint32) << 16).view(np.float32),)


def adamw(
    param: Array, grad: Array, lr: float, decay: float, beta1: float, beta2: float, eps: float
) -> tuple:
    """The first step."""
    m, v = (1 - beta1) * grad, (1 - beta2) * grad * grad
    deviation = np.sqrt(v / (1 - beta2)) + eps
    return param * (1 - lr * decay) - lr * (m / (1 - beta1)) / deviation, m, v


def lion(param: Array, grad: Array, lr: float, decay: float, beta1: float, beta2: float) -> tuple:
    """The first step."""
    return param * (1 - lr * decay) - lr * np.sign((1 - beta1) * grad), (1 - beta2) * grad


def sgd(param: Array, grad: Array, lr: float, decay: float) -> tuple:
    """The first step with momentum."""
    buffer = grad + decay * param
    return param - lr * buffer, buffer
