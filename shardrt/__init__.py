"""shardrt: fully sharded data parallel training without a deep-learning framework.

`import shardrt` sets the thread counts of this rank first, then loads NumPy; Numba, MPI and the packages
checkpoint, comm, fsdp and models are loaded when they are first used.
"""

from shardrt import _environment  # isort: skip  before anything that imports NumPy
from shardrt import _kernel_cache  # isort: skip  # noqa: F401  before Numba

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from shardrt import _backends, functional, nn, optim
from shardrt.autograd import enable_grad, is_grad_enabled, no_grad
from shardrt.device.cpu import set_threads
from shardrt.kernels.determinism import are_deterministic_algorithms_enabled, use_deterministic_algorithms
from shardrt.random import manual_seed
from shardrt.tensor import Tensor

if TYPE_CHECKING:
    from shardrt import checkpoint, comm, fsdp

__all__ = [
    "Tensor",
    "__version__",
    "are_deterministic_algorithms_enabled",
    "checkpoint",
    "comm",
    "enable_grad",
    "fsdp",
    "functional",
    "is_grad_enabled",
    "manual_seed",
    "nn",
    "no_grad",
    "optim",
    "set_threads",
    "use_deterministic_algorithms",
]
__version__ = "0.1.0"

_LATER = ("checkpoint", "comm", "fsdp", "models")

del _backends, _environment


def __getattr__(name: str) -> ModuleType:
    """The packages that are loaded when they are first used: `shardrt.fsdp` after `import shardrt` alone."""
    if name in _LATER:
        return import_module(f"shardrt.{name}")
    functions = {function: f"use shardrt.functional.{function}" for function in functional.__all__}
    raise functional.elsewhere.missing_from(__name__, name, functional.elsewhere.TORCH | functions)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
