"""Convolution where each group has one input channel: plane by plane, on rows of pixels. See conv2d.py.

Output plane o reads input plane o // (outputs / channels). A tap shifts the rows that it multiplies.
"""

from shardrt.kernels.cpu._jit import fused, reordered


@fused
def _inside(size, outputs, tap, stride, padding, dilation):
    """(first, one past the last output whose tap lies inside, where it lies for output 0)."""
    shift = tap * dilation - padding
    first = max(0, -(shift // stride))
    return first, max(first, min(outputs, (size - 1 - shift) // stride + 1)), shift


@fused
def forward(start, stop, x, weight, y, stride, padding, dilation):
    """Planes [start, stop) of y."""
    outputs = weight.shape[0]
    each = outputs // x.shape[1]
    for at in range(start, stop):
        n, o = at // outputs, at % outputs
        plane, out = x[n, o // each], y[n, o]
        out[:] = 0
        for i in range(weight.shape[2]):
            top, bottom, down = _inside(plane.shape[0], out.shape[0], i, stride[0], padding[0], dilation[0])
            for j in range(weight.shape[3]):
                left, right, across = _inside(
                    plane.shape[1], out.shape[1], j, stride[1], padding[1], dilation[1]
                )
                factor = weight[o, 0, i, j]
                for row in range(top, bottom):
                    line, to = plane[row * stride[0] + down], out[row, left:right]
                    line = line[left * stride[1] + across :]
                    if stride[1] == 1:
                        for k in range(to.size):
                            to[k] += factor * line[k]
                    else:
                        for k in range(to.size):
                            to[k] += factor * line[k * stride[1]]


@fused
def backward_input(start, stop, dy, weight, dx, stride, padding, dilation):
    """Planes [start, stop) of dx."""
    channels, outputs = dx.shape[1], weight.shape[0]
    each = outputs // channels
    for at in range(start, stop):
        n, c = at // channels, at % channels
        out = dx[n, c]
        out[:] = 0
        for o in range(c * each, c * each + each):
            plane = dy[n, o]
            for i in range(weight.shape[2]):
                top, bottom, down = _inside(
                    out.shape[0], plane.shape[0], i, stride[0], padding[0], dilation[0]
                )
                for j in range(weight.shape[3]):
                    left, right, across = _inside(
                        out.shape[1], plane.shape[1], j, stride[1], padding[1], dilation[1]
                    )
                    factor = weight[o, 0, i, j]
                    for row in range(top, bottom):
                        line, to = plane[row, left:right], out[row * stride[0] + down]
                        to = to[left * stride[1] + across :]
                        if stride[1] == 1:
                            for k in range(line.size):
                                to[k] += factor * line[k]
                        else:
                            for k in range(line.size):
                                to[k * stride[1]] += factor * line[k]


@reordered
def backward_weight(start, stop, x, dy, dweight, accumulate, stride, padding, dilation):
    """Weights of the outputs [start, stop)."""
    each = dweight.shape[0] // x.shape[1]
    for o in range(start, stop):
        if not accumulate:
            dweight[o] = 0
        for n in range(x.shape[0]):
            plane, upper = x[n, o // each], dy[n, o]
            for i in range(dweight.shape[2]):
                top, bottom, down = _inside(
                    plane.shape[0], upper.shape[0], i, stride[0], padding[0], dilation[0]
                )
                for j in range(dweight.shape[3]):
                    left, right, across = _inside(
                        plane.shape[1], upper.shape[1], j, stride[1], padding[1], dilation[1]
                    )
                    total = x.dtype.type(0)
                    for row in range(top, bottom):
                        line, from_dy = plane[row * stride[0] + down], upper[row, left:right]
                        line = line[left * stride[1] + across :]
                        if stride[1] == 1:
                            for k in range(from_dy.size):
                                total += line[k] * from_dy[k]
                        else:
                            for k in range(from_dy.size):
                                total += line[k * stride[1]] * from_dy[k]
                    dweight[o, 0, i, j] += total
