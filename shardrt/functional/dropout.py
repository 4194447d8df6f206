"""Dropout whose mask is not stored: element i of it is a function of seed, step, module, use and i.

That is, of the name of the innermost module, and which dropout in there it is (shardrt.random). Elements are
counted over the global batch, of which each rank has an equal part in rank order, or that of the
micro-batch that it computes, or the block that the module says; so a run drops the same elements at every
world size.
"""

from collections.abc import Callable
from functools import partial
from math import prod

import numpy as np

from shardrt import autograd, device, random
from shardrt.autograd import Function
from shardrt.comm import world
from shardrt.functional._arrays import check_floats, empty_like, kernels, tensor
from shardrt.functional._types import Array, Tensor

Part = tuple[int, ...]  # the first elements of runs, which are equally long


class Dropout(Function):
    def forward(self, x: Array, p: float, seed: int, call: int, part: Part, place: Array | None) -> Array:
        self.saved = (p, seed, call, part, place)
        return self._masked(kernels().dropout.forward, x)

    def backward(self, dy: Array) -> tuple:
        return self._masked(kernels().dropout.backward, dy), None, None, None, None, None

    def _masked(self, kernel: Callable, x: Array) -> Array:
        p, seed, call, part, place = self.saved
        y, runs = empty_like(x), (len(part), x.size // max(1, len(part)))
        for first, given, out in zip(part, x.reshape(runs), y.reshape(runs), strict=True):
            kernel(given, out, p, seed, call, first, place)
        return y


def dropout(x: "Tensor", p: float = 0.5, training: bool = True, inplace: bool = False) -> "Tensor":
    """Each element 0 with probability p, else divided by 1 - p (Srivastava et al., Dropout, 2014).

    Args:
        x: any shape, float32 or float64; x itself where not training or p is 0.
        inplace: changes nothing.

    Raises:
        ValueError: for p outside [0, 1).
        TypeError: for other dtypes.

    Example:
        >>> from shardrt import Tensor, functional as F
        >>> F.dropout(Tensor([1.0, 2.0]), 0.5, training=False).numpy()
        array([1., 2.], dtype=float32)
    """
    x = tensor(x)
    check_floats("dropout", x=x)
    if not 0 <= p < 1:
        raise ValueError(f"dropout: p must be in [0, 1), got {p}")
    if not training or p == 0:
        return x
    seed, call, place = key_of_use()
    return Dropout.apply(x, p, seed, call, part_of_batch(x.shape), place)


def part_of_batch(shape: tuple[int, ...]) -> Part:
    """Which elements of the tensor of the whole batch a tensor of this shape has."""
    running = autograd.modules()
    block = running[-1].batch_block if running else None
    if block is None:
        block = random.Block(world.current().rank)
    part = random.micro_batch()
    part = block.part if part is None else part
    if block.count == 1:
        return (part * prod(shape),)
    length, rows = prod(shape[-2:]) // len(block.indices), prod(shape[:-2])
    begins = range(part * rows * block.count, (part + 1) * rows * block.count, block.count)
    return tuple((begin + index) * length for begin in begins for index in block.indices)


def key_of_use() -> tuple[int, int, Array | None]:
    """(seed, call, place) of the next mask, as the kernel takes them.

    In a captured graph `call` counts from the first call of the model in the graph, which is asked for before
    each replay; and each replay counts the calls that the capture only seemed to be.
    """
    running = autograd.modules()
    module = running[-1].name if running else None
    here = device.current()
    graph = here.capturing
    if graph is None:
        seed, call, use = random.draw(module)
        return seed, (call + use) % 2**64, None
    if "dropout" not in graph.kept:
        if random.rewound():
            raise RuntimeError(
                "dropout: this capture recomputes a forward that ran outside it; capture both together"
            )
        graph.after_capture(partial(random.restore, random.state()))
        random.call_begins()
        place = here.numbers(lambda: np.array(random.upcoming(), np.uint64))
        graph.kept["dropout"] = random.upcoming()[1], place
    before = random.calls()
    _, call, use = random.draw(module)
    if random.calls() > before and not random.rewound():
        graph.before_replay(random.next_call)
    first, place = graph.kept["dropout"]
    return 0, (call - first + use) % 2**64, place
