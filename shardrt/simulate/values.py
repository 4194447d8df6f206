"""What the host reads of a simulated device: made up, by where it reads, and what."""

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Values"]

_LARGE = 1e12  # a piece's part of a norm: the norm is above whatever it is clipped to


@dataclass(frozen=True)
class Values:
    """For SimulatedDevice(values=).

    What is read is called "norm", "finite" or "loss", or else nothing.

    Whatever else is read is what the kernel says is usual, or 1, and no condition holds.

    Attributes:
        loss: each number that a training loop reads, a loss it is.
        clips: whether the norm of gradients is large, so that they are clipped.
        overflow: whether GradScaler finds one, and leaves the update out.
    """

    loss: float = 1.0
    clips: bool = True
    overflow: bool = False

    def __call__(self, site: str, dtype: np.dtype, what: str, usual: Any) -> tuple[Any, str]:
        """The value of each element of what is read at `site`, and what it is called."""
        file = site.rpartition(":")[0]
        if what == "finite":
            return not self.overflow, what
        late = file == "shardrt/train/loop.py" and dtype == np.float64  # read behind the update
        if late or (file == "shardrt/nn/utils.py" and dtype.kind == "f"):
            return dtype.type(_LARGE if self.clips else 0), "norm"
        if usual is not None:
            return usual, what
        if dtype.kind == "f" and not file.startswith("shardrt/") or file == "shardrt/train/loop.py":
            return dtype.type(self.loss), "loss"
        return dtype.type(dtype != np.bool_), what
