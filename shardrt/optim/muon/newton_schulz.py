"""Newton-Schulz: the nearest semi-orthogonal matrix, by matmuls alone.

Five steps of a quintic polynomial move every singular value near 1 (Jordan et al., Muon: An optimizer for
hidden layers in neural networks, 2024). Coefficients, steps and the smallest norm are those of
torch.optim.Muon. A matrix whose shorter side is m and longer side n takes 4 m^2 n + 2 m^3 flops a step, of
which kernels spare up to 2 m^2 n / 2 + m^3: two of three matmuls are symmetric.
"""

from dataclasses import dataclass
from math import prod

import numpy as np

from shardrt import device, dtypes
from shardrt.device import Array, Device

__all__ = ["STEPS", "Matrices", "array_shapes", "batch_of", "flops"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
BATCH = 1 << 24  # elements
EPS = 1e-7  # the least norm that a matrix is divided by


def flops(shape: tuple[int, int], steps: int = STEPS) -> int:
    """Flops of the steps for one matrix."""
    low, high = sorted(shape)
    return steps * (4 * low * low * high + 2 * low**3)


@dataclass
class Matrices:
    """Matrices of one shape (rows, columns) that are orthogonalized together, and scratch memory for it.

    x: the matrices, (rows, columns), or (count, rows, columns) for several.
    """

    x: Array
    y: Array
    gram: Array
    square: Array

    @classmethod
    def empty(cls, here: Device, count: int, shape: tuple[int, int], dtype: np.dtype) -> "Matrices":
        """Arrays without values."""
        shapes = array_shapes(count, shape)
        return cls(*(here.empty(each, dtype) for each in shapes))

    @property
    def each(self) -> list[Array]:
        """The matrices one by one."""
        return [self.x] if self.x.ndim == 2 else list(self.x)

    def orthogonalize(self, steps: int = STEPS, dtype: str = dtypes.float32) -> None:
        """Replace each matrix by its orthogonal factor. Each matrix's sums are its own.

        Args:
            steps: how many steps.
            dtype: "bfloat16" rounds each result to it, as torch.optim.Muon does, in float32 matmuls.
                "float32" keeps the dtype of the matrices.
        """
        here, (rows, columns) = device.of(self.x), self.x.shape[-2:]
        kernels = here.kernels

        def rounded(array: Array) -> None:
            if dtype == dtypes.bfloat16:
                kernels.cast.round_to(array.reshape(-1), array.reshape(-1), dtypes.bfloat16)

        rounded(self.x)
        flat = self.x.reshape(-1, rows * columns)
        norms = np.sqrt(np.square(flat, out=self.y.reshape(flat.shape)).sum(axis=1))
        rounded(norms)
        flat /= np.maximum(norms, EPS)[:, None]
        rounded(self.x)
        a, b, c = COEFFICIENTS
        for _ in range(steps):  # x = (a + b G + c G G) x, with G = x x'; of the shorter side
            x = self.x if rows <= columns else np.swapaxes(self.x, -1, -2)
            kernels.matmul.gram(x, self.gram)
            rounded(self.gram)
            kernels.matmul.gram(self.gram, self.square)  # which is symmetric
            kernels.muon.apply(self.square.reshape(-1), self.gram.reshape(-1), c, -b)
            rounded(self.square)
            self.square.reshape(len(flat), -1)[:, :: x.shape[-2] + 1] += a
            if rows <= columns:
                kernels.matmul.matmul(self.square, self.x, self.y)
            else:
                kernels.matmul.matmul(self.x, self.square, self.y)
            self.x, self.y = self.y, self.x
            rounded(self.x)


def batch_of(here: Device, shape: tuple[int, int]) -> int:
    """How many matrices are orthogonalized together: one on the host, and on a GPU up to BATCH elements."""
    like = getattr(here, "like", here)  # a simulated device does as the real one
    return 1 if like.in_host_memory else max(1, BATCH // prod(shape))


def array_shapes(count: int, shape: tuple[int, int]) -> list[tuple[int, ...]]:
    """The shapes of the arrays of Matrices."""
    leading = (count,) if count > 1 else ()
    low = min(shape)
    return [(*leading, *each) for each in (shape, shape, (low, low), (low, low))]
