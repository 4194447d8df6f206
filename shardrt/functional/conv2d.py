"""Two-dimensional convolution and its transpose; kernels add the weight's gradient where it belongs.

The transpose runs the same kernels: its forward is convolution's gradient of the input, and its backward is
convolution's forward and its gradient of the weight, with x and dy exchanged.
"""

from shardrt import autograd
from shardrt.autograd import Function, Variable, contiguous
from shardrt.functional._arrays import check_floats, empty, for_product, kernels, operands, pair, tensor
from shardrt.functional._types import Array, Tensor
from shardrt.functional.shape import squeeze, unsqueeze

Pair = tuple[int, int]


class Conv2d(Function):
    handles = (1, 2)
    expensive = True

    def forward(
        self, x: Array, weight: Variable, bias: Variable | None, shape: tuple[int, ...], geometry: tuple
    ) -> Array:
        y = empty(shape, x.dtype)
        low, numbers = operands(x, weight)
        self.saved = (low if self.needs[1] else None, x.shape, weight, bias, geometry)
        bias_data = None if bias is None else contiguous(bias.lent())
        kernels().conv2d.forward(low, numbers, bias_data, y, *geometry)
        return y

    def resume(self, kept: tuple, x: Array, weight: Variable, bias: Variable | None, *rest: tuple) -> Array:
        self.saved = (operands(x, weight)[0] if self.needs[1] else None, x.shape, weight, bias, rest[-1])
        return kept[0]

    def backward(self, dy: Array) -> tuple:
        x, shape, weight, bias, geometry = self.saved
        dx, factor = None, dy if x is None else for_product(dy, x)
        if self.needs[0]:
            dx = empty(shape, dy.dtype)
            factor, numbers = operands(factor, weight)
            kernels().conv2d.backward_input(factor, numbers, dx, *geometry)
        into = (weight if self.needs[1] else None, bias if self.needs[2] else None)
        whole = None if into[1] is None else dy  # the bias sums the gradient before rounding
        return dx, *autograd.call_or_defer(_add_gradients, x, factor, whole, geometry, into=into), None, None


def _add_gradients(
    x: Array | None,
    factor: Array,
    dy: Array | None,
    geometry: tuple,
    weight: Variable | None,
    bias: Variable | None,
) -> tuple:
    """Of the handles given; their tokens. factor: dy as products take it; dy itself is for the bias."""
    weight_token = bias_token = None
    if weight is not None:
        dweight, accumulate, weight_token = weight.gradient_target()
        kernels().conv2d.backward_weight(x, factor, dweight, accumulate, *geometry)
    if bias is not None:
        dbias, accumulate, bias_token = bias.gradient_target()
        kernels().conv2d.backward_bias(dy, dbias, accumulate)
    return weight_token, bias_token


def conv2d(
    x: "Tensor",
    weight: "Tensor",
    bias: "Tensor | None" = None,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
) -> "Tensor":
    """Each output is the sum of a window of x times a weight (a cross-correlation, as everywhere).

    Group g of the outputs sees group g of the channels. All arrays are float32, or all float64. x is saved
    for backward only if the weight's gradient is wanted.

    Args:
        x: (batch, channels, height, width).
        weight: (outputs, channels / groups, rows, columns).
        bias: (outputs,) or None.
        stride: from window to window; one number or (vertical, horizontal), as the next two.
        padding: zeros at each border.
        dilation: distance of the elements of a window.

    Returns:
        (batch, outputs, rows of windows, columns of windows).

    Raises:
        ValueError: for sizes that don't fit.
        TypeError: for other dtypes.
    """
    x, weight, bias = tensor(x), tensor(weight), None if bias is None else tensor(bias)
    if x.ndim != 4 or min(x.shape) < 1:
        raise ValueError(f"conv2d: x must be (batch, channels, height, width), none of them 0, got {x.shape}")
    if weight.ndim != 4 or min(weight.shape) < 1:
        raise ValueError(
            f"conv2d: weight must be (outputs, channels / groups, rows, columns), got {weight.shape}"
        )
    strides, dilations = pair("conv2d", "stride", stride, 1), pair("conv2d", "dilation", dilation, 1)
    paddings = pair("conv2d", "padding", padding, 0)
    outputs, channels, *window = weight.shape
    if groups < 1 or outputs % groups or x.shape[1] != channels * groups:
        raise ValueError(f"conv2d: x {x.shape} and weight {weight.shape} do not fit with {groups} groups")
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"conv2d: bias must be ({outputs},) for weight {weight.shape}, got {bias.shape}")
    sizes = [
        (x.shape[2 + i] + 2 * paddings[i] - dilations[i] * (window[i] - 1) - 1) // strides[i] + 1
        for i in (0, 1)
    ]
    if min(sizes) < 1:
        raise ValueError(
            f"conv2d: the window {tuple(window)}, with dilation {dilations}, is larger than x {x.shape} with "
            f"padding {paddings}"
        )
    check_floats("conv2d", x=x, weight=weight, bias=bias)
    geometry = strides, paddings, dilations, int(groups)
    return Conv2d.apply(x, weight, bias, (x.shape[0], outputs, *sizes), geometry)


