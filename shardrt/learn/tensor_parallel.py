"""Exercise: cut two linear layers over tp ranks, forward and backward."""

from types import ModuleType

import numpy as np

from shardrt import device
from shardrt.comm import CollectiveCounter, init_device_mesh, thread
from shardrt.learn.checking import Hint, compile_sums, equal, function, need

TITLE = "Cut a linear layer"
LEVEL = "hard"
TEACHES = "tensor parallelism with two all-reduces"
TAKEAWAY = (
    "Columns first, rows second: the hidden activations never travel. One all-reduce in forward and one in "
    "backward carry activations, so tensor parallelism stays inside a node."
)

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
                need(array.flags.c_contiguous, "all_reduce changes C-contiguous arrays. Copy this one first.")
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
    wanted = [(_WIDTH, part), (part,), (part, _WIDTH), (_WIDTH,)]
    if shapes != wanted:
        need(len(shapes) == 4, "cut must return four arrays: the rank's A, a, B and b.")
        columns = shapes[0] == wanted[0]
        need(
            columns,
            f"cut: a hidden unit is a COLUMN of A. A part of A has shape {wanted[0]}, not {shapes[0]}.",
        )
        rows = shapes[2] == wanted[2]
        need(
            rows,
            f"cut: a hidden unit is one of the ROWS of B. A part has shape {wanted[2]}, not {shapes[2]}.",
        )
        raise Hint(
            f"On {ranks} ranks cut returns the shapes {shapes}. The hidden units are cut, b is not: {wanted}."
        )


def _check_ranks(results: list, wanted_y: np.ndarray, wanted: list, b: np.ndarray, ranks: int) -> None:
    for y, found, first, second in results:
        once = first <= 1 and second <= 1
        need(
            once, f"forward makes {first} all-reduces and backward {second}. One in each direction is enough."
        )
        if not equal(y, wanted_y, "forward", 1e-4):
            need(
                first or ranks == 1,
                "forward: each rank has a part of the sum over hidden units. Sum over ranks.",
            )
            often = equal(y, wanted_y + (ranks - 1) * b, "forward", 1e-4)
            need(
                not often,
                f"forward adds b on each rank before the sum, so {ranks} times in all. Add it once.",
            )
            raise Hint(
                f"forward gives another y than the whole layers on {ranks} ranks. Check bias and ReLU."
            )
        five = isinstance(found, tuple | list) and len(found) == 5
        need(five, "backward must return five arrays: dx, dA, da, dB, db.")
        need(
            second or ranks == 1,
            "backward: dx is a sum over hidden units, and each has a part. Sum dx over ranks.",
        )
        for name, index in (("dx", 0), ("db", 4)):
            if not equal(found[index], wanted[index], name, 1e-4):
                often = equal(found[index], ranks * wanted[index], name, 1e-4)
                need(
                    not often,
                    f"{name} is {ranks} times too large: every rank has the whole of it. Do not sum it.",
                )
                raise Hint(f"{name} differs from that of the whole layers on {ranks} ranks.")
    for index, axis in ((1, 1), (2, 0), (3, 0)):
        name, parts = _NAMES[index], [found[index] for _, found, _, _ in results]
        for part, expected in zip(parts, np.split(wanted[index], ranks, axis=axis), strict=True):
            same = equal(part, expected, name, 1e-4)
            need(
                same, f"{name} differs from the part of the whole gradient. What one rank holds needs no sum."
            )
