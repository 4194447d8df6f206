"""Writes DeepSpeed's folders for ZeRO-1, 2 and 3: what engine.load_checkpoint reads on a number of ranks.

DeepSpeed looks at no name when it loads optimizer state. The program's optimizer must have the groups of the
files, with the parameters in their order. A program takes both from a file of the model's:

    saved = torch.load("B/global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    named = dict(model.named_parameters())
    groups = [{"params": [named[name] for name in group]} for group in saved["param_shapes"]]

Stage 3's sub_group_size must be larger than a rank's part of a group, and parameter_alignment,
round_robin_gradients and elastic_checkpoint must be off, as they are unless a program sets them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from shardrt.exchange.checkpoint import (
    FIRST_MOMENT,
    PARAMETER,
    SECOND_MOMENT,
    BadCheckpoint,
    Checkpoint,
    Joined,
    Tensor,
)
from shardrt.exchange.formats import Options, Plan
from shardrt.exchange.output import File
from shardrt.exchange.torch_file import torch_segments
from shardrt.exchange.unpickle import Called
from shardrt.exchange.views import Cast

VERSION = "0.19.8"  # whose layout this is
_KINDS = (PARAMETER, FIRST_MOMENT, SECOND_MOMENT)
_ALIGNED = 2  # elements: each rank's part of a flat group is a multiple, in stages 1 and 2
_FLOAT32 = np.dtype(np.float32)
_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}  # of torch.optim.AdamW
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # of batch norm


def files(checkpoint: Checkpoint, options: Options) -> Plan:
    """A file of the model's, or one for each rank in stage 3, and the optimizer's for each rank.

    Raises:
        BadCheckpoint: if the checkpoint has no weights, or types that DeepSpeed's optimizers do not have.
    """
    layout = _layout(checkpoint)
    training, step = checkpoint.training, _step(checkpoint)
    extra, left = _plain(training.extra)
    folder, write = f"global_step{step}", []
    half = options.zero_dtype == "bfloat16"
    stage3 = options.zero_stage == 3
    for rank in range(options.ranks if stage3 else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage3 else "mp_rank_00_model_states.pt"
        write.append((name, {"skipped_steps": 0} | extra | _model(layout, checkpoint, options, rank, step)))
    for rank in range(options.ranks):
        prefix = "bf16_" if half else ""
        optimizer = _stage3(layout, rank, options) if stage3 else _stage12(layout, rank, options)
        name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        write.append((name, {"optimizer_state_dict": optimizer, "ds_version": VERSION}))
    found = [
        File(f"{folder}/{name}", torch_segments(value, f"{folder}/{name}"), "crc") for name, value in write
    ]
    return Plan([*found, File("latest", [folder.encode()])], left=[*layout.left, *left])


@dataclass(frozen=True)
class _Filled:
    """A tensor of equal values."""

    shape: tuple[int, ...]
    value: float = 0.0
    dtype: np.dtype = _FLOAT32

    def read_into(self, out: np.ndarray, start: int) -> None:
        """As Tensor."""
        out[...] = self.value


@dataclass(frozen=True)
class _Group:
    """A parameter group: (kind, name) -> float32 tensor, its names in order, and its updates."""

    names: list[str]
    tensors: dict[tuple[str, str], Tensor]
    settings: dict[str, Any]
    step: int

    def size(self, name: str) -> int:
        """Elements of a parameter."""
        return prod(self.tensors[PARAMETER, name].shape)


@dataclass(frozen=True)
class _Layout:
    groups: list[_Group]
    frozen: list[str]
    buffers: list[str]
    shared: dict[str, str]
    left: list[str]


def _layout(checkpoint: Checkpoint) -> _Layout:
    """Which tensors are trained, in which groups; frozen; buffers; and names of the same parameter."""
    weights = {name: tensor for (kind, name), tensor in checkpoint.tensors.items() if kind == PARAMETER}
    if not weights:
        raise BadCheckpoint(f"{checkpoint.path}: there are no weights")
    left, tensors = [], checkpoint.tensors
    for kind, name in tensors:
        if kind not in _KINDS:
            left.append(f"{kind} of {name}: only AdamW's state is written for DeepSpeed")
    shared = _shared(weights, checkpoint)
    said = set(checkpoint.training.extra.get("buffer_names") or ())
    buffers = [
        name
        for name, tensor in weights.items()
        if name in said or not _is_float(tensor.dtype) or name.rpartition(".")[2] in _BUFFERS
    ]
    trained = [name for kind, name in tensors if kind == FIRST_MOMENT]
    lost = [name for name in trained if name not in weights or (SECOND_MOMENT, name) not in tensors]
    if lost:
        raise BadCheckpoint(f"{checkpoint.path}: {lost[0]!r} has no weights or no second moment")
    if not trained:
        left.append("optimizer state: there is none, so DeepSpeed's begins with zeros")
        trained = [name for name in weights if name not in shared and name not in buffers]
    groups = _groups(checkpoint, trained, weights, left)
    beside = {*trained, *shared, *buffers}
    return _Layout(groups, [name for name in weights if name not in beside], buffers, shared, left)


def _shared(weights: dict[str, Tensor], checkpoint: Checkpoint) -> dict[str, str]:
    """Name without optimizer state -> name of the same parameter.

    The same tensor is so, and what the source says (shared_params), which other formats hold twice.
    """
    first: dict[int, str] = {}
    for name, tensor in weights.items():
        if id(tensor) not in first or (FIRST_MOMENT, name) in checkpoint.tensors:
            first[id(tensor)] = name
    found = {name: first[id(tensor)] for name, tensor in weights.items() if first[id(tensor)] != name}
    said = checkpoint.training.extra.get("shared_params")
    for name, of in said.items() if isinstance(said, dict) else ():
        known = name in weights and isinstance(of, str) and of in weights and of not in (name, *found)
        if known and weights[name].shape == weights[of].shape:
            found |= {} if (FIRST_MOMENT, name) in checkpoint.tensors else {name: of}
    return found


def _groups(
    checkpoint: Checkpoint, trained: Sequence[str], weights: dict[str, Tensor], left: list[str]
) -> list[_Group]:
    """The groups of the source; one more for parameters in none, which have no optimizer state."""
    given, rest = list(checkpoint.training.groups), dict.fromkeys(trained)
    for group in given:
        for name in group["params"]:
            rest.pop(name, None)
    if rest:
        values = ", ".join(f"{name} {value}" for name, value in _DEFAULTS.items())
        left.append(f"the optimizer's settings: not known, so one group has {values}; set them after loading")
        given.append({**_DEFAULTS, "params": list(rest)})
    steps, known, result = checkpoint.training.steps, set(trained), []
    for group in given:
        names = [name for name in group["params"] if name in known]
        if not names:
            continue
        counts = {steps.get(name, 0) for name in names}
        if len(counts) > 1:
            left.append(
                f"steps: the parameters of a group were updated {sorted(counts)} times; the most stay"
            )
        tensors: dict[tuple[str, str], Tensor] = {}
        for name in names:
            for kind in _KINDS:
                tensor = checkpoint.tensors.get((kind, name), _Filled(weights[name].shape))
                if not _is_float(tensor.dtype) or tensor.shape != weights[name].shape:
                    raise BadCheckpoint(
                        f"{kind} of {name}: {tensor.dtype} {tensor.shape} is not float or not its shape"
                    )
                if tensor.dtype.itemsize > 4:
                    left.append(f"{kind} of {name}: {tensor.dtype} becomes float32")
                tensors[kind, name] = tensor if tensor.dtype == _FLOAT32 else Cast(tensor, _FLOAT32)
        settings = _DEFAULTS | _plain({k: v for k, v in group.items() if k != "params"})[0]
        settings["betas"] = tuple(settings["betas"])
        result.append(_Group(names, tensors, settings, max(counts)))
    return result


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"


def _step(checkpoint: Checkpoint) -> int:
    step = checkpoint.training.step
    return max(checkpoint.training.steps.values(), default=0) if step is None else step


def _plain(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The entries that torch.save holds without a class, and lines about the others."""
    plain = {name: value for name, value in values.items() if _is_plain(value)}
    return plain, [f"{name}: it is no plain value" for name in values if name not in plain]


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str | int) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | bool | bytes)


