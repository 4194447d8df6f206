"""LoRA adapters of PEFT: adapter_config.json and adapter_model.safetensors.

Tensors have the names of PEFT's files without "base_model.model.". A program that trains a PEFT model has the
adapter's name in them ("lora_A.default.weight"), which PEFT leaves out of its files. models/adapters.py loads
such an adapter into a model, and a run with `export` writes one.
"""

import json
import re
from pathlib import Path
from typing import Any

from shardrt.checkpoint.tensorfiles import open_file, read_json
from shardrt.exchange.checkpoint import PARAMETER, BadCheckpoint, Checkpoint, Tensor
from shardrt.exchange.formats import Options, Plan
from shardrt.exchange.formats.safetensors import in_file, tensors_file
from shardrt.exchange.output import File
from shardrt.untrusted import Refused

DIALECT = "huggingface"
STATE = True  # of which the recipe says how a run's adapters are scaled; the rest is left out
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MATRIX = re.compile(rf"(?:{re.escape(_PREFIX)})?(.+\.lora_[AB])(?:\.\w+)?\.weight")

_OTHERS = {
    ".lora_embedding_": "the adapter of an embedding (embed_tokens in target_modules)",
    ".modules_to_save.": "trained whole (modules_to_save)",
    ".lora_magnitude_vector": "of DoRA (use_dora)",
}


def recognises(path: Path) -> bool:
    """Whether a folder has such files."""
    return (path / CONFIG).exists() and (path / WEIGHTS).exists()


def read(path: Path) -> Checkpoint:
    """Open a folder: adapter_config.json and the header of the tensors."""
    try:
        config = read_json(path / CONFIG)
        stored = open_file(path / WEIGHTS)
    except (ValueError, Refused) as error:
        raise BadCheckpoint(str(error)) from None
    tensors = {(PARAMETER, name.removeprefix(_PREFIX)): in_file(tensor) for name, tensor in stored.items()}
    return Checkpoint(path, tensors, files={CONFIG: _text(config)})


def files(checkpoint: Checkpoint, options: Options) -> Plan:
    """The adapters of a checkpoint, and what PEFT needs to know of them.

    Raises:
        BadCheckpoint: if there are none, or others than LoRA's, or nothing says how they are scaled.
    """
    _check_kinds(checkpoint)
    adapters: dict[str, Tensor] = {}
    written = set()
    for (kind, name), tensor in checkpoint.tensors.items():
        if kind == PARAMETER and (matrix := _MATRIX.fullmatch(name)):
            adapters[f"{_PREFIX}{matrix[1]}.weight"] = tensor
            written.add((kind, name))
    if not adapters:
        raise BadCheckpoint(f"{checkpoint.path}: no tensor of it belongs to a LoRA adapter")
    others = sum(kind == PARAMETER for kind, _ in checkpoint.tensors) - len(adapters)
    left = [f"{others} tensors of the model, which {CONFIG} names"] if others else []
    if any(kind != PARAMETER for kind, _ in checkpoint.tensors):
        left.append("optimizer state: peft holds weights alone")
    content = _config(checkpoint, adapters)
    files = [tensors_file(WEIGHTS, adapters), File(CONFIG, [content])]
    more = {name: content for name, content in checkpoint.files.items() if name != CONFIG}
    return Plan(
        [*files, *(File(name, [content]) for name, content in more.items())], left=left, tensors=written
    )


def _check_kinds(checkpoint: Checkpoint) -> None:
    """Refuse what an adapter may hold apart from the two matrices of a linear layer: it would be lost."""
    config = checkpoint.files.get(CONFIG)
    saved = json.loads(config).get("modules_to_save") if config else None
    whole = tuple(f"{name}.weight" for name in saved) if isinstance(saved, list) else ()
    for kind, name in checkpoint.tensors:
        other = next((what for part, what in _OTHERS.items() if part in name), None)
        if name.endswith(whole):
            other = _OTHERS[".modules_to_save."]
        if kind == PARAMETER and other is not None:
            raise BadCheckpoint(
                f"{checkpoint.path}: {name[:200]!r} is {other}; `--to peft` writes LoRA of linear layers "
                "alone: train without it, or convert the whole model that PEFT's merge_and_unload() gives"
            )


def _config(checkpoint: Checkpoint, adapters: dict[str, Tensor]) -> bytes:
    """Of the source, of its folder, or of the recipe of the run that has trained the adapters."""
    if CONFIG in checkpoint.files:
        return checkpoint.files[CONFIG]
    recipe = checkpoint.training.extra.get("config")
    lora = recipe.get("lora") if isinstance(recipe, dict) else None
    begun = lora.get("adapter") if isinstance(lora, dict) else None  # an adapter from which the run began
    for folder in (checkpoint.path, *([Path(begun)] if isinstance(begun, str) and begun else [])):
        if (folder / CONFIG).exists():
            try:
                return _text(read_json(folder / CONFIG))
            except (ValueError, Refused) as error:
                raise BadCheckpoint(str(error)) from None
    if not isinstance(lora, dict) or type(lora.get("rank")) is not int or lora["rank"] < 1:
        raise BadCheckpoint(
            f"{checkpoint.path}: nothing says how the adapters are scaled: put their {CONFIG} there"
        )
    rank = lora["rank"]
    wrong = sorted(
        name for name, tensor in adapters.items() if ".lora_A." in name and tensor.shape[0] != rank
    )
    if wrong:
        raise BadCheckpoint(f"{checkpoint.path}: {wrong[0]} is not of the recipe's rank, {rank}")
    return _text(
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": recipe.get("init_from") or None,
            "r": rank,
            "lora_alpha": lora.get("alpha") or 2 * rank,
            "lora_dropout": lora.get("dropout") or 0.0,
            "bias": "none",
            "fan_in_fan_out": any(".c_attn." in name or ".c_fc." in name for name in adapters),
            "target_modules": sorted({name[len(_PREFIX) :].rsplit(".lora_", 1)[0] for name in adapters}),
            "inference_mode": True,
        }
    )


def _text(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
