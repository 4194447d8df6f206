"""Folders of Hugging Face: config.json, model.safetensors or several files with an index, a tokenizer.

They hold weights alone. The optimizer's state has no place there.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.checkpoint.manifest import DTYPES
from shardrt.checkpoint.tensorfiles import (
    BESIDE,
    INDEX,
    SINGLE,
    StoredTensor,
    open_folder,
    plain_files,
    read_json,
)
from shardrt.exchange.checkpoint import PARAMETER, BadCheckpoint, Checkpoint, Tensor
from shardrt.exchange.formats import Options, Plan
from shardrt.exchange.output import Elements, File
from shardrt.exchange.source import FileTensor
from shardrt.untrusted import Refused

DIALECT, STATE = "huggingface", False
CONFIG = "config.json"
_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {"bfloat16": "BF16"}


def recognises(path: Path) -> bool:
    """Whether a folder has such files."""
    return (path / SINGLE).exists() or (path / INDEX).exists()


def read(path: Path) -> Checkpoint:
    """Open a folder: config.json, headers, a tokenizer's files."""
    try:
        stored = open_folder(path)
        config = read_json(path / CONFIG) if (path / CONFIG).exists() else None
    except (ValueError, Refused) as error:
        raise BadCheckpoint(str(error)) from None
    tensors = {(PARAMETER, name): in_file(tensor) for name, tensor in stored.items()}
    return Checkpoint(path, tensors, config=config, files=plain_files(path, BESIDE))


def files(checkpoint: Checkpoint, options: Options) -> Plan:
    """The weights in files of at most `file_bytes`, where tensors are not larger, and the small files."""
    weights = {name: tensor for (kind, name), tensor in checkpoint.tensors.items() if kind == PARAMETER}
    left = []
    parts = list(_parts(weights, options.file_bytes))
    names = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    names = names if len(parts) > 1 else [SINGLE]
    found = [tensors_file(name, part) for name, part in zip(names, parts, strict=True)]
    if len(parts) > 1:
        where = {name: file for file, part in zip(names, parts, strict=True) for name in part}
        total = sum(Elements.all(tensor).size for tensor in weights.values())
        found.append(_text(INDEX, {"metadata": {"total_size": total}, "weight_map": where}))
    if checkpoint.config is not None:
        found.append(_text(CONFIG, checkpoint.config | _dtype_of(weights.values())))
    else:
        left.append(f"{CONFIG}: no configuration of the model is known (--config FILE gives one)")
    found += [File(name, [content]) for name, content in checkpoint.files.items()]
    return Plan(found, left=left)


def _parts(weights: Mapping[str, Tensor], file_bytes: int) -> Iterator[dict[str, Tensor]]:
    """The weights of each file."""
    part: dict[str, Tensor] = {}
    room = file_bytes
    for name, tensor in weights.items():
        size = Elements.all(tensor).size
        if part and size > room:
            yield part
            part, room = {}, file_bytes
        part[name] = tensor
        room -= size
    yield part


def in_file(stored: StoredTensor) -> FileTensor:
    """A tensor of a file, in the type that it has there."""
    import ml_dtypes

    dtype = np.dtype(ml_dtypes.bfloat16 if stored.dtype == "BF16" else DTYPES[stored.dtype])
    return FileTensor(stored.file, stored.offset, dtype, stored.shape)


def tensors_file(name: str, weights: Mapping[str, Tensor]) -> File:
    """A file of safetensors."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    end, segments = 0, []
    for tensor_name, tensor in weights.items():
        if tensor_name == "__metadata__" or tensor.dtype.name not in _NAMES:
            raise BadCheckpoint(f"{tensor_name}: safetensors has no such name or no type {tensor.dtype}")
        segments.append(Elements.all(tensor))
        start, end = end, end + segments[-1].size
        entries[tensor_name] = {
            "dtype": _NAMES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return File(name, [len(text).to_bytes(8, "little") + text, *segments])


def _text(name: str, value: Mapping[str, Any]) -> File:
    return File(name, [(json.dumps(value, indent=2) + "\n").encode()])


def _dtype_of(weights: Sequence[Tensor]) -> dict[str, str]:
    """What config.json says of the type of the weights, if they have one."""
    found = {tensor.dtype.name for tensor in weights}
    return {"dtype": found.pop()} if len(found) == 1 else {}
