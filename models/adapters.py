"""LoRA adapters in the files of PEFT: adapter_config.json and adapter_model.safetensors, in and out.

PEFT adapts layers as Hugging Face has them, of which several may be one here (queries, keys and values): each
keeps an A and a B of its own (`parts` of nn.add_lora), so training and files are as PEFT's.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from shardrt import device, nn
from shardrt.checkpoint import CheckpointError
from shardrt.checkpoint.disk import Disk, write_file
from shardrt.checkpoint.state import failures, gathered
from shardrt.checkpoint.tensorfiles import StoredTensor, open_file, read_json
from shardrt.nn.extents import Extent
from shardrt.nn.layers import Linear
from shardrt.nn.lora import adapted_layers, columns_of_parts, is_adapted
from shardrt.nn.ranks import is_leader

from .config_file import Settings
from .formats import Format, Stored
from .gpt import GPT
from .hub import described
from .llama import Llama

LANGUAGE = (GPT, Llama)  # models whose adapters PEFT reads
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KEY = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight")

# What an adapter may say only in this way; all else of PEFT's settings changes nothing of what is computed.
_REQUIRED = {
    "peft_type": "LORA",
    "bias": "none",
    "lora_bias": False,
    "use_dora": False,
    "use_qalora": False,
    "use_bdlora": None,
    "velora_config": None,
    "monteclora_config": None,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "trainable_token_indices": None,
    "target_parameters": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
}
# Starts of an adapter that leave the base as its files have it. With the others, as PiSSA or OLoRA, PEFT
# computes with another base: what the start took out of it.
_STARTS = (True, False, "gaussian", "eva", "orthogonal", "mica")

_INSTEAD = "PEFT's merge_and_unload() gives a whole model to begin from (--init-from)"


@dataclass(frozen=True)
class _Part:
    """A layer of Hugging Face's: its path there, the path of the layer here, and which of its rows it is."""

    theirs: str
    ours: str
    rows: tuple[int, int]
    transposed: bool  # GPT-2's, which PEFT calls fan_in_fan_out


def load_adapter(model: nn.Module, directory: str | Path) -> nn.Module:
    """Give `model` the adapter that PEFT has saved in `directory`, and freeze all else; gives `model` back.

    Call it where nn.add_lora may be called: before fully_shard. Training goes on as PEFT's would: no weight
    decay or gradient crosses from one of its layers to another.

    Raises:
        ValueError: in one line, for settings that change what LoRA computes (DoRA, several ranks in one
            adapter), adapters that start as a part of the base (PiSSA, OLoRA), layers that this
            model has not, and damaged files.
        OSError: if the files can't be read.
    """
    directory = Path(directory)
    _check_kind("load_adapter", model)
    settings = Settings(directory / CONFIG, read_json(directory / CONFIG))
    for name, wanted in _REQUIRED.items():
        if not wanted and settings.get(name) in ([], {}):  # axolotl says "nothing" so
            continue
        try:
            settings.require(name, wanted)
        except ValueError as error:
            raise ValueError(f"{error}; {_INSTEAD}") from None
    settings.one_of("init_lora_weights", *_STARTS, default=True)
    rank, alpha = settings.size("r"), settings.number("lora_alpha", 8)
    dropout = settings.number("lora_dropout", 0.0)
    scale = alpha / (sqrt(rank) if settings.flag("use_rslora") else rank)
    if not scale * rank > 0 or not 0 <= dropout < 1:
        raise ValueError(
            f"{directory / CONFIG}: lora_alpha must be positive and lora_dropout in [0, 1), got {alpha} and "
            f"{dropout}"
        )
    tensors = _by_layer(directory / WEIGHTS, open_file(directory / WEIGHTS))
    together = _layers(directory / WEIGHTS, _parts(model, described(model)[0]), tensors)
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Linear)}
    _check_shapes(directory / WEIGHTS, together, tensors, layers, rank)
    rows = {
        path: tuple(part.rows for part in parts)
        for path, parts in together.items()
        if parts[0].rows != (0, layers[path].weight.whole_shape[0])
    }
    nn.add_lora(
        model,
        rank,
        alpha=scale * rank,
        targets=lambda path, _: path in together,
        dropout=dropout,
        parts=rows,
    )
    for path, parts in together.items():
        _fill(layers[path], [tensors[part.theirs] for part in parts])
    return model


