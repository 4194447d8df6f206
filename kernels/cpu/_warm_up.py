"""Compiles the kernels of training, by calling them on tiny arrays.

In float32, and where products of bfloat16 are computed as such, in that too. One rank of a node does this
first; the others then find everything in the cache. An empty file there says that all of it is: then nobody
calls anything, and each rank loads what it uses. Kernels of images are left out: what a convolution needs
depends on its sizes.
"""

import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numba
import numpy as np
from numba.core.registry import cpu_target

from shardrt.kernels import cpu, onednn
from shardrt.kernels.cpu._jit import stamp


def warm_up() -> None:
    """Have every kernel that training needs in the cache."""
    done = _mark()
    if not done.exists():
        call_all()
        with suppress(OSError):  # a folder that cannot be written holds none of them either
            done.touch()


def compiled() -> bool:
    """Whether `warm_up` would find every kernel in the cache."""
    return _mark().exists()


def _mark() -> Path:
    """The file that says that these sources are compiled, by this Numba, for this Python and processor."""
    about = [stamp(path) for path in sorted(Path(__file__).parent.glob("*.py"))]
    by = numba.__version__, sys.implementation.cache_tag
    processor = cpu_target.target_context.codegen().magic_tuple(), onednn.computes_bf16()
    key = sha256(repr((about, by, processor)).encode()).hexdigest()[:16]
    return Path(cpu.adamw._step._cache.cache_path) / f"all-{key}"


def call_all() -> None:
    """Call every kernel once in float32; in bfloat16 those that read or write its bits here."""
    _warm_up_float32()
    if onednn.computes_bf16():
        _warm_up_bits()


def _warm_up_float32() -> None:
    x, y, z = np.ones((3, 2, 4), np.float32)
    weight, bias, row = np.ones((3, 4), np.float32)
    one, two = np.ones((2, 2), np.float32)
    index = np.zeros(2, np.int64)
    for name in ("gelu_tanh", "gelu_erf", "silu"):
        getattr(cpu.activation, f"{name}_forward")(x.reshape(-1), y.reshape(-1))
        getattr(cpu.activation, f"{name}_backward")(z.reshape(-1), x.reshape(-1), y.reshape(-1))
    cpu.layer_norm.forward(x, weight, bias, y, one, two, 1e-5)
    cpu.layer_norm.backward(z, x, weight, one, two, y, row, bias, False)
    cpu.rms_norm.forward(x, weight, y, one, 1e-5)
    cpu.rms_norm.backward(z, x, weight, one, y, row, False)
    cpu.rotary.forward(x, one[:, None], two[:, None], y, 1)
    cpu.swiglu.forward(x, np.empty((2, 2), np.float32))
    cpu.swiglu.backward(np.ones((2, 2), np.float32), x, y)
    cpu.softmax.forward(x, y)
    cpu.softmax.backward(z, x, y)
    cpu.cross_entropy.forward(x, index, one, two, -100)
    cpu.cross_entropy.join(np.ones((1, 2, 2), np.float32), index, one, two, -100)
    cpu.cross_entropy.backward(x, index, two, y, None, -100)
    cpu.cross_entropy.backward(y, index, two, y, None, -100)
    cpu.cross_entropy.forward_in_place(y, index, one, two, -100)
    cpu.embedding.forward(index, x, y)
    cpu.embedding.backward(index, y, x)
    cpu.philox.uniform(row, 1, 2, 0)
    cpu.philox.normal(row, 1, 2, 0, 0.0, 1.0)
    cpu.dropout.forward(row, bias, 0.5, 1, 2, 0)
    cpu.linear.backward_bias(x, row, False)
    cpu.linear.forward_gelu(x, np.ones((4, 4), np.float32), row, y, z)
    cpu.linear.backward_gelu(x, y, z, row, False)
    chosen, copies = np.zeros((2, 2), np.int64), np.zeros(4, np.int64)
    cpu.route.top_k(x, chosen)
    cpu.route.take(x, chosen, np.empty((2, 2), np.float32))
    cpu.route.put(np.ones((2, 2), np.float32), chosen, y)
    cpu.route.order(chosen, None, 0, chosen.copy(), copies, np.empty((2, 4), np.int64))
    for weights in (None, np.ones((2, 2), np.float32)):
        cpu.route.spread(x, weights, copies, 2, np.empty((4, 4), np.float32))
        cpu.route.collect(x, weights, chosen, y)
    cpu.route.weights_backward(x, y, chosen, np.empty((2, 2), np.float32))
    bits = np.zeros(4, np.uint16)
    for kind in ("bfloat16", "float16"):
        cpu.cast.round_to(row, bias, kind)
        cpu.cast.pack(row, bits, kind)
        cpu.cast.unpack(bits, bias, kind)
    cpu.reduce.sum_into(row, [bias, weight], 1.0, False)
    cpu.reduce.sum_into(row, [bias, weight], 0.5, False)
    cpu.reduce.sum_into(row, [bias, weight, bias], 1.0, False)
    cpu.reduce.sum_packed(row, [bits], 1.0, False, "bfloat16")
    cpu.reduce.power_sums(row, 2.0)
    cpu.reduce.exact_power_sums(row, 2)
    cpu.elementwise.unscale_(row, 1.0)
    cpu.adamw.step(row, bias, weight, x[0], np.array([[0.0, 4.0, 1.0, 0.1, 0.0, 0.9, 0.99, 1e-8]]))
    cpu.lion.step(row, bias, weight, np.array([[0.0, 4.0, 1.0, 0.1, 0.9, 0.99]]))
    cpu.muon.direction(row, bias, weight, 0.9, True)
    cpu.muon.apply(row, bias, 1.0, 0.1)
    ranges = np.array([[0.0, 4.0, 1.0, 0.1, 0.0, 1.0]])
    cpu.sgd.step(row, bias, None, ranges, 0.0, False)
    cpu.sgd.step(row, bias, weight, ranges, 0.9, False)
    _update_low_bit()
    _attend(np.float32)


