"""Exercise: clip the norm of a sharded gradient with one all-reduce."""

from types import ModuleType

import numpy as np

from shardrt import device
from shardrt.comm import CollectiveCounter, init_device_mesh, thread
from shardrt.learn.checking import Hint, compile_sums, equal, function, number

TITLE = "Clip a sharded gradient"
LEVEL = "easy"
TEACHES = "a norm over shards, with one small all-reduce"
TAKEAWAY = (
    "Squares add up over shards, norms do not. One all-reduce of one number gives the norm of the whole model, "
    "and every rank scales its shards by the same factor. shardrt.nn.utils.clip_grad_norm_ does it exactly."
)

START = '''"""Exercise 4: clip a sharded gradient.

Each rank has shards of the gradient of a model: a list of 1-D float32 arrays, one per unit. Together the ranks
have each element once. Clip the gradient of the WHOLE model to `max_norm`:

    norm = sqrt(sum of the squares of all elements, of all units, on all ranks)
    if norm > max_norm: multiply every element by max_norm / norm

Change the arrays in place and return the norm, as a float: the same number on every rank.
Communicate as little as possible: the call of a collective costs more than its few bytes.

    all_reduce(array)    in place, for a float64 array: array becomes its sum over ranks

All ranks must make the same collective calls, whatever their gradients are.
"""

import numpy as np


def clip(shards, all_reduce, max_norm):
    """Clip in place; returns the norm before clipping."""
    raise NotImplementedError
'''

_SIZES = (6, 9, 0, 3)


prepare = compile_sums


def check(answer: ModuleType) -> str:
    """Clip on 1, 2 and 3 ranks, with a norm above and below the limit."""
    clip = function(answer, "clip")
    for ranks in (1, 2, 3):
        for scale in (4.0, 0.01):
            _check(clip, ranks, scale)
    return "the norm, the clipped shards and the number of collectives on 1, 2 and 3 ranks, above and below the limit."


def _check(clip, ranks: int, scale: float) -> None:
    random = np.random.default_rng(ranks)
    shards = [
        [(scale * random.normal(size=size) * (1 + 5 * rank)).astype(np.float32) for size in _SIZES]
        for rank in range(ranks)
    ]
    norm = float(np.sqrt(sum((array.astype(np.float64) ** 2).sum() for own in shards for array in own)))

    def on_rank():
        mesh = init_device_mesh("cpu")
        communicator, own = mesh.communicator("control"), [array.copy() for array in shards[mesh.rank]]
        counter = CollectiveCounter(communicator)

        def all_reduce(array):
            communicator.all_reduce(array, stream=device.current().current_stream)

        return clip(own, all_reduce, 1.0), own, counter.calls["all_reduce"]

    for rank, (found, own, calls) in enumerate(thread.run(ranks, on_rank)):
        found = number(found, "clip")
        if ranks > 1 and calls == 0:
            raise Hint("clip never communicates, so each rank knows the norm of its own shards alone.")
        if calls > 1:
            raise Hint(f"clip makes {calls} all-reduces. One is enough: add up all units first.")
        if abs(found - norm) > 1e-5 * norm:
            of_norms = sum(np.sqrt(sum((a.astype(np.float64) ** 2).sum() for a in each)) for each in shards)
            if abs(found - of_norms) <= 1e-5 * of_norms:
                raise Hint(
                    "clip adds up the norms of ranks. Add up the squares, and take the root afterwards."
                )
            if abs(found - norm**2) <= 1e-5 * norm**2:
                raise Hint("clip returns the sum of squares. The norm is its root.")
            raise Hint(f"On rank {rank} of {ranks} clip returns the norm {found:.6g}, and it is {norm:.6g}.")
        factor = min(1.0, 1.0 / norm)
        for array, before in zip(own, shards[rank], strict=True):
            if norm < 1 and not np.array_equal(array, before):
                raise Hint(
                    f"The norm, {norm:.3g}, is below max_norm, and clip changes the gradient. Clipping never "
                    "makes a gradient larger."
                )
            if not equal(array, before * np.float32(factor), "clip"):
                if np.array_equal(array, before):
                    raise Hint(
                        "clip returns the right norm and leaves the shards as they are. Scale in place."
                    )
                raise Hint(
                    "Every unit on every rank is scaled by the same factor: max_norm / norm of the model."
                )