def save_adapter(model: nn.Module, directory: str | Path) -> None:
    """Write the adapters of `model`, sharded or not, as PEFT does, to the new folder `directory`. Collective.

    Rank 0 writes. An adapter of a layer that is several in PEFT becomes one for each.

    Raises:
        ValueError: for a model without adapters or without a format of Hugging Face's.
        CheckpointError: on every rank of a sharded model, where the folder is not empty or writing fails.
    """
    directory = Path(directory)
    _check_kind("save_adapter", model)
    form, _ = described(model)
    layers = {path: module for path, module in model.named_modules() if is_adapted(module)}
    if not layers:
        raise ValueError(f"save_adapter: {type(model).__name__} has no adapters; see nn.add_lora")
    parts = [part for part in _parts(model, form) if part.ours in layers]
    if odd := sorted(layers.keys() - {part.ours for part in parts}):
        raise ValueError(f"save_adapter: the format has no layer for {odd[0]!r}")
    wanted = {id(p): p for layer in layers.values() for p in (layer.lora_a, layer.lora_b)}
    values = {id(p): np.array(array) for p, array in gathered(model) if id(p) in wanted}
    error = None
    if is_leader(model):
        tensors, adapted = {}, []
        for part in parts:
            layer = layers[part.ours]
            pair = _of_part(layer, part, values[id(layer.lora_a)], values[id(layer.lora_b)])
            if pair is not None:
                adapted.append(part.theirs)
                for letter, array in zip("AB", pair, strict=True):
                    tensors[f"{_PREFIX}{part.theirs}.lora_{letter}.weight"] = array
        try:
            _write(directory, tensors, _settings(model, form, adapted, parts, tensors))
        except OSError as failed:
            error = failed
    if errors := failures(model, error):
        raise CheckpointError(f"{directory} was not written: {'; '.join(errors)}") from error


def _check_kind(call: str, model: nn.Module) -> None:
    """PEFT goes by names of modules: in transformers, only language models have those of the files."""
    if not isinstance(model, LANGUAGE):
        raise ValueError(f"{call}: only language models have adapters of PEFT, not a {type(model).__name__}")


def _parts(model: nn.Module, form: Format) -> list[_Part]:
    """The linear layers of Hugging Face's model, in the order in which they lie here."""
    paths = {path for path, module in model.named_modules() if isinstance(module, Linear)}
    shapes = {name: parameter.whole_shape for name, parameter in model.named_parameters()}
    return [
        part
        for name, stored in form.tensors(model.config)
        if name.removesuffix(".weight") in paths
        for part in _of_layer(form, name, stored, shapes[name][0])
    ]


def _of_layer(form: Format, name: str, stored: list[Stored], outputs: int) -> Iterator[_Part]:
    start = 0
    for one in stored:
        stop = start + (outputs if one.rows is None else one.rows)
        theirs = form.full_name(one.name).removesuffix(".weight")
        yield _Part(theirs, name.removesuffix(".weight"), (start, stop), one.transposed)
        start = stop