class ConvTranspose2d(Function):
    handles = (1, 2)
    expensive = True

    def forward(
        self, x: Array, weight: Variable, bias: Variable | None, shape: tuple[int, ...], geometry: tuple
    ) -> Array:
        y = empty(shape, x.dtype)
        low, numbers = operands(x, weight)
        self.saved = (low if self.needs[1] else None, x.shape, weight, bias, geometry)
        kernels().conv2d.backward_input(low, numbers, y, *geometry)
        if bias is not None:
            y += contiguous(bias.lent())[:, None, None]
        return y

    resume = Conv2d.resume

    def backward(self, dy: Array) -> tuple:
        x, shape, weight, bias, geometry = self.saved
        dx, factor = None, dy if x is None else for_product(dy, x)
        if self.needs[0]:
            dx = empty(shape, dy.dtype)
            factor, numbers = operands(factor, weight)
            kernels().conv2d.forward(factor, numbers, None, dx, *geometry)
        into = (weight if self.needs[1] else None, bias if self.needs[2] else None)
        whole = None if into[1] is None else dy  # as in Conv2d
        return dx, *autograd.call_or_defer(_add_gradients, factor, x, whole, geometry, into=into), None, None


def conv_transpose2d(
    x: "Tensor",
    weight: "Tensor",
    bias: "Tensor | None" = None,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    output_padding: int | Pair = 0,
    groups: int = 1,
    dilation: int | Pair = 1,
) -> "Tensor":
    """Each element of x times a weight, added up in windows of the result: conv2d's gradient of its input.

    All float32 or all float64.

    Args:
        x: (batch, channels, height, width).
        weight: (channels, outputs / groups, rows, columns).
        bias: (outputs,) or None.
        stride: from window to window.
        padding: width removed at each border.
        output_padding: rows and columns more at the end, fewer than `stride`.

    Returns:
        (batch, outputs, (height - 1) * stride - 2 * padding + dilation * (rows - 1) + output_padding + 1,
        ...).

    Raises:
        ValueError: for sizes that don't fit.
        TypeError: for other dtypes.
    """
    op = "conv_transpose2d"
    x, weight, bias = tensor(x), tensor(weight), None if bias is None else tensor(bias)
    if x.ndim != 4 or min(x.shape) < 1:
        raise ValueError(f"{op}: x must be (batch, channels, height, width), none of them 0, got {x.shape}")
    if weight.ndim != 4 or min(weight.shape) < 1:
        raise ValueError(
            f"{op}: weight must be (channels, outputs / groups, rows, columns), got {weight.shape}"
        )
    strides, dilations = pair(op, "stride", stride, 1), pair(op, "dilation", dilation, 1)
    paddings, more = pair(op, "padding", padding, 0), pair(op, "output_padding", output_padding, 0)
    channels, outputs, *window = weight.shape
    if groups < 1 or channels % groups or x.shape[1] != channels:
        raise ValueError(f"{op}: x {x.shape} and weight {weight.shape} do not fit with {groups} groups")
    outputs *= groups
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"{op}: bias must be ({outputs},) for weight {weight.shape}, got {bias.shape}")
    if more[0] >= strides[0] or more[1] >= strides[1]:
        raise ValueError(f"{op}: output_padding {more} must be smaller than stride {strides}")
    sizes = [
        (x.shape[2 + i] - 1) * strides[i] - 2 * paddings[i] + dilations[i] * (window[i] - 1) + more[i] + 1
        for i in (0, 1)
    ]
    if min(sizes) < 1:
        raise ValueError(f"{op}: padding {paddings} leaves nothing of x {x.shape} by weight {weight.shape}")
    check_floats(op, x=x, weight=weight, bias=bias)
    geometry = strides, paddings, dilations, int(groups)
    return ConvTranspose2d.apply(x, weight, bias, (x.shape[0], outputs, *sizes), geometry)


def conv1d(
    x: "Tensor",
    weight: "Tensor",
    bias: "Tensor | None" = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> "Tensor":
    """conv2d along one axis: x (batch, channels, length), weight (outputs, channels / groups, width)."""
    x, weight = tensor(x), tensor(weight)
    if x.ndim != 3 or weight.ndim != 3:
        raise ValueError(
            "conv1d: x must be (batch, channels, length) and weight (outputs, channels / groups, width), got "
            f"{x.shape} and {weight.shape}"
        )
    x, weight = unsqueeze(x, 2), unsqueeze(weight, 2)
    geometry = (1, stride), (0, padding), (1, dilation), groups
    return squeeze(conv2d(x, weight, bias, *geometry), 2)
