"""Tensor: an array that remembers how it was made. Each operator and method is one call of functional."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from shardrt import autograd, device, dtypes
from shardrt import functional as F
from shardrt.autograd import Variable
from shardrt.functional import ufunc as ufuncs
from shardrt.hooks import Hooks, RemovableHandle

__all__ = ["Tensor"]

Array = Any
Axes = int | Sequence[int] | None


class Tensor(Variable):
    """Numbers in a shape, on the current device.

    Comparisons give arrays. x += y is x = x + y, since backward may need the old values. Under no_grad, it
    changes a parameter, or a leaf that requires a gradient, in place; otherwise it is an error for these.

    Args:
        data: an array, which is not copied, or numbers in lists. Floats become float32; a float64 array stays
            as it is.
        requires_grad: whether backward puts a gradient into `grad`.
        dtype: the type to convert to.

    Raises:
        TypeError: for requires_grad with integers, and for data that are no numbers.

    Example:
        >>> from shardrt import Tensor
        >>> x = Tensor([1.0, 2.0], requires_grad=True)
        >>> (x * x).sum().backward()
        >>> x.grad
        array([2., 4.], dtype=float32)
    """

    __slots__ = ()

    def __init__(self, data: Any, requires_grad: bool = False, dtype: Any = None) -> None:
        array = _array(data, dtype)
        if requires_grad and not dtypes.floating(array.dtype):
            raise TypeError(f"Tensor: only floats can require a gradient, got {array.dtype}")
        super().__init__(array, requires_grad)

    # -- what it is

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dimension."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.data.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.data.size

    @property
    def dtype(self) -> np.dtype:
        """The type of the elements."""
        return self.data.dtype

    @property
    def value_dtype(self) -> np.dtype:
        """The dtype that an op sees: the data's, but for a parameter that is computed in another."""
        return self.data.dtype

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        values = np.array2string(self.numpy(), separator=", ", prefix="Tensor(", threshold=100)
        flag = ", requires_grad=True" if self.requires_grad else ""
        return f"Tensor({values}, dtype={self.dtype.name}{flag})"

    # -- out of the graph

    def numpy(self) -> np.ndarray:
        """Its values as a NumPy array; on the CPU the array itself, not a copy."""
        return device.current().to_numpy(self.data)

    def item(self) -> float | int | bool:
        """The one element as a Python number.

        Raises:
            ValueError: if there are more.
        """
        return self.numpy().item()

    def detach(self) -> "Tensor":
        """The same array without its past."""
        return Tensor(self.data)

    def backward(
        self, gradient: Any = None, retain_graph: bool = False, deferred: autograd.Deferral | None = None
    ) -> None:
        """Add the gradients of this tensor to the `grad` of all that it depends on; see autograd.backward."""
        if gradient is not None:
            gradient = _array(_raw(gradient), self.dtype)
        autograd.backward(self, gradient, retain_graph, deferred=deferred)

    def register_hook(self, hook: Callable[[Array], Any]) -> RemovableHandle:
        """Call hook(gradient) in each backward, when the gradient of this tensor is complete.

        The gradient is an array, as `grad` is, and must not be written to; the hook's result replaces
        it, unless None. Where nothing is recorded (no_grad, or the first run of a forward that is
        recomputed) nothing happens.

        Raises:
            RuntimeError: for a tensor that no op made, or that requires no gradient.
            ValueError: in backward, if another shape or dtype is returned.
        """
        if not autograd.is_grad_enabled():
            return RemovableHandle()
        if self.node is None or not self.requires_grad:
            what = "no op made this tensor" if self.requires_grad else "this tensor requires no gradient"
            raise RuntimeError(
                f"register_hook: {what}; a parameter has register_post_accumulate_grad_hook, and x * 1 is "
                "made by an op"
            )
        node = self.node
        if not isinstance(node.hooks, Hooks):
            node.hooks = Hooks()
        return node.hooks.add((self.index, partial(_hooked, autograd.describe(node), hook)))

    def retain_grad(self) -> None:
        """Have backward put this tensor's gradient into `grad`, as a leaf's. Errors as register_hook."""
        if self.node is None and self.requires_grad:
            return
        alive = weakref.ref(self)

        def keep(gradient: Array) -> None:
            tensor = alive()
            if tensor is not None:
                tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient

        self.register_hook(keep)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *arguments: Any, **options: Any) -> Any:
        """NumPy's functions, np.exp(tensor), and its operators, array + tensor; see functional.ufunc."""
        return ufuncs.applied(ufunc, method, arguments, options)

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *arguments: Any, **options: Any) -> Any:
        return ufuncs.applied(kernel, "__call__", arguments, options)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.data.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple:
        return self.data.__dlpack_device__()

    def __getattr__(self, name: str) -> Any:
        raise F.elsewhere.missing(self, name, F.elsewhere.TENSOR)

    def __float__(self) -> float:
        return float(self.item())

    def __format__(self, spec: str) -> str:
        """A number's, where there is one element and a format is asked for: f"{loss:.4f}"."""
        return format(self.item(), spec) if spec and self.size == 1 else format(repr(self), spec)

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.data)

    # -- arithmetic

    def __add__(self, other: Any) -> "Tensor":
        return F.add(self, other)

    def __radd__(self, other: Any) -> "Tensor":
        return F.add(other, self)

    def __sub__(self, other: Any) -> "Tensor":
        return F.sub(self, other)

    def __rsub__(self, other: Any) -> "Tensor":
        return F.sub(other, self)

    def __mul__(self, other: Any) -> "Tensor":
        return F.mul(self, other)

    def __rmul__(self, other: Any) -> "Tensor":
        return F.mul(other, self)

    def __truediv__(self, other: Any) -> "Tensor":
        return F.div(self, other)

    def __rtruediv__(self, other: Any) -> "Tensor":
        return F.div(other, self)

    def __matmul__(self, other: Any) -> "Tensor":
        return F.matmul(self, other)

    def __rmatmul__(self, other: Any) -> "Tensor":
        return F.matmul(other, self)

    def __pow__(self, exponent: Any) -> "Tensor":
        return F.pow(self, exponent)

    def __rpow__(self, base: Any) -> "Tensor":
        return F.pow(base, self)

    def __neg__(self) -> "Tensor":
        return F.neg(self)

    def __pos__(self) -> "Tensor":
        return self

    def __abs__(self) -> "Tensor":
        return F.abs(self)

    # -- functions as methods: x.exp() is F.exp(x)

    abs = F.abs
    argmax = F.argmax
    argmin = F.argmin
    argsort = F.argsort
    ceil = F.ceil
    chunk = F.chunk
    clamp = F.clamp
    cos = F.cos
    cumsum = F.cumsum
    erf = F.erf
    exp = F.exp
    expm1 = F.expm1
    flatten = F.flatten
    flip = F.flip
    floor = F.floor
    gather = F.gather
    index_add = F.index_add
    index_select = F.index_select
    log = F.log
    log1p = F.log1p
    log_softmax = F.log_softmax
    logsumexp = F.logsumexp
    masked_fill = F.masked_fill
    masked_scatter = F.masked_scatter
    matmul = F.matmul
    max = F.max
    maximum = F.maximum
    mean = F.mean
    min = F.min
    minimum = F.minimum
    norm = F.norm
    pow = F.pow
    relu = F.relu
    repeat_interleave = F.repeat_interleave
    roll = F.roll
    round = F.round
    rsqrt = F.rsqrt
    scatter = F.scatter
    scatter_add = F.scatter_add
    sigmoid = F.sigmoid
    sign = F.sign
    sin = F.sin
    softmax = F.softmax
    sort = F.sort
    split = F.split
    sqrt = F.sqrt
    square = F.square
    squeeze = F.squeeze
    std = F.std
    sum = F.sum
    tanh = F.tanh
    topk = F.topk
    transpose = F.transpose
    tril = F.tril
    triu = F.triu
    unbind = F.unbind
    unsqueeze = F.unsqueeze
    var = F.var

    # -- shape

    def reshape(self, *shape: Any) -> "Tensor":
        """See functional.reshape; sizes as arguments or as one tuple."""
        return F.reshape(self, _sizes(shape))

    def view(self, *shape: Any) -> "Tensor":
        """The same as reshape."""
        return F.reshape(self, _sizes(shape))

    def permute(self, *axes: Any) -> "Tensor":
        """See functional.permute; axes as arguments or as one tuple."""
        return F.permute(self, _sizes(axes))

    @property
    def T(self) -> "Tensor":
        """With its axes in reverse order."""
        return F.permute(self, range(self.ndim)[::-1])

    def expand(self, *shape: Any) -> "Tensor":
        """See functional.expand; sizes as arguments or as one tuple."""
        return F.expand(self, _sizes(shape))

    def tile(self, *counts: Any) -> "Tensor":
        """See functional.tile; counts as arguments or as one tuple."""
        return F.tile(self, _sizes(counts))

    def __getitem__(self, index: Any) -> "Tensor":
        return F.getitem(self, index)

    # -- comparison: arrays, not tensors

    def __eq__(self, other: Any) -> Array:
        return self.data == _raw(other)

    def __ne__(self, other: Any) -> Array:
        return self.data != _raw(other)

    def __lt__(self, other: Any) -> Array:
        return self.data < _raw(other)

    def __le__(self, other: Any) -> Array:
        return self.data <= _raw(other)

    def __gt__(self, other: Any) -> Array:
        return self.data > _raw(other)

    def __ge__(self, other: Any) -> Array:
        return self.data >= _raw(other)

    __hash__ = object.__hash__

    # -- with assignment

    changed_in_place = False  # a parameter is, also one that is not trained

    def __iadd__(self, other: Any) -> "Tensor":
        return self._assigned("+=", F.add, np.add, other)

    def __isub__(self, other: Any) -> "Tensor":
        return self._assigned("-=", F.sub, np.subtract, other)

    def __imul__(self, other: Any) -> "Tensor":
        return self._assigned("*=", F.mul, np.multiply, other)

    def __itruediv__(self, other: Any) -> "Tensor":
        return self._assigned("/=", F.div, np.true_divide, other)

    def _assigned(self, sign: str, op: Callable, ufunc: Callable, other: Any) -> "Tensor":
        recorded = autograd.is_grad_enabled()
        if self.changed_in_place or (self.requires_grad and self.is_leaf):
            if recorded:
                raise RuntimeError(
                    f"x {sign} y would change a parameter, which backward may need: use x = x {sign[0]} y, "
                    "or `with no_grad():`"
                )
            array = self.data
            ufunc(array, _raw(other), out=array, casting="same_kind")
            return self
        if self.requires_grad and not recorded:
            raise RuntimeError(
                f"x {sign} y under no_grad would detach x from its graph; if that is intended, use "
                f"x = x {sign[0]} y"
            )
        return op(self, other)


