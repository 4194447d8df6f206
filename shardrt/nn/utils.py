"""Gradient norms and clipping over all parameters and all ranks."""

from collections.abc import Callable, Iterable
from math import fsum, inf, isfinite, isinf, sqrt

import numpy as np

from shardrt import device
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.protocol import Communicator
from shardrt.device import Array
from shardrt.nn.exact import norm_of
from shardrt.nn.placement import along_pipeline, pipeline_of
from shardrt.nn.public import Parameter, parameters_in
from shardrt.nn.ranks import shared
from shardrt.nn.storage import LocalStorage, Storage
from shardrt.tensor import Tensor

__all__ = [
    "NonfiniteNorm",
    "Pieces",
    "Squares",
    "clip_grad_norm_",
    "clip_grad_norm_on_device_",
    "clip_grad_value_",
    "grad_norm",
    "merged",
]

Pieces = dict[Communicator | None, list[Array]]  # of gradients, by their ranks' communicator
Squares = list[tuple[Array, Communicator | None, DeviceMesh | None]]  # pairs of squares, and their ranks


class NonfiniteNorm(RuntimeError):
    """The gradients have a norm that is nan or infinite: `norm`. Nothing has been changed."""

    def __init__(self, norm: float, norm_type: float) -> None:
        super().__init__(f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {norm}")
        self.norm = norm


def clip_grad_norm_(
    parameters: Iterable[Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> float:
    """Scale the gradients so that their global norm is at most `max_norm`; gives the norm before (grad_norm).

    Call it on every rank. An infinite `max_norm` only measures. As in PyTorch, a norm that is nan or infinite
    makes gradients nan or 0, on every rank alike, unless error_if_nonfinite asks for a NonfiniteNorm.

    Raises:
        ValueError: if `max_norm` or `norm_type` is not positive, or for sharded parameters together with
            ignored ones, whose gradients are each rank's own.

    Example:
        >>> import numpy as np
        >>> from shardrt import nn, functional as F
        >>> layer = nn.Linear(8, 2)
        >>> F.cross_entropy(layer(np.ones((4, 8), np.float32)), [0, 1, 0, 0]).backward()
        >>> norm = nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
        >>> round(nn.utils.grad_norm(layer.parameters()), 3)
        0.1
    """
    if not max_norm > 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be positive, got {max_norm}")
    _check_norm_type("clip_grad_norm_", norm_type)
    parameters = parameters_in(parameters, "clip_grad_norm_")
    pieces = list(_gradient_pieces(parameters))
    if not isinf(max_norm):
        _refuse_mixed("clip_grad_norm_", parameters)
        for storage, _ in pieces:
            storage.refuse_applied("clip_grad_norm_")
    norm = _norm(parameters, pieces, norm_type)
    if error_if_nonfinite and not isfinite(norm):
        raise NonfiniteNorm(norm, norm_type)
    factor = max_norm / (norm + 1e-6)
    if not factor >= 1 and not isinf(max_norm):
        for _, piece in pieces:
            device.of(piece).kernels.elementwise.scale_(piece, factor)
    return norm


def clip_grad_norm_on_device_(
    parameters: Iterable[Parameter], max_norm: float, *, leave_nonfinite: bool = False
) -> Tensor:
    """As clip_grad_norm_ of order 2, but the host does not wait for the norm: a float64 tensor, read later.

    So it can be captured in a CUDA graph, also on several ranks where the mesh's communicators are NCCL's. On
    a GPU the norm and the gradients are bitwise as clip_grad_norm_'s. On the CPU the norm is a plain float64
    sum, whose last bits depend on how the gradients are sharded.

    Args:
        leave_nonfinite: where the norm is nan or infinite, the gradients stay unchanged.

    Raises:
        ValueError: as clip_grad_norm_ does, and for gradients that are on the host though the device is not.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_grad_norm_on_device_: max_norm must be positive, got {max_norm}")
    parameters, here = parameters_in(parameters, "clip_grad_norm_on_device_"), device.current()
    limited, found = not isinf(max_norm), list(_gradient_pieces(parameters))
    if limited:
        _refuse_mixed("clip_grad_norm_on_device_", parameters)
    copies, others = _copies(parameters), pipeline_of(parameters)
    by_communicator: Pieces = {}
    holders: dict[Communicator | None, DeviceMesh | None] = {}
    everything = []
    for storage, piece in found:
        if limited:
            storage.refuse_applied("clip_grad_norm_on_device_")
        if piece.size:
            everything.append(piece)
        if storage not in copies:
            by_communicator.setdefault(storage.communicator, []).append(piece)
            holders[storage.communicator] = storage.whole_mesh
    if any(device.of(piece) is not here for piece in everything):
        raise ValueError("clip_grad_norm_on_device_: gradients are on the host; use clip_grad_norm_")
    squares: Squares = []
    for communicator, pieces in by_communicator.items():
        pieces = [piece for piece in pieces if piece.size]
        pairs = _power_sums(pieces, 2.0)[0] if pieces else here.zeros((0, 2), np.float64)
        squares.append((pairs, communicator, holders[communicator]))
    if here.in_host_memory:
        norm = np.sqrt(_plain_sum(squares, others))
        factor = np.minimum(max_norm / (norm + 1e-6), 1.0)  # nan stays
        if leave_nonfinite:
            factor = np.where(np.isfinite(norm), factor, 1.0)
    else:
        results = here.empty((2,), np.float64)
        pairs = _pairs_of_all(squares, others)
        here.kernels.reduce.clip_factor(pairs, max_norm, leave_nonfinite, results)
        norm, factor = results[:1], results[1:]
    for piece in everything if limited else ():
        here.kernels.elementwise.scale_by_(piece, factor)
    return Tensor(norm.reshape(()))


def _plain_sum(squares: Squares, others: DeviceMesh | None) -> Array:
    """The sum of the squares on all ranks: (1,), an array of the host."""
    here = device.current()
    total = here.zeros((1,), np.float64) if others is not None or not squares else 0
    for pairs, communicator, _ in squares:
        part = pairs.sum().reshape(1)
        if communicator is not None:
            communicator.all_reduce(part, op="sum", stream=here.current_stream)
        total = total + part
    if others is not None:
        others.communicator("control").all_reduce(total, op="sum", stream=here.current_stream)
    return total


def _pairs_of_all(squares: Squares, others: DeviceMesh | None) -> Array:
    """(n, 2), on the device: pairs that add up to the sum of the squares on all ranks, to about 100 bits.

    So its root is the norm that `_norm` finds, and the same on all ranks that have copies of a shard.
    """
    here = device.current()
    found = [_everyones_pairs(pairs, ranks) for pairs, _, ranks in squares]
    if len(found) == 1 and others is None:
        return found[0]
    sums = here.empty((len(found), 2), np.float64)
    for row, pairs in zip(sums, found, strict=True):
        here.kernels.reduce.add_pairs(pairs, row)
    return _everyones_pairs(sums, others)


def _everyones_pairs(pairs: Array, ranks: DeviceMesh | None) -> Array:
    """A pair of each rank, the sum of its squares; the host does not wait.

    By the communicator for reductions, in their stream: it is there if these ranks shard parameters, else it
    is made now. NCCL sums nothing: it may add in another order on ranks that have copies.
    """
    if ranks is None or ranks.size == 1:
        return pairs
    here = device.current()
    compute, reduce = here.current_stream, ranks.stream("reduce")
    everyone, given, gathered = here.empty((ranks.size, 2), np.float64), here.new_event(), here.new_event()
    here.kernels.reduce.add_pairs(pairs, everyone[ranks.rank])
    compute.record(given)
    reduce.wait(given)  # compute has written this rank's pair
    ranks.communicator("reduce").all_gather(everyone.reshape(-1), stream=reduce, tag="norm of gradients")
    reduce.record(gathered)
    compute.wait(gathered)  # the others' pairs are here
    return everyone


def grad_norm(parameters: Iterable[Parameter], norm_type: float = 2.0) -> float:
    """The norm of all gradients on all ranks, seen as one vector: (sum |g| ** norm_type) ** (1 / norm_type).

    Each element is counted once, however the parameters are sharded; one all-reduce of a few numbers per
    communicator. The sum is carried to about 100 bits and rounded once, so the norm is bitwise identical at
    every world size if the gradients are; with fsdp.set_world_invariant it is exact. nan on every rank if
    there is one anywhere. Call it on every rank.

    Args:
        norm_type: a positive number, or infinity for the largest |g|.

    Raises:
        ValueError: if `norm_type` is not positive, or with set_world_invariant not 1, 2 or infinity.

    Example:
        >>> import numpy as np
        >>> from shardrt import nn
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> layer(np.array([[3.0, 4.0]], np.float32)).sum().backward()
        >>> nn.utils.grad_norm(layer.parameters())
        5.0
    """
    _check_norm_type("grad_norm", norm_type)
    parameters = parameters_in(parameters, "grad_norm")
    return _norm(parameters, _gradient_pieces(parameters), norm_type)


def clip_grad_value_(parameters: Iterable[Parameter], clip_value: float) -> None:
    """Limit each element of the gradients to [-clip_value, clip_value]; nan stays nan.

    Needs no other rank.

    Raises:
        ValueError: if `clip_value` is negative or nan.

    Example:
        >>> import numpy as np
        >>> from shardrt import nn
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> layer(np.array([[3.0, 4.0]], np.float32)).sum().backward()
        >>> nn.utils.clip_grad_value_(layer.parameters(), 3.5)
        >>> layer.weight.grad
        array([[3. , 3.5]], dtype=float32)
    """
    if not clip_value >= 0:
        raise ValueError(f"clip_grad_value_: clip_value must not be negative, got {clip_value}")
    for storage, piece in _gradient_pieces(parameters_in(parameters, "clip_grad_value_")):
        storage.refuse_applied("clip_grad_value_")
        device.of(piece).kernels.elementwise.clamp_(piece, clip_value)


def _check_norm_type(function: str, norm_type: float) -> None:
    if not norm_type > 0:
        raise ValueError(f"{function}: norm_type must be positive, or infinity; got {norm_type}")


def _refuse_mixed(call: str, parameters: list[Parameter]) -> None:
    """Raise ValueError for sharded next to plain parameters, whose gradients no unit reduces."""
    trained = [parameter for parameter in parameters if parameter.requires_grad and not parameter.absent]
    alone = [parameter for parameter in trained if isinstance(parameter.storage, LocalStorage)]
    if alone and shared(parameter.storage for parameter in trained):
        raise ValueError(
            f"{call}: parameter {alone[0].name!r} is not sharded, so its gradient is this rank's "
            "own; clip such parameters in a call of their own"
        )


def _norm(
    parameters: list[Parameter], pieces: Iterable[tuple[Storage, np.ndarray]], norm_type: float
) -> float:
    copies, others = _copies(parameters), along_pipeline(parameters)
    by_communicator: Pieces = {}
    for storage, piece in pieces:
        if storage not in copies:
            by_communicator.setdefault(storage.communicator, []).append(piece)
    if isinf(norm_type):
        return _largest(by_communicator, others)
    if any(parameter.storage.exact_norm for parameter in parameters):
        return _exact_norm(by_communicator, others, norm_type)
    found = _on_host(by_communicator, lambda some: _power_sums(some, norm_type))
    values = [value for item in found.items() for value in _everyones_sums(*item)]
    if others is not None:
        values = _everyones_sums(others, np.array(values))
    total = _rounded_sum(values)
    return sqrt(total) if norm_type == 2 else float(np.float64(total) ** (1 / norm_type))


def _on_host(
    by_communicator: Pieces, numbers_of: Callable[[list[Array]], tuple[Array, list[int]]]
) -> dict[Communicator | None, np.ndarray]:
    """The kernels' results for the pieces, on the host, by communicator; one copy and one wait per device.

    numbers_of: gives, of pieces of one device, rows in one array, and how many of them are each piece's.
    """
    by_device: dict[device.Device, list[tuple[Communicator | None, Array]]] = {}
    for communicator, pieces in by_communicator.items():
        for piece in pieces:
            by_device.setdefault(device.of(piece), []).append((communicator, piece))
    found: dict[Communicator | None, list[np.ndarray]] = {each: [] for each in by_communicator}
    for there, some in by_device.items():
        numbers, rows = numbers_of([piece for _, piece in some])
        numbers, stop = there.to_numpy(numbers), 0
        for (communicator, _), count in zip(some, rows, strict=True):
            start, stop = stop, stop + count
            found[communicator].append(numbers[start:stop])
    return {communicator: np.concatenate(parts) for communicator, parts in found.items()}


def _copies(parameters: list[Parameter]) -> set[Storage]:
    """The storages that ranks of another stage count: of copies alone (fsdp.group.GroupKey.tied)."""
    return {parameter.storage for parameter in parameters if not parameter.counts}


def _exact_norm(by_communicator: Pieces, others: Communicator | None, norm_type: float) -> float:
    if norm_type not in (1, 2):
        raise ValueError(
            f"norm_type must be 1, 2 or infinity with set_world_invariant, which needs exact norms; got "
            f"{norm_type}"
        )
    table = np.zeros((256, 2), np.int64)
    for communicator, tables in _on_host(by_communicator, lambda some: _tables(some, int(norm_type))).items():
        part = tables.reshape(-1, 256, 2).sum(0)
        if communicator is not None:
            communicator.all_reduce(part.reshape(-1), op="sum", stream=device.current().current_stream)
        table += part
    if others is not None:
        others.all_reduce(table.reshape(-1), op="sum", stream=device.current().current_stream)
    return norm_of(table, int(norm_type))


def _tables(pieces: list[Array], p: int) -> tuple[Array, list[int]]:
    """kernels.reduce.exact_power_sums of pieces of one device: int64 (256 for each, 2)."""
    here = device.of(pieces[0])
    tables = here.empty((len(pieces), 256, 2), np.int64)
    for table, piece in zip(tables, pieces, strict=True):
        here.copy(table, here.kernels.reduce.exact_power_sums(piece, p))
    return tables.reshape(-1, 2), [256] * len(pieces)


def _power_sums(pieces: list[Array], p: float) -> tuple[Array, list[int]]:
    """Float64 pairs (n, 2) whose exact sum is the sum of |g| ** p over pieces of one device; n may be 0.

    Written into one array: so the host waits once if it wants them, and a CUDA graph can have them captured.
    (To join arrays, CuPy uploads a table of where they are.)
    """
    here = device.of(pieces[0])
    kernels = here.kernels.reduce
    rows = [kernels.power_rows(piece.size) for piece in pieces]
    sums, stop = here.empty((sum(rows), 2), np.float64), 0
    for piece, count in zip(pieces, rows, strict=True):
        start, stop = stop, stop + count
        kernels.power_sums(piece, p, sums[start:stop])
    return sums, rows


def _everyones_sums(communicator: Communicator | None, sums: np.ndarray) -> list[float]:
    """Numbers whose exact sum is the sum of |g| ** p over all ranks: a (high, low) of each, not added yet."""
    values = sums.ravel().tolist()
    if communicator is None:
        return values
    high = _rounded_sum(values)
    low = _rounded_sum([*values, -high]) if isfinite(high) else 0.0
    everyone = np.zeros((communicator.size, 2), np.float64)
    everyone[communicator.rank] = high, low
    communicator.all_reduce(everyone.reshape(-1), op="sum", stream=device.current().current_stream)
    return everyone.ravel().tolist()


def _rounded_sum(values: list[float]) -> float:
    """The exact sum, rounded once; infinity where it is too large."""
    try:
        return fsum(values)
    except OverflowError:
        return inf


def _largest(by_communicator: Pieces, others: Communicator | None) -> float:
    largest = np.zeros(1, np.float64)
    for communicator, values in _on_host(by_communicator, _largest_of).items():
        value = values.max(0)
        if communicator is not None:
            communicator.all_reduce(value, op="max", stream=device.current().current_stream)
        np.maximum(largest, value, out=largest)  # nan wins, unlike in Python's max
    if others is not None:
        others.all_reduce(largest, op="max", stream=device.current().current_stream)
    return float(largest[0])


def _largest_of(pieces: list[Array]) -> tuple[Array, list[int]]:
    """The largest |g| of each of some pieces of one device: float64 (n, 1)."""
    here = device.of(pieces[0])
    found = here.empty((len(pieces), 1), np.float64)
    for row, piece in zip(found, pieces, strict=True):
        here.kernels.reduce.abs_max(piece, row)
    return found, [1] * len(pieces)


def _gradient_pieces(parameters: Iterable[Parameter]) -> Iterable[tuple[Storage, np.ndarray]]:
    """(storage, 1-D view of its gradient), neighbouring parameters of one storage as one view."""
    ranges: dict[Storage, list[tuple[int, int]]] = {}
    for parameter in parameters:
        held = parameter.storage.range_of(parameter)
        if parameter.requires_grad and not parameter.absent:
            ranges.setdefault(parameter.storage, []).append(held)
    for storage, pieces in ranges.items():
        gradient = storage.complete_gradient()
        if gradient is None:
            gradient, pieces = np.zeros(0, np.float32), []
        # A rank that holds nothing of a storage still joins its all-reduce, with an empty piece.
        for start, stop in merged(pieces) or [(0, 0)]:
            yield storage, gradient[start:stop]


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, with ranges that touch joined into one, and empty ones left out."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start == stop:
            continue
        if result and result[-1][1] >= start:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result
