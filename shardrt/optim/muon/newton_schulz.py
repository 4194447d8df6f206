"""Newton-Schulz: the nearest semi-orthogonal matrix, by matmuls alone.

Five steps of a quintic polynomial move every singular value near 1 (Jordan et al., Muon: An optimizer for
hidden layers in neural networks, 2024). Coefficients, steps and the smallest norm are those of
torch.optim.Muon. A matrix (m, n) with m <= n takes 4 m^2 n + 2 m^3 flops a step.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from shardrt import device, dtypes
from shardrt.device import Array

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7  # the least norm that a matrix is divided by


def flops(shape: tuple[int, int], steps: int = STEPS) -> int:
    """Flops of the steps for one matrix."""
    low, high = sorted(shape)
    return steps * (4 * low * low * high + 2 * low**3)


def orthogonalize(matrices: Iterable[Array], steps: int = STEPS, dtype: str = dtypes.float32) -> None:
    """Replace each matrix by its orthogonal factor, in place. All have one shape (rows, columns).

    On the host one after the other, on a GPU in one batch. Each matrix's sums are its own.

    Args:
        matrices: 2-D arrays of one floating dtype.
        steps: how many steps.
        dtype: "bfloat16" rounds each result to it, as torch.optim.Muon does, in float32 matmuls. "float32"
            keeps the dtype of the matrices.
    """
    matrices = list(matrices)
    here = device.of(matrices[0])
    like = getattr(here, "like", here)  # a simulated device does as the real one
    batches = [[each] for each in matrices] if like.in_host_memory else [matrices]
    for batch in batches:
        _orthogonalize(here, batch, steps, dtype == dtypes.bfloat16)


def _orthogonalize(here: Any, batch: list[Array], steps: int, rounds: bool) -> None:
    rows, columns = batch[0].shape
    low, high = sorted((rows, columns))
    leading = (len(batch),) if len(batch) > 1 else ()
    kind = batch[0].dtype
    x, y = (here.empty((*leading, low, high), kind) for _ in range(2))
    gram, update = (here.empty((*leading, low, low), kind) for _ in range(2))
    matmul = here.kernels.matmul.matmul

    def rounded(array: Array) -> None:
        if rounds:
            here.kernels.cast.round_to(array.reshape(-1), array.reshape(-1), dtypes.bfloat16)

    places = x if leading else [x]
    for place, matrix in zip(places, batch, strict=True):
        place[...] = matrix.T if rows > columns else matrix
    rounded(x)
    for place in places:
        norm = np.sqrt(np.square(place).sum().reshape(1))
        rounded(norm)
        place /= np.maximum(norm, EPS)
    rounded(x)
    a, b, c = COEFFICIENTS
    for _ in range(steps):  # x = a x + (b G + c G G) x, with G = x x'
        matmul(x, np.swapaxes(x, -1, -2), gram)
        rounded(gram)
        matmul(gram, gram, update)
        update *= c
        gram *= b
        update += gram
        rounded(update)
        np.multiply(x, a, out=y)
        matmul(update, x, y, accumulate=True)
        x, y = y, x
        rounded(x)
    for place, matrix in zip(x if leading else [x], batch, strict=True):
        matrix[...] = place.T if rows > columns else place
