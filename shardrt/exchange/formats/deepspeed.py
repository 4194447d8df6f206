"""Checkpoints of DeepSpeed, ZeRO-1, 2 and 3: a folder of files of torch.save for each number of ranks.

Read and written as DeepSpeed 0.19 does (runtime/engine.py, runtime/zero/stage_1_and_2.py, stage3.py, and
utils/zero_to_fp32.py, which reads older ones too). Weights are the float32 master weights. In stages 1 and 2
the parameters of an optimizer group lie one after the other, and each rank has an equal part of that; in
stage 3 each parameter is cut into equal parts, and a rank has one of each.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.checkpoint.manifest import as_read
from shardrt.exchange.checkpoint import (
    FIRST_MOMENT,
    PARAMETER,
    SECOND_MOMENT,
    BadCheckpoint,
    Checkpoint,
    Joined,
    Tensor,
    Training,
)
from shardrt.exchange.formats.deepspeed_write import files
from shardrt.exchange.torch_zip import open_torch
from shardrt.untrusted import read_regular

__all__ = ["DIALECT", "STATE", "files", "read", "recognises"]

DIALECT, STATE = "huggingface", True
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{2,6})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{2,6})_optim_states\.pt")
_LATEST = "latest"
_PARTITIONS = "single_partition_of_fp32_groups"
_FLAT = "fp32_flat_groups"
_ALIGNED = 2  # elements: a flat group of stages 1 and 2 is padded to a multiple of this times the ranks
_CLASSES = (  # whose objects are in the files: of no use here
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "argparse.Namespace",
    "torch.float16",
    "torch.bfloat16",
    "torch.float32",
)
_MOMENTS = (FIRST_MOMENT, SECOND_MOMENT)
# Of a file of the model's: what is read, or means nothing without DeepSpeed; the rest is the program's own.
_KNOWN = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "lr_scheduler",
    "global_steps",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
}


def recognises(path: Path) -> bool:
    """Whether a folder is one of DeepSpeed's, or has one that its file `latest` names."""
    folder = path / _tag(path) if (path / _LATEST).is_file() else path
    return any(_MODEL.fullmatch(child.name) for child in folder.iterdir()) if folder.is_dir() else False


def read(path: Path) -> Checkpoint:
    """Open such a folder.

    Raises:
        BadCheckpoint: for damaged or missing files, for tensor parallelism (several mp_rank), and for state
            that lies on NVMe.
        OSError: if the file system fails.
    """
    folder = path / _tag(path) if (path / _LATEST).is_file() else path
    models, optimizers = _ranks(folder, _MODEL), _ranks(folder, _OPTIMIZER)
    if not models:
        raise BadCheckpoint(f"{folder}: the folder has no *_model_states.pt")
    states = [_Table(file, open_torch(file, _CLASSES)) for file in models]
    result = Checkpoint(path, {})
    result.training = _training(states[0], result.left)
    _add_buffers(states[0], result)
    if optimizers:
        _add_partitions(states, [_Table(file, open_torch(file, _CLASSES)) for file in optimizers], result)
    else:
        _add_whole(states[0], result)
    for name, source in states[0].table("shared_params").items():
        if (PARAMETER, source) in result.tensors:
            result.tensors[PARAMETER, name] = result.tensors[PARAMETER, source]
    return result