def _update_low_bit() -> None:
    """Optimizers whose state has 8 or 16 bits."""
    x, grad, codes, scales = (
        *np.ones((2, 16), np.float32),
        np.zeros((2, 16), np.uint8),
        np.zeros(1, np.uint16),
    )
    bits, seed = np.zeros((2, 16), np.uint16), (0.0,) * 5
    adamw, lion = (0.0, 16.0, 1.0, 0.1, 0.0, 0.9, 0.99, 1e-8), (0.0, 16.0, 1.0, 0.1, 0.9, 0.99)
    cpu.adamw8bit.step(x, grad, codes[0], scales, codes[1], scales.copy(), np.array([adamw]))
    cpu.lion8bit.step(x, grad, codes[0], scales, np.array([lion]))
    cpu.stochastic.adamw(x, grad, *bits, np.array([adamw + seed]))
    cpu.stochastic.lion(x, grad, bits[0], np.array([lion + seed]))


def _warm_up_bits() -> None:
    (x, y), row = np.ones((2, 2, 4), np.float32), np.ones(4, np.float32)
    bits, matrix = np.zeros((2, 2, 4), np.uint16), np.zeros((4, 4), np.uint16)
    cpu.embedding.forward(np.zeros(2, np.int64), bits[0], y)
    cpu.linear.forward_gelu(bits[0], matrix, row, bits[1], y)
    cpu.linear.backward_gelu(x, bits[0], bits[1], None, False)
    for out in (row, bits[1, 0]):
        cpu.activation.gelu_tanh_forward(bits[0, 0], out)
    _attend(np.uint16)


def _attend(dtype: type) -> None:
    """Attention of one head and one token. dtype: of queries, keys and values."""
    for width in (4, 32):  # by a library, and by our own matmuls
        q, lse = np.ones((1, 1, 1, width), dtype), np.empty((1, 1, 1), np.float32)
        dy, y, dq, dk, dv = np.ones((5, 1, 1, 1, width), np.float32)
        cpu.attention.forward(q, q, q, y, lse, causal=True, scale=1.0)
        cpu.attention.backward(dy, q, q, q, y, lse, dq, dk, dv, causal=True, scale=1.0)
