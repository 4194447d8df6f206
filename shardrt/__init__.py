"""shardrt: fully sharded data parallel training without a deep-learning framework.

`import shardrt` sets the thread counts of this rank first, then loads NumPy; Numba, MPI and the rest are
loaded when they are first used.
"""

from shardrt import _environment  # isort: skip  before anything that imports NumPy

from shardrt import functional, nn, optim
from shardrt.autograd import enable_grad, is_grad_enabled, no_grad
from shardrt.device import set_threads
from shardrt.random import manual_seed
from shardrt.tensor import Tensor

__all__ = [
    "Tensor",
    "enable_grad",
    "functional",
    "is_grad_enabled",
    "manual_seed",
    "nn",
    "no_grad",
    "optim",
    "set_threads",
]
__version__ = "0.1.0"

del _environment
