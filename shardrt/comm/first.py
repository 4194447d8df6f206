"""FromFirst: a mapping on every rank of arrays that only rank 0 has. Reading an array broadcasts it."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm import objects
from shardrt.comm.protocol import Communicator

__all__ = ["FromFirst"]


class FromFirst(Mapping):
    """Rank 0's `arrays`; other ranks' `arrays` are not used. Making it and reading an array are collective.

    All ranks read the same names in the same order. Each read gives a new host array. Dtypes that NumPy lacks
    become float32. If rank 0 can't read an array, every rank raises ValueError.
    """

    def __init__(self, control: Communicator, arrays: Mapping[str, Any] | None) -> None:
        self._control = control
        self._arrays = arrays
        self._names = objects.broadcast_object(control, list(arrays) if control.rank == 0 else None)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        values, about, error = None, None, None
        if self._control.rank == 0:
            try:
                values = _plain(self._arrays[name])
                about = {"shape": values.shape, "dtype": values.dtype.name}
            except Exception as failed:  # broadcast below: the other ranks wait
                error, about = failed, {"error": f"{type(failed).__name__}: {failed}"}
        about = objects.broadcast_object(self._control, about)
        if "error" in about:
            raise ValueError(f"rank 0 can't read {name!r}: {about['error']}") from error
        if values is None:
            values = np.empty(about["shape"], about["dtype"])
        if values.size:
            data = values.reshape(-1).view(np.uint8)
            self._control.broadcast(data, root=0, stream=device.current().current_stream)
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _plain(values: Any) -> np.ndarray:
    """The values as a contiguous host array of a dtype of NumPy."""
    array = np.asarray(values)
    return np.ascontiguousarray(array if array.dtype.kind in "fiub" else array.astype(np.float32))
