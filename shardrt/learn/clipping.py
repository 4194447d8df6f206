"""Exercise: clip the norm of a sharded gradient with one all-reduce."""

from types import ModuleType

import numpy as np

from shardrt import device
from shardrt.comm import CollectiveCounter, init_device_mesh, thread
from shardrt.learn.checking import Hint, compile_sums, equal, function, need, number

TITLE = "Clip a sharded gradient"
LEVEL = "easy"
TEACHES = "a norm over shards, with one small all-reduce"
TAKEAWAY = (
    "Squares add up over shards, norms do not. One all-reduce of one number gives the norm of the whole "
    "model. Every rank scales its shards by the same factor. shardrt.nn.utils.clip_grad_norm_ does the same."
)

_SIZES = (6, 9, 0, 3)


prepare = compile_sums


def check(answer: ModuleType) -> str:
    """Clip on 1, 2 and 3 ranks, with a norm above and below the limit."""
    clip = function(answer, "clip")
    for ranks in (1, 2, 3):
        for scale in (4.0, 0.01):
            _check(clip, ranks, scale)
    return "norms, clipped shards and collectives on 1, 2 and 3 ranks, above and below the limit."


def _check(clip, ranks: int, scale: float) -> None:
    random = np.random.default_rng(ranks)
    shards = [
        [(scale * random.normal(size=size) * (1 + 5 * rank)).astype(np.float32) for size in _SIZES]
        for rank in range(ranks)
    ]
    norms = [float(np.linalg.norm(np.concatenate(own).astype(np.float64))) for own in shards]
    norm = float(np.linalg.norm(norms))

    def on_rank():
        mesh = init_device_mesh("cpu")
        communicator, own = mesh.communicator("control"), [array.copy() for array in shards[mesh.rank]]
        counter = CollectiveCounter(communicator)

        def all_reduce(array):
            communicator.all_reduce(array, stream=device.current().current_stream)

        return number(clip(own, all_reduce, 1.0), "clip"), own, counter.calls["all_reduce"]

    for rank, (found, own, calls) in enumerate(thread.run(ranks, on_rank)):
        need(
            calls or ranks == 1,
            "clip never communicates, so each rank knows the norm of its own shards alone.",
        )
        need(calls <= 1, f"clip makes {calls} all-reduces. One is enough: add up all units first.")
        if not np.isclose(found, norm, rtol=1e-5):
            known = {
                sum(
                    norms
                ): "clip adds up the norms of ranks. Add up the squares, and take the root afterwards.",
                norm**2: "clip returns the sum of squares. The norm is its root.",
            }
            hint = next((hint for value, hint in known.items() if np.isclose(found, value, rtol=1e-5)), "")
            raise Hint(
                hint or f"On rank {rank} of {ranks} clip returns {found:.6g}, and the norm is {norm:.6g}."
            )
        for array, before in zip(own, shards[rank], strict=True):
            _check_shard(array, before, norm)


def _check_shard(array: np.ndarray, before: np.ndarray, norm: float) -> None:
    same = np.array_equal(array, before)
    below = f"The norm, {norm:.3g}, is below max_norm, and clip changes the gradient."
    need(norm > 1 or same, f"{below} Clipping never makes a gradient larger.")
    scaled = norm <= 1 or equal(array, before * np.float32(1 / norm), "clip")
    need(
        scaled or not same,
        "clip returns the right norm and leaves the shards as they are. Scale them in place.",
    )
    need(scaled, "Every unit on every rank is scaled by the same factor: max_norm / norm of the model.")