Variable.result_type = Tensor


def _hooked(made_by: str, hook: Callable, gradient: Array) -> Array:
    """The gradient that goes on once hook(gradient) has run."""
    with autograd.no_grad():
        changed = hook(gradient)
    if changed is None:
        return gradient
    changed = _raw(changed)
    got = getattr(changed, "shape", type(changed).__name__), getattr(changed, "dtype", None)
    if got != (gradient.shape, gradient.dtype):
        raise ValueError(
            f"a hook of a result of {made_by} must return None or an array of shape "
            f"{gradient.shape} and {gradient.dtype}, got {got[0]} {got[1] or ''}"
        )
    return changed


def _array(data: Any, dtype: Any) -> Array:
    """An array of the user's value; numbers without a dtype become float32 or integers."""
    if isinstance(data, Variable):
        raise TypeError("Tensor: data is a Tensor already; use x.detach() for one without gradients")
    own = hasattr(data, "dtype")
    array = device.current().asarray(data, dtype)
    if array.dtype.kind not in "fiub" and not dtypes.floating(array.dtype):
        raise TypeError(f"Tensor: data must be numbers, got {type(data).__name__} of {array.dtype}")
    if dtype is None and array.dtype.kind == "f" and not (own and _kept(array.dtype)):
        array = device.current().asarray(array, np.float32)
    return array


def _kept(dtype: np.dtype) -> bool:
    """Whether an array of this float type keeps it: float64, and 16 bits where the device has them."""
    if dtypes.low(dtype):
        return device.current().compute_dtype(dtype.name) == dtype
    return dtype == np.float64


def _raw(x: Any) -> Any:
    return x.data if isinstance(x, Variable) else x


def _sizes(arguments: tuple) -> tuple:
    """Sizes given one by one, or as one sequence."""
    if len(arguments) == 1 and not isinstance(arguments[0], int | np.integer):
        return tuple(arguments[0])
    return arguments
