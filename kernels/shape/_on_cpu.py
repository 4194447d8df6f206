"""The costs of the functions with which the CPU twin does other things than the CUDA twin."""

from shardrt.kernels.shape._cost import Array, Cost, cost


def _backward_input_gelu(dy: Array, weight: Array, inner: Array, dinner: Array) -> Cost:
    """There is no such product."""
    return cost((), (), 0, launches=0, value=False)


# "module.name" -> what stands there instead.
ON_CPU = {
    "linear.BLOCK": 4096,
    "linear.INPUT_AGAIN": True,
    "linear.backward_input_gelu": _backward_input_gelu,
}