class _Table:
    """A table of a file, whose entries are checked when they are taken. `where` is for messages."""

    def __init__(self, where: Any, values: Any) -> None:
        if not isinstance(values, dict):
            raise BadCheckpoint(f"{where} must be a table, got {type(values).__name__}")
        self.where, self.values = where, values

    def table(self, name: str) -> dict[str, Any]:
        """A table inside; empty where it is absent or None."""
        return self._of(name, dict, {})

    def list(self, name: str) -> list[Any]:
        """A list inside; empty where it is absent or None."""
        return self._of(name, list, [])

    def natural(self, name: str) -> int:
        """A number of steps."""
        value = self._of(name, int, 0)
        if not 0 <= value < 1 << 62:
            raise self.bad(name, "must be a natural number")
        return value

    def inside(self, name: str) -> "_Table":
        """A table that must be there."""
        return _Table(f"{self.where}: {name}", self.values.get(name))

    def bad(self, name: Any, message: str) -> BadCheckpoint:
        """An error about an entry."""
        return BadCheckpoint(f"{self.where}: {name!r} {message}")

    def _of(self, name: str, kind: type, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.bad(name, f"must be a {kind.__name__}, got {type(value).__name__}")
        return value


def _tag(path: Path) -> str:
    """The folder that `latest` names."""
    name = read_regular(path / _LATEST, 4096).decode(errors="replace").strip()
    if not re.fullmatch(r"[\w.-]{1,255}", name) or not name.strip("."):
        raise BadCheckpoint(f"{path / _LATEST}: {name[:80]!r} is not the name of a folder")
    return name


def _ranks(folder: Path, pattern: re.Pattern) -> list[Path]:
    """The files of all data-parallel ranks, in order."""
    found = {}
    for child in folder.iterdir():
        if named := pattern.fullmatch(child.name):
            if int(named[2]):
                raise BadCheckpoint(
                    f"{child}: checkpoints of tensor parallelism (several mp_rank) are not read"
                )
            found[int(named[1] or 0)] = child
    if found.keys() != set(range(len(found))):
        missing = min(set(range(max(found))) - found.keys())
        raise BadCheckpoint(
            f"{folder}: files of rank {missing} are missing, those of rank {max(found)} are here"
        )
    return [found[rank] for rank in range(len(found))]


def _training(state: _Table, left: list[str]) -> Training:
    """Counts, and what the program has put there itself (client_state)."""
    state.natural("global_samples"), state.natural("skipped_steps")
    kept = {name: value for name, value in state.values.items() if name not in _KNOWN}
    for name in ("buffer_names", "shared_params", "lr_scheduler"):
        kept[name] = state.values.get(name)
    filled = {name: value for name, value in kept.items() if value not in (None, [], {})}
    return Training(step=state.natural("global_steps"), extra=_plain(filled, left))


def _plain(values: dict[str, Any], left: list[str]) -> dict[str, Any]:
    """The entries that any format can hold: numbers, text, lists and tables. Adds lines about the others."""
    plain = {}
    for name, value in values.items():
        try:
            as_read({str(name): value})
            plain[str(name)] = value
        except (TypeError, ValueError):
            left.append(f"{str(name)[:80]}: it is not a plain value")
    return plain


def _add_buffers(state: _Table, result: Checkpoint) -> None:
    module = state.table("module")
    for name in state.list("buffer_names"):
        if isinstance(name, str) and name in module:
            result.tensors[PARAMETER, name] = _tensor(state, name, module[name])


def _add_whole(state: _Table, result: Checkpoint) -> None:
    """Stage 0: whole weights, and PyTorch's own optimizer state, whose parameters have numbers.

    Also stages 1 and 2 without the optimizer's files. In stage 3 those have the weights.
    """
    module, zero = state.table("module"), {}
    for table in (*state.list("param_shapes"), state.table("frozen_param_shapes")):
        zero |= _shapes(state, table)
    for name, value in module.items():
        tensor = _tensor(state, name, value)
        if zero.get(name, tensor.shape) != tensor.shape:
            raise state.bad(name, "is not whole: ZeRO-3 has it in *_optim_states.pt, which are not here")
        result.tensors[PARAMETER, name] = tensor
    if zero:
        result.left.append("optimizer state: *_optim_states.pt, which have it, are not here")
    elif state.table("optimizer") and not _add_numbered(state, result):
        result.left.append(
            "optimizer state, and float32 weights of 16-bit ones: ZeRO-0 with several groups keeps them by "
            "numbers, which do not say the parameters' names"
        )


def _add_numbered(state: _Table, result: Checkpoint) -> bool:
    """Add the state of PyTorch's optimizer, if it has one group, of all parameters, in the module's order.

    With 16-bit weights the float32 master weights are there too, and the count of updates is one too large:
    DeepSpeed makes its moments by an update without gradients (runtime/fp16/unfused_optimizer.py), and then
    corrects their bias by that count. So the count stays as it is.
    """
    outer = optimizer = state.inside("optimizer")
    if "optimizer_state_dict" in outer.values:
        optimizer = outer.inside("optimizer_state_dict")
    found, groups = optimizer.table("state"), optimizer.list("param_groups")
    buffers = {name for name in state.list("buffer_names") if isinstance(name, str)}
    names = [name for name in state.table("module") if name not in buffers]
    if len(groups) != 1 or set(found) != set(range(len(names))):
        return False
    masters = outer.list("fp32_groups")
    masters = masters[0] if masters and isinstance(masters[0], list) else []
    held = [_Table(f"{optimizer.where}: state", found[number]) for number in range(len(names))]
    moments = [
        {kind: _tensor(of, kind, of.values[kind]) for kind in _MOMENTS if kind in of.values} for of in held
    ]
    for kinds, master in zip(moments, masters, strict=False):
        kinds[PARAMETER] = _tensor(outer, "fp32_groups", master)
    shapes = [result.tensors[PARAMETER, name].shape for name in names]
    if any(kind.shape != shape for of, shape in zip(moments, shapes, strict=True) for kind in of.values()):
        return False
    for name, of, kinds in zip(names, held, moments, strict=True):
        result.tensors |= {(kind, name): tensor for kind, tensor in kinds.items()}
        if FIRST_MOMENT in kinds:
            result.training.steps[name] = _count(of, of.values.get("step", 0))
    settings = _Table(f"{optimizer.where}: param_groups", groups[0]).values
    result.training.groups.append({**_plain(settings, result.left), "params": names})
    return True


def _add_partitions(states: list[_Table], files: list[_Table], result: Checkpoint) -> None:
    """Stages 1 to 3: weights and optimizer state of each parameter, from the parts of all ranks."""
    optimizers = [file.inside("optimizer_state_dict") for file in files]
    shapes = [_shapes(states[0], group) for group in states[0].list("param_shapes")]
    ranks = [_Rank.of(optimizer) for optimizer in optimizers]
    _check_together(ranks, len(shapes))
    fragments = _equal_parts if ranks[0].stage == 3 else _slices
    for name, shape, pieces in fragments(ranks, shapes):
        _add_parameter(result, ranks, name, shape, pieces)
    for name, shape in _shapes(states[0], states[0].table("frozen_param_shapes")).items():
        parts = [_tensor(state, name, state.table("frozen_param_fragments").get(name)) for state in states]
        _add(result, PARAMETER, name, shape, [(part, 0, prod(part.shape)) for part in parts], states[0].where)
    _add_groups(ranks[0], shapes, result)
    clip = optimizers[0].values.get("clip_grad", states[0].table("ds_config").get("gradient_clipping"))
    if isinstance(clip, int | float) and clip > 0:
        result.left.append(f"clip_grad {str(clip)[:20]}: B's own settings say how gradients are clipped")
    if optimizers[0].values.get("dynamic_loss_scale") is True:
        result.left.append("loss_scaler: the loss scale of fp16 begins where B's own settings say")


def _check_together(ranks: list["_Rank"], groups: int) -> None:
    """Refuse files of several runs, or of several steps of one, in a folder."""
    first = ranks[0]
    if first.stage < 3 and len(first.groups) != groups:
        raise BadCheckpoint(f"{first.where}: it has {len(first.groups)} groups, and param_shapes {groups}")
    for rank in ranks:
        worlds = rank.optimizer.values.get("partition_count")  # of each group; experts have fewer ranks
        worlds = worlds if isinstance(worlds, list) else [worlds]
        if any(world != len(ranks) for world in worlds):
            raise BadCheckpoint(
                f"{rank.where}: it is one of {str(worlds)[:80]} ranks' files, {len(ranks)} are here"
            )
        if (rank.stage, len(rank.groups)) != (first.stage, len(first.groups)):
            raise BadCheckpoint(f"{rank.where}: it has other groups than rank 0")
        if any(one.keys() != other.keys() for one, other in zip(rank.groups, first.groups, strict=True)):
            raise BadCheckpoint(f"{rank.where}: it has other kinds of optimizer state than rank 0")
        if rank.steps != first.steps:
            raise BadCheckpoint(f"{rank.where}: it is of step {rank.steps}, rank 0 of step {first.steps}")


def _add_groups(rank: "_Rank", shapes: list[dict[str, tuple[int, ...]]], result: Checkpoint) -> None:
    """The parameter groups; in stage 3 one may have several flat tensors."""
    if not rank.settings:
        result.left.append("the optimizer's settings: an elastic checkpoint does not say them")
        return
    at = 0
    for group in rank.settings:
        numbers = group.get("params")
        count = len(numbers) if isinstance(numbers, list) and len(shapes) == len(rank.groups) else 1
        names = [name for of in shapes[at : at + count] for name in of]
        result.training.groups.append({**_plain(group, result.left), "params": names})
        at += count


Piece = tuple[int, int, int, int]  # rank, optimizer group, first element there, elements


@dataclass(frozen=True)
class _Rank:
    """What a rank has: of each optimizer group flat tensors by kind, and its updates."""

    where: str
    stage: int
    groups: list[dict[str, Tensor]]
    steps: list[int]
    settings: list[dict[str, Any]]
    optimizer: _Table

    @classmethod
    def of(cls, optimizer: _Table) -> "_Rank":
        stage = 3 if _FLAT in optimizer.values else 2
        name = _FLAT if stage == 3 else _PARTITIONS
        weights = optimizer.list(name)
        if not weights:
            raise optimizer.bad(
                name, "is not there: state that lies on NVMe, or in another layout, is not read"
            )
        base = optimizer.values.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
        found = base if isinstance(base, list) else _Table(optimizer.where, base).table("state")
        settings = [] if isinstance(base, list) else _Table(optimizer.where, base).list("param_groups")
        groups, steps = [], []
        found = dict(enumerate(found)) if isinstance(found, list) else found
        for number, flat in enumerate(weights):
            state = _Table(f"{optimizer.where}: state", found.get(number, {}))
            moments = {
                kind: _tensor(state, kind, state.values[kind]) for kind in _MOMENTS if kind in state.values
            }
            groups.append({PARAMETER: _tensor(optimizer, name, flat)} | moments)
            steps.append(_count(state, state.values.get("step", 0)))
        return cls(
            optimizer.where, stage, groups, steps, [g for g in settings if isinstance(g, dict)], optimizer
        )

    def elements(self, group: int) -> int:
        """Those of a group that this rank has."""
        return prod(self.groups[group][PARAMETER].shape)


def _slices(ranks: list[_Rank], shapes: list[dict]) -> Iterator[tuple[str, tuple[int, ...], list[Piece]]]:
    """Stages 1 and 2: (name, shape, pieces): parameters lie one after the other over the ranks.

    The files also have an address of each piece (param_slice_mappings), which is not read: with
    round_robin_gradients DeepSpeed 0.19 writes those of another order than its flat tensors have.
    """
    for group, names in enumerate(shapes):
        paddings = _paddings(ranks[0], group, len(names))
        begin, each = 0, ranks[0].elements(group)  # only the last ranks may have less, without padding
        for (name, shape), padding in zip(names.items(), paddings, strict=True):
            end, pieces = begin + prod(shape), []
            for rank in range(begin // max(each, 1), min(len(ranks), -(-end // max(each, 1)))):
                start, stop = max(begin, rank * each), min(end, rank * each + each)
                if start < stop:
                    pieces.append((rank, group, start - rank * each, stop - start))
            yield name, shape, pieces
            begin = end + padding
        left = sum(rank.elements(group) for rank in ranks) - begin
        if not -1 < left < _ALIGNED * len(ranks):
            raise ranks[0].optimizer.bad(
                _PARTITIONS, f"has {left} elements of group {group} more than the parameters in param_shapes"
            )


def _paddings(rank: _Rank, group: int, parameters: int) -> list[int]:
    """Elements behind each parameter of a group that belong to none (parameter_alignment)."""
    name = "param_alignment_paddings"
    paddings = rank.optimizer.list(name)
    if not paddings:
        return [0] * parameters
    found = paddings[group] if group < len(paddings) else None
    if not isinstance(found, list) or len(found) != parameters or not all(map(_is_small, found)):
        raise rank.optimizer.bad(name, f"must have {parameters} natural numbers for group {group}")
    return found


def _is_small(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 20


def _equal_parts(
    ranks: list[_Rank], shapes: list[dict]
) -> Iterator[tuple[str, tuple[int, ...], list[Piece]]]:
    """Stage 3: (name, shape, pieces): of each parameter each rank has an equal part, the last ones less.

    Parameters lie one after the other over all flat groups, and none lies in two.
    """
    group, begin, groups = 0, 0, len(ranks[0].groups)
    for name, shape in (item for names in shapes for item in names.items()):
        size = prod(shape)
        each = -(-size // len(ranks))
        while group < groups - 1 and begin >= ranks[0].elements(group):
            group, begin = group + 1, begin - ranks[0].elements(group)
        counts = [max(0, min(each, size - each * rank)) for rank in range(len(ranks))]
        yield name, shape, [(rank, group, begin, count) for rank, count in enumerate(counts) if count]
        begin += each
    left = sum(map(ranks[0].elements, range(group, groups))) - begin
    if left:
        raise ranks[0].optimizer.bad(_FLAT, f"has {left} elements more than the parameters in param_shapes")


def _add_parameter(
    result: Checkpoint, ranks: list[_Rank], name: str, shape: tuple[int, ...], pieces: list[Piece]
) -> None:
    """Add the weights of a parameter, and its moments if all ranks have them."""
    for kind in (PARAMETER, *_MOMENTS):
        if all(kind in ranks[rank].groups[group] for rank, group, _, _ in pieces):
            parts = [(ranks[rank].groups[group][kind], start, count) for rank, group, start, count in pieces]
            _add(result, kind, name, shape, parts, ranks[0].where)
    if pieces and (FIRST_MOMENT, name) in result.tensors:  # a parameter without elements has no pieces
        rank, group, *_ = pieces[0]
        result.training.steps[name] = ranks[rank].steps[group]


def _add(
    result: Checkpoint,
    kind: str,
    name: str,
    shape: tuple[int, ...],
    parts: list[tuple[Tensor, int, int]],
    where: str,
) -> None:
    """Add a tensor that lies in parts of others, if these have all of it."""
    left = prod(shape)
    kept = []
    for tensor, start, count in parts:
        count = min(count, left)  # a frozen parameter's parts have padding
        if start + count > prod(tensor.shape):
            raise BadCheckpoint(f"{where}: {name!r} lies outside the flat tensor of its group")
        left -= count
        kept.append((tensor, start, count))
    if left:
        raise BadCheckpoint(f"{where}: {left} elements of {name!r} {shape} are missing")
    dtypes = {tensor.dtype for tensor, _, _ in kept}
    if len(dtypes) > 1:
        raise BadCheckpoint(f"{where}: the parts of {name!r} have several types")
    result.tensors[kind, name] = Joined(dtypes.pop() if dtypes else np.dtype(np.float32), shape, kept)


def _shapes(state: _Table, table: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape, checked."""
    found = {}
    for name, shape in _Table(f"{state.where}: param_shapes", table).values.items():
        sizes = tuple(shape) if isinstance(shape, tuple | list) else (-1,)
        if not isinstance(name, str) or not all(type(n) is int and 0 <= n < 1 << 48 for n in sizes):
            raise state.bad("param_shapes", f"has an entry {str(name)[:80]!r} that is no shape")
        if prod(sizes) >= 1 << 48:
            raise state.bad("param_shapes", f"has a shape {sizes} of {name!r} that is too large")
        found[name] = sizes
    return found


def _tensor(where: _Table, name: Any, value: Any) -> Tensor:
    if not hasattr(value, "read_into"):
        raise where.bad(name, f"must be a tensor, got {type(value).__name__}")
    return value


def _count(where: _Table, value: Any) -> int:
    """A number of updates, which may be a tensor of one number."""
    if hasattr(value, "read_into") and prod(value.shape) == 1:
        number = np.empty(1, value.dtype)
        value.read_into(number, 0)
        value = float(number[0])
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 53:
        raise where.bad("step", f"must be a number of updates, got {str(value)[:80]}")
    return int(value)
