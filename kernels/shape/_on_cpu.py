"""The costs of the functions with which the CPU twin does other things than the CUDA twin."""

from shardrt.kernels.shape import cross_entropy
from shardrt.kernels.shape._cost import Array, Cost, cost


def _backward_input_gelu(dy: Array, weight: Array, inner: Array, dinner: Array) -> Cost:
    """There is no such product."""
    return cost((), (), 0, launches=0, value=False)


def _backward_in_place(
    logits: Array, targets: Array, lse: Array, scale: Array | None, ignore_index: int
) -> Cost:
    """Forward has left the logits. A factor for each row takes another pass."""
    found = cross_entropy.backward(logits, targets, lse, logits, scale, ignore_index)
    by_row = scale is not None and scale.ndim
    return found._replace(nbytes=found.nbytes + 2 * logits.nbytes, launches=2) if by_row else found


# "module.name" -> what stands there instead.
ON_CPU = {
    "cross_entropy.LEAVES_SCALE": False,
    "cross_entropy.backward_in_place": _backward_in_place,
    "cross_entropy.forward_in_place": cross_entropy.forward,
    "linear.BLOCK": 4096,
    "linear.INPUT_AGAIN": True,
    "linear.backward_input_gelu": _backward_input_gelu,
}