def _model(layout: _Layout, checkpoint: Checkpoint, options: Options, rank: int, step: int) -> dict[str, Any]:
    """What a file of the model's holds: in stage 3 only buffers and parts of frozen parameters."""
    half = np.dtype(ml_dtypes.bfloat16) if options.zero_dtype == "bfloat16" else None
    stage3, module, fragments, shapes = options.zero_stage == 3, {}, {}, {}
    for kind, name in checkpoint.tensors:
        if kind != PARAMETER:
            continue
        tensor = checkpoint.tensors[kind, name]
        if name not in layout.buffers and half is not None:
            tensor = tensor if tensor.dtype == half else Cast(tensor, half)
        if name in layout.frozen:
            shapes[name] = Called("torch.Size", (tuple(tensor.shape),))
            each = -(-prod(tensor.shape) // options.ranks)
            fragments[name] = _part([tensor], rank * each, each, each) if stage3 else tensor
        empty = stage3 and name not in layout.buffers
        module[name] = _Filled((0,), 0.0, tensor.dtype) if empty else tensor
    training = checkpoint.training
    return {
        "module": module,
        "buffer_names": layout.buffers,
        "optimizer": None,
        "param_shapes": [
            {
                name: Called("torch.Size", (tuple(group.tensors[PARAMETER, name].shape),))
                for name in group.names
            }
            for group in layout.groups
        ],
        "frozen_param_shapes": shapes if shapes or stage3 else None,
        "shared_params": layout.shared,
        "frozen_param_fragments": fragments if shapes or stage3 else None,
        "lr_scheduler": _scheduler(training.extra.get("lr_scheduler"), layout, step),
        "data_sampler": None,
        "random_ltd": None,
        "global_steps": step,
        "dp_world_size": options.ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_version": VERSION,
    }


def _scheduler(given: Any, layout: _Layout, step: int) -> dict[str, Any]:
    """The scheduler's state: the source's, or a count that PyTorch's and DeepSpeed's schedulers read."""
    if isinstance(given, dict) and _is_plain(given):
        return given
    rates = [group.settings["lr"] for group in layout.groups]
    return {
        "last_epoch": step,
        "_step_count": step + 1,
        "last_batch_iteration": step - 1,
        "_last_lr": rates,
        "lr_lambdas": [],
    }


def _part(tensors: Sequence[Tensor], start: int, count: int, size: int) -> Tensor:
    """Elements [start, start + count) of tensors one after the other, then zeros up to `size` elements."""
    pieces: list[tuple[Tensor, int, int]] = []
    begin, done = 0, 0
    for tensor in tensors:
        length = prod(tensor.shape)
        low, high = max(start, begin), min(start + count, begin + length)
        if low < high:
            pieces.append((tensor, low - begin, high - low))
            done += high - low
        begin += length
    if done < size:
        dtype = tensors[0].dtype if tensors else _FLOAT32
        pieces.append((_Filled((size - done,), 0.0, dtype), 0, size - done))
    return Joined(tensors[0].dtype if tensors else _FLOAT32, (size,), pieces)


def _base(groups: Sequence[_Group], moments: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """The state_dict of torch.optim.AdamW with one flat parameter for each group."""
    return {
        "state": {
            number: {"step": _Filled((), float(group.step)), **moments[number]}
            for number, group in enumerate(groups)
        },
        "param_groups": [{**group.settings, "params": [number]} for number, group in enumerate(groups)],
    }


def _stage3(layout: _Layout, rank: int, options: Options) -> dict[str, Any]:
    """A rank's equal part of each parameter, the last ones with zeros behind."""
    flat: list[dict[str, Tensor]] = []
    for group in layout.groups:
        kinds = {}
        for kind in _KINDS:
            parts = []
            for name in group.names:
                each = -(-group.size(name) // options.ranks)
                parts.append(_part([group.tensors[kind, name]], rank * each, each, each))
            size = sum(prod(part.shape) for part in parts)
            kinds[kind] = _part(parts, 0, size, size)
        flat.append(kinds)
    moments = [{kind: kinds[kind] for kind in _KINDS[1:]} for kinds in flat]
    scaler = Called("deepspeed.runtime.fp16.loss_scaler.LossScaler", (), {"cur_scale": 1.0, "dynamic": False})
    return {
        "zero_stage": 3,
        "loss_scaler": scaler,
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": options.ranks,
        "optimizer_state_dict": _base(layout.groups, moments),
        "fp32_flat_groups": [kinds[PARAMETER] for kinds in flat],
    }


def _stage12(layout: _Layout, rank: int, options: Options) -> dict[str, Any]:
    """A rank's part of each group, whose parameters lie one after the other."""
    weights, moments, paddings, places = [], [], [], []
    for group in layout.groups:
        total = sum(map(group.size, group.names))
        size = -(-total // (_ALIGNED * options.ranks)) * _ALIGNED
        start = rank * size
        held = max(0, min(size, total - start))
        of = {kind: [group.tensors[kind, name] for name in group.names] for kind in _KINDS}
        weights.append(_part(of[PARAMETER], start, held, held))  # without padding
        moments.append({kind: _part(of[kind], start, held, size) for kind in _KINDS[1:]})
        paddings.append(size - held)
        places.append(_addresses(group, start, held))
    return {
        "dynamic_loss_scale": False,
        "overflow": False,
        "base_optimizer_state": _base(layout.groups, moments),
        "single_partition_of_fp32_groups": weights,
        "zero_stage": options.zero_stage,
        "group_paddings": paddings,
        "param_alignment_paddings": [[0] * len(group.names) for group in layout.groups],
        "partition_count": [options.ranks] * len(layout.groups),
        "ds_version": VERSION,
        "param_slice_mappings": places,
    }


def _addresses(group: _Group, start: int, held: int) -> dict[str, Called]:
    """Where in a rank's part of a group each parameter's piece lies."""
    found, begin = {}, 0
    for name in group.names:
        low, high = max(start, begin), min(start + held, begin + group.size(name))
        if low < high:
            state = {"numel": high - low, "start": low - start}
            found[name] = Called("deepspeed.utils.tensor_fragment.fragment_address", (), state)
        begin += group.size(name)
    return found
