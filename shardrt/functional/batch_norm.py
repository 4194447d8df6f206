"""Batch norm: each channel over its deviation in the batch, that of one rank or of all of them."""

from typing import Any

import numpy as np

from shardrt import autograd, dtypes
from shardrt.autograd import Function, Variable, contiguous
from shardrt.comm import Communicator
from shardrt.functional._arrays import check_floats, empty, empty_exact, empty_like, kernels, tensor
from shardrt.functional._types import Array, Tensor
from shardrt.functional.cast import cast
from shardrt.functional.collective import gathered, summed


class BatchNorm(Function):
    """In training the statistics are the batch's. With a communicator both directions sum over its ranks.

    The gradient is of the sum of the ranks' losses: a rank's input moves the statistics that all ranks
    use, so the means in dx are over all of them; dweight and dbias are this rank's summand, as every
    parameter's gradient is until it is reduced.
    """

    handles = (1, 2)

    def forward(
        self,
        x: Array,
        weight: Variable,
        bias: Variable,
        running: tuple[Array, Array],
        training: bool,
        momentum: float,
        eps: float,
        communicator: Communicator | None,
    ) -> Array:
        planes, y = _planes(x), empty_like(x)
        if training:
            mean, squares, count = _statistics(planes, communicator)
            variance = squares / count
            if autograd.running() is None:  # in a backward it is run again, and has counted already
                running[0][...] += momentum * (mean - running[0])
                running[1][...] += momentum * (squares / (count - 1) - running[1])
        else:
            (mean, variance), count = running, None
        rstd = 1 / np.sqrt(variance + variance.dtype.type(eps))
        weight_data, bias_data = contiguous(weight.lent()), contiguous(bias.data)
        kernels().batch_norm.forward(planes, mean, rstd, weight_data, bias_data, _planes(y))
        self.saved = (x, weight, bias, mean.copy(), rstd, count, communicator)
        return y

    def backward(self, dy: Array) -> tuple:
        x, weight, bias, mean, rstd, count, communicator = self.saved
        planes, upper = _planes(x), _planes(dy)
        sums = empty_exact((2, mean.size), x)
        sums[...] = 0
        if any(self.needs[1:3]) or count is not None:
            kernels().batch_norm.backward_sums(upper, planes, mean, rstd, *sums)
        tokens = [
            _add(handle, total) if needed else None
            for handle, total, needed in zip((weight, bias), sums, self.needs[1:3], strict=True)
        ]
        dx = None
        if count is None:
            sums = sums * 0
        else:
            sums = (sums if communicator is None else summed(sums, communicator, "batch_norm")) / count
        if self.needs[0]:
            dx = empty_like(x)
            data = contiguous(weight.lent())
            kernels().batch_norm.backward_input(upper, planes, mean, rstd, data, *sums, _planes(dx))
        return dx, *tokens, None, None, None, None, None


def batch_norm(
    x: "Tensor",
    running_mean: Array | None,
    running_var: Array | None,
    weight: "Tensor | None" = None,
    bias: "Tensor | None" = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    communicator: Communicator | None = None,
) -> "Tensor":
    """Each channel minus its mean, over its deviation, times weight plus bias (Ioffe, Szegedy, 2015).

    All arrays are float32, or all float64, or x has 16 bits and the parameters are float32.

    Args:
        x: (batch, channels, ...).
        running_mean, running_var: (channels,), or None in training.
        weight: (channels,); 1 if None.
        bias: (channels,); 0 if None.
        training: mean and variance are the batch's, and the running ones, arrays, tensors or None, move
            towards them by `momentum` (the variance unbiased); else the running ones are used.
        communicator: the statistics are those of the batches of all its ranks, which all call forward, and
            backward, in the same order.

    Raises:
        ValueError: for sizes that don't fit, for one number per channel in training and for no running ones
            elsewhere.
        TypeError: for other dtypes.
    """
    x = tensor(x)
    if x.ndim < 2 or x.size < 1:
        raise ValueError(f"batch_norm: x must be (batch, channels, ...) and not empty, got {x.shape}")
    if not training and (running_mean is None or running_var is None):
        raise ValueError("batch_norm: pass running_mean and running_var, or training=True")
    own = dtypes.exact(x.value_dtype) if weight is None else tensor(weight).value_dtype
    weight, bias, running_mean, running_var = (
        _filled(x.shape[1:2], own, value) if given is None else given
        for given, value in ((weight, 1), (bias, 0), (running_mean, 0), (running_var, 1))
    )
    weight, bias = tensor(weight), tensor(bias)
    running_mean, running_var = tensor(running_mean).data, tensor(running_var).data
    arrays = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    for name, array in arrays.items():
        if array.shape != x.shape[1:2]:
            raise ValueError(f"batch_norm: {name} must be {x.shape[1:2]} for x {x.shape}, got {array.shape}")
    if dtypes.low(x.dtype) and not dtypes.low(weight.value_dtype):
        x32 = cast(x, weight.value_dtype.name)
        args = running_mean, running_var, weight, bias, training, momentum, eps, communicator
        return cast(batch_norm(x32, *args), x.dtype.name)
    check_floats("batch_norm", x=x, weight=weight, bias=bias)
    ranks = 1 if communicator is None else communicator.size
    if training and x.size // x.shape[1] * ranks < 2:
        raise ValueError(f"batch_norm: training=True needs more than one value per channel, got x {x.shape}")
    communicator = communicator if ranks > 1 else None
    running = running_mean, running_var
    return BatchNorm.apply(x, weight, bias, running, bool(training), momentum, eps, communicator)


def _filled(shape: tuple[int, ...], dtype: Any, value: float) -> Array:
    array = empty(shape, dtype)
    array.fill(value)
    return array


def _statistics(x: Array, communicator: Communicator | None) -> tuple[Array, Array, Any]:
    """(mean, sum of squared deviations, numbers per channel) of this rank's batch or of all ranks'."""
    mean, squares = empty_exact((2, x.shape[1]), x)
    kernels().batch_norm.statistics(x, mean, squares)
    count = x.size // x.shape[1]
    if communicator is None:
        return mean, squares, count
    own = empty_exact((1, 2 * mean.size + 1), x)
    own[0, : mean.size], own[0, mean.size : -1], own[0, -1] = mean, squares, count
    everyone = gathered(own, communicator, tag="batch_norm")
    means, squares, counts = everyone[:, : mean.size], everyone[:, mean.size : -1], everyone[:, -1:]
    count = counts.sum(axis=0)
    mean = (counts * means).sum(axis=0) / count
    return mean, (squares + counts * (means - mean) ** 2).sum(axis=0), count


def _add(handle: Variable, total: Array) -> Any:
    """Put a gradient where the handle's belongs; gives the token."""
    target, accumulate, token = handle.gradient_target()
    if accumulate:
        target += total
    else:
        target[...] = total
    return token


def _planes(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1)
