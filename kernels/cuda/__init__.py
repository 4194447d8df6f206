"""Kernels of the GPU: CUDA C++ compiled at run time, matmuls by cublasLt. One module per op.

The same functions as kernels/cpu, with the same signatures (tests/cuda/test_signatures.py). Shapes and
meaning are said there; docstrings here say what else holds on a GPU. No module here needs CuPy or a GPU to be
imported; the first launch does.
"""

from collections.abc import Callable

from shardrt.kernels.cuda import (
    _compile,
    _launch,
    activation,
    adamw,
    adamw8bit,
    attention,
    batch_norm,
    blockwise,
    cast,
    conv2d,
    cross_entropy,
    dropout,
    elementwise,
    embedding,
    float8,
    grouped,
    layer_norm,
    linear,
    lion,
    lion8bit,
    matmul,
    muon,
    philox,
    pool,
    quantise,
    reduce,
    rms_norm,
    rotary,
    route,
    sgd,
    softmax,
    stochastic,
    swiglu,
)

__all__ = ["warm_up"]


def _of_cupy() -> tuple[Callable[[], int], Callable[[], _launch.Backend]]:
    from shardrt.kernels.cuda import _cupy  # at the first launch: it needs CuPy and a GPU

    return _cupy.current_gpu, _cupy.CuPyBackend


_launch.register(_of_cupy)


def forget_stream(handle: int) -> None:
    """Free this GPU's data for a stream that no longer exists."""
    _launch.backend().forget_stream(handle)


def warm_up() -> None:
    """Compile what training in float32 and bfloat16 will launch; a moment if the cache on disk has it."""
    wanted = [(f, d) for f in _compile.files() for d in _compile.variants(f, ("float", "__nv_bfloat16"))]
    _launch.backend().prepare(wanted)
