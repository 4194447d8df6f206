"""NumPy's functions on tensors: np.exp(x) is F.exp(x), so that no gradient is lost without a word."""

from typing import Any

import numpy as np

from shardrt import autograd, dtypes
from shardrt.autograd import Variable
from shardrt.functional import elementwise, unary
from shardrt.functional.matmul import matmul

_OWN = {
    "add": elementwise.add,
    "subtract": elementwise.sub,
    "multiply": elementwise.mul,
    "divide": elementwise.div,
    "true_divide": elementwise.div,  # CuPy's name
    "power": elementwise.pow,
    "maximum": elementwise.maximum,
    "minimum": elementwise.minimum,
    "negative": elementwise.neg,
    "matmul": matmul,
    "absolute": unary.abs,
    **{name: getattr(unary, name) for name in "exp expm1 log log1p sqrt square sin cos tanh".split()},
}


def applied(ufunc: Any, method: str, arguments: tuple, options: dict[str, Any]) -> Any:
    """The result of a ufunc of NumPy or CuPy for `arguments`, of which one is a tensor.

    A tensor, if the function is one of shardrt.functional and there are no options; else an array.

    Raises:
        TypeError: where a gradient would be lost, and for a tensor as `out`.
    """
    name = ufunc.__name__ if isinstance(ufunc, np.ufunc) else ufunc.name.removeprefix("cupy_")
    if method == "__call__" and not options and name in _OWN:
        return _OWN[name](*arguments)
    if any(isinstance(out, Variable) for out in _several(options.get("out"))):
        raise TypeError(f"np.{name}: `out` can't be a tensor; give its array, x.data")
    result = getattr(ufunc, method)(*(a.data if isinstance(a, Variable) else a for a in arguments), **options)
    followed = autograd.is_grad_enabled() and any(getattr(a, "requires_grad", False) for a in arguments)
    if followed and any(dtypes.floating(array.dtype) for array in _several(result)):
        raise TypeError(
            f"np.{name} would lose the gradient of a tensor: use a function of shardrt.functional, or "
            "x.numpy() where no gradient is wanted"
        )
    return result


def _several(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)
