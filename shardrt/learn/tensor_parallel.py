"""Exercise: cut two linear layers over tp ranks, forward and backward."""

from types import ModuleType

import numpy as np

from shardrt import device
from shardrt.comm import CollectiveCounter, init_device_mesh, thread
from shardrt.learn.checking import Hint, compile_sums, equal, function

TITLE = "Cut a linear layer"
LEVEL = "hard"
TEACHES = "tensor parallelism with two all-reduces"
TAKEAWAY = (
    "Columns first, rows second: the hidden activations never travel. One all-reduce in forward and one in "
    "backward carry activations, so tensor parallelism stays inside a node."
)

START = '''"""Exercise 10: cut a linear layer.

Tensor parallelism cuts the matmuls. An MLP has two linear layers:

    h = relu(x @ A + a)      A: (width, hidden), a: (hidden,)
    y = h @ B + b            B: (hidden, width), b: (width,)

Cut it over N ranks so that each rank computes 1/N of the hidden units. Every rank has the whole x, and needs the
whole y. In backward every rank has the whole gradient dy, and needs the whole dx. Write

    cut        the parts of A, a, B, b that a rank holds. Who holds b?
    forward    (y, anything that backward needs)
    backward   dx, and the gradients of the rank's own parts

    all_reduce(array)    in place, for a float32 array: array becomes its sum over ranks. Keep to ONE call in
                         forward and ONE in backward.

Every rank holds the whole b, and updates it alike. Read more: docs/explanation/tensor_parallel.md.
"""

import numpy as np


def cut(A, a, B, b, rank, ranks):
    """This rank's (A, a, B, b)."""
    raise NotImplementedError


def forward(parts, x, all_reduce):
    """(y, saved), with y whole on every rank. parts: what cut returned."""
    raise NotImplementedError


def backward(parts, saved, dy, all_reduce):
    """(dx, dA, da, dB, db), with dx and db whole on every rank, and the others as the parts."""
    raise NotImplementedError
'''

_WIDTH, _HIDDEN, _ROWS = 4, 12, 5
_NAMES = "dx", "dA", "da", "dB", "db"


prepare = compile_sums


def check(answer: ModuleType) -> str:
    """Compare with the whole layers on 1, 2 and 3 ranks, and count the all-reduces."""
    cut, forward, backward = (function(answer, name) for name in ("cut", "forward", "backward"))
    random = np.random.default_rng(0)
    shapes = (_WIDTH, _HIDDEN), (_HIDDEN,), (_HIDDEN, _WIDTH), (_WIDTH,), (_ROWS, _WIDTH), (_ROWS, _WIDTH)
    *whole, x, dy = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    wanted_y, wanted = _whole(whole, x, dy)
    for ranks in (1, 2, 3):

        def on_rank(ranks=ranks):
            mesh = init_device_mesh("cpu")
            counter = CollectiveCounter(communicator := mesh.communicator("control"))

            def all_reduce(array):
                if not array.flags.c_contiguous:
                    raise Hint("all_reduce changes C-contiguous arrays alone. Copy the array first.")
                communicator.all_reduce(array.reshape(-1), stream=device.current().current_stream)

            parts = cut(*(array.copy() for array in whole), mesh.rank, ranks)
            _check_cut(parts, ranks)
            y, saved = forward(parts, x.copy(), all_reduce)
            first = counter.calls["all_reduce"]
            found = backward(parts, saved, dy.copy(), all_reduce)
            return y, found, first, counter.calls["all_reduce"] - first

        _check_ranks(thread.run(ranks, on_rank), wanted_y, wanted, whole[3], ranks)
    return "y, dx and the gradients of all parts on 1, 2 and 3 ranks, with one all-reduce in each direction."


def _whole(
    parameters: list[np.ndarray], x: np.ndarray, dy: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    A, a, B, b = parameters
    h = np.maximum(x @ A + a, 0)
    dh = dy @ B.T * (h > 0)
    return h @ B + b, [dh @ A.T, x.T @ dh, dh.sum(0), h.T @ dy, dy.sum(0)]


def _check_cut(parts, ranks: int) -> None:
    part = _HIDDEN // ranks
    shapes = [getattr(each, "shape", None) for each in parts] if isinstance(parts, tuple | list) else []
    if len(shapes) != 4:
        raise Hint("cut must return four arrays: the rank's A, a, B and b.")
    wanted = [(_WIDTH, part), (part,), (part, _WIDTH), (_WIDTH,)]
    if shapes == wanted:
        return
    if shapes[0] == (_WIDTH // ranks, _HIDDEN):
        raise Hint("cut takes rows of A. A hidden unit is a COLUMN of A: its weights for all inputs.")
    if shapes[2] == (_HIDDEN, _WIDTH // ranks):
        raise Hint("cut takes columns of B. A rank has 1/N of the hidden units, which are the ROWS of B.")
    raise Hint(f"On {ranks} ranks cut returns the shapes {shapes}. Hidden units are cut, b is not: {wanted}.")


def _check_ranks(results: list, wanted_y: np.ndarray, wanted: list, b: np.ndarray, ranks: int) -> None:
    for y, found, first, second in results:
        if first > 1 or second > 1:
            raise Hint(
                f"forward makes {first} all-reduces and backward {second}. One in each direction is enough."
            )
        if not equal(y, wanted_y, "forward", 1e-4):
            if first == 0 and ranks > 1:
                raise Hint(
                    "forward: h @ B is a sum over hidden units, and each rank has a part. Sum over ranks."
                )
            if equal(y, wanted_y + (ranks - 1) * b, "forward", 1e-4):
                raise Hint(
                    f"forward adds b on each rank before the sum, so {ranks} times in all. Add it once."
                )
            raise Hint(
                f"forward gives another y than the whole layers on {ranks} ranks. Check the bias and the ReLU."
            )
        if not isinstance(found, tuple | list) or len(found) != 5:
            raise Hint("backward must return five arrays: dx, dA, da, dB, db.")
        if second == 0 and ranks > 1:
            raise Hint(
                "backward: each rank has the part of dx that goes through its hidden units. Sum dx over ranks."
            )
        for name, index in (("dx", 0), ("db", 4)):
            if not equal(found[index], wanted[index], name, 1e-4):
                if equal(found[index], ranks * wanted[index], name, 1e-4):
                    raise Hint(
                        f"{name} is {ranks} times too large: every rank has the whole of it. Do not sum it."
                    )
                raise Hint(f"{name} differs from that of the whole layers on {ranks} ranks.")
    for index, axis in ((1, 1), (2, 0), (3, 0)):
        parts = [found[index] for _, found, _, _ in results]
        for part, expected in zip(parts, np.split(wanted[index], ranks, axis=axis), strict=True):
            if not equal(part, expected, _NAMES[index], 1e-4):
                raise Hint(
                    f"{_NAMES[index]} of a rank's part differs from that part of the whole gradient. A parameter that "
                    "one rank holds alone needs no sum, and the mask of the ReLU is the rank's own."
                )
