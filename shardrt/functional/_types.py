"""The types that functions take and give, for annotations: Tensor, and Array for its elements.

tensor.py is above this room, since the methods of Tensor are these functions. This file alone refers to it,
and only for type checkers; when the program runs, the name is the class below both.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardrt.tensor import Tensor
else:
    from shardrt.autograd import Variable as Tensor

__all__ = ["Array", "Tensor"]

Array = Any  # numpy.ndarray or cupy.ndarray