def _by_layer(path: Path, stored: dict[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Path of a layer of Hugging Face's -> its A and B."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        key = _KEY.fullmatch(name)
        if key is None:
            raise ValueError(
                f"{path}: {name[:200]!r} is no matrix of a LoRA adapter of a linear layer, and no other is "
                f"loaded; {_INSTEAD}"
            )
        found.setdefault(key[1], {})[key[2]] = tensor
    if alone := sorted(theirs for theirs, pair in found.items() if len(pair) < 2):
        raise ValueError(f"{path}: {alone[0]} has one matrix, an adapter has two")
    if not found:
        raise ValueError(f"{path}: the file has no adapter")
    return found


def _layers(path: Path, parts: list[_Part], tensors: dict[str, Any]) -> dict[str, list[_Part]]:
    """Path of a layer here -> its adapted parts."""
    if odd := sorted(tensors.keys() - {part.theirs for part in parts}):
        why = "shares the weights of the embedding" if odd[0].endswith("lm_head") else "is no linear layer"
        raise ValueError(f"{path}: the adapter has {odd[0][:200]!r}, which {why} in this model; {_INSTEAD}")
    together: dict[str, list[_Part]] = {}
    for part in parts:
        if part.theirs in tensors:
            together.setdefault(part.ours, []).append(part)
    return together


def _check_shapes(
    path: Path,
    together: dict[str, list[_Part]],
    tensors: dict[str, dict[str, StoredTensor]],
    layers: dict[str, Linear],
    rank: int,
) -> None:
    for ours, parts in together.items():
        inputs = layers[ours].weight.whole_shape[1]
        for part in parts:
            outputs = part.rows[1] - part.rows[0]
            for letter, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                found = tensors[part.theirs][letter].shape
                if found != shape:
                    raise ValueError(
                        f"{path}: {part.theirs}.lora_{letter} must have shape {shape}, got {found}"
                    )


@dataclass(frozen=True, eq=False)
class _Values:
    """What a matrix of an adapter starts as (nn.init.Initialiser): adapters are small, so it is in memory."""

    flat: np.ndarray

    def fill(self, out: Any, seed: int, key: int, offset: int) -> None:
        """As Initialiser.fill."""
        values = self.flat[offset : offset + out.size]
        device.of(out).copy(out, values.astype(out.dtype, copy=False))


def _fill(layer: Linear, pairs: list[dict[str, StoredTensor]]) -> None:
    """Let a layer's adapter start as the pairs of its parts."""
    a = np.concatenate([_read(pair["A"]) for pair in pairs])
    b = np.zeros(layer.lora_b.shape, np.float32)
    rows = layer.adapter.parts or ((0, len(b)),)
    for (own, columns), pair in zip(columns_of_parts(rows, b.shape[1]), pairs, strict=True):
        b[own, columns] = _read(pair["B"])
    layer.lora_a.init, layer.lora_b.init = _Values(a.reshape(-1)), _Values(b.reshape(-1))


def _read(tensor: StoredTensor) -> np.ndarray:
    size = tensor.shape[0] * tensor.shape[1]
    pieces = [np.array(piece, np.float32) for piece in tensor.pieces(Extent(0, size, size, 1), False)]
    return np.concatenate(pieces).reshape(tensor.shape)


def _of_part(
    layer: Linear, part: _Part, a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """A and B of a layer of Hugging Face's; None if it has no adapter."""
    rows = slice(*part.rows)
    if not layer.adapter.parts:
        return a, np.ascontiguousarray(b[rows])
    for own, columns in columns_of_parts(layer.adapter.parts, b.shape[1]):
        if own == rows:
            return a[columns], np.ascontiguousarray(b[own, columns])
    return None


def _settings(
    model: nn.Module,
    form: Format,
    adapted: list[str],
    parts: list[_Part],
    tensors: dict[str, np.ndarray],
) -> dict[str, Any]:
    """What PEFT's LoraConfig says of these adapters."""
    ranks = {array.shape[0] for name, array in tensors.items() if ".lora_A." in name}
    scales = {(layer.adapter.scale, layer.adapter.dropout) for layer in adapted_layers(model)}
    if len(ranks) > 1 or len(scales) > 1:
        raise ValueError("save_adapter: the adapters have several ranks or scales, PEFT's file has one")
    (rank,), ((scale, dropout),) = ranks, scales
    origin = getattr(model, "origin", None)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(origin.directory) if origin else None,
        "r": rank,
        "lora_alpha": int(scale * rank) if float(scale * rank).is_integer() else scale * rank,
        "lora_dropout": dropout,
        "bias": "none",
        "fan_in_fan_out": any(part.transposed for part in parts if part.theirs in adapted),
        "target_modules": _targets(model, form, adapted),
        "inference_mode": True,
    }


def _targets(model: nn.Module, form: Format, adapted: list[str]) -> list[str]:
    """The last names of the adapted layers where these pick no others, else their whole paths."""
    names = {theirs.rpartition(".")[2] for theirs in adapted}
    picked = {part.theirs for part in _parts(model, form) if part.theirs.rpartition(".")[2] in names}
    return sorted(names if picked == set(adapted) else adapted)


def _write(directory: Path, tensors: dict[str, np.ndarray], settings: dict[str, Any]) -> None:
    """A folder that exists under its name only when it is complete. Raises OSError."""
    from safetensors.numpy import save

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists already")
    disk, temporary = Disk(), directory.with_name(f".tmp-{directory.name}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    disk.remove(temporary)
    disk.make_directory(temporary)
    write_file(disk, temporary / WEIGHTS, save(tensors, metadata={"format": "pt"}))
    write_file(disk, temporary / CONFIG, (json.dumps(settings, indent=2) + "\n").encode())
    disk.sync_directory(temporary)
    disk.rename(temporary, directory)
    disk.sync_directory(directory.parent)
