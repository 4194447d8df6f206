"""Models in the files of Hugging Face: config.json with model.safetensors, or several files with an index.

load_pretrained makes a model whose parameters start as what the files hold: each is read when it is first
needed, and of a sharded one only this rank's piece. What a kind of model is called there is one Format below.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shardrt import device, nn
from shardrt.checkpoint import CheckpointError
from shardrt.checkpoint.state import gathered
from shardrt.checkpoint.tensorfiles import FolderWriter, StoredTensor, open_folder, read_json
from shardrt.comm import talk
from shardrt.comm import world as worlds
from shardrt.fsdp.setup import units_below
from shardrt.nn.lora import LoRALinear

from .gpt import GPT, GPTConfig
from .llama import Llama, LlamaConfig

Array = Any


def load_pretrained(directory: str | Path, **changes: Any) -> nn.Module:
    """The model that is kept in `directory`: a GPT or a Llama. Reads config.json and headers alone.

    Parameters are read, and converted to float32, when they are first needed: fully_shard the model before,
    and each rank reads what it holds. The files must stay as they are until then. changes: other fields of
    the model's config than its shape, such as dropout (0 unless given).

    Raises ValueError, in one line, for another kind of model, settings that it does not know, tensors that
    are missing, not expected or of another shape, and damaged files; OSError.
    """
    directory = Path(directory)
    settings = _Settings(directory / "config.json", read_json(directory / "config.json"))
    kind = settings.one_of("model_type", *FORMATS)
    form = FORMATS[kind]
    stored = open_folder(directory)
    settings.layers_at_most = len(stored)
    settings.require("quantization_config", None)
    config = replace(form.read(settings), **changes)
    model = form.model(config)
    found = _canonical(directory, stored, form.prefix)
    places = dict(form.tensors(config))
    _check_names(directory, {t.name for parts in places.values() for t in parts}, found, form)
    for name, parameter in model.named_parameters():
        parameter.init = _joined(directory, parameter, places[name], found)
    return model


def save_pretrained(model: nn.Module, directory: str | Path, *, file_bytes: int = 5_000_000_000) -> None:
    """Write `model`, sharded or not, to the new folder `directory`. Collective.

    Rank 0 writes float32, one gathered unit at a time, into a folder that gets its name when it is complete.
    LoRA adapters are merged into what is written; the model stays as it is.
    file_bytes: above this there are several files and an index. Raises ValueError for a model that has no
    such format; CheckpointError, on every rank of a sharded model, where the folder is not empty or writing
    fails.
    """
    directory = Path(directory)
    form = next((form for form in FORMATS.values() if type(model) is form.model), None)
    if form is None:
        kinds = ", ".join(form.model.__name__ for form in FORMATS.values())
        raise ValueError(f"save_pretrained: a {type(model).__name__} has no format; supported: {kinds}")
    described = form.describe(model.config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    places = dict(form.tensors(model.config))
    adapted = {id(layer.weight): layer for layer in model.modules() if isinstance(layer, LoRALinear)}
    adapters = {names[id(p)] for layer in adapted.values() for p in (layer.lora_a, layer.lora_b)}
    if odd := shapes.keys() ^ places.keys() ^ adapters:
        raise ValueError(f"save_pretrained: the format has no place for {sorted(odd)[:10]}")
    writer, error = None, None
    if worlds.current().rank == 0:
        try:
            tensors = {
                form.full_name(part.name): shape
                for name, parts in places.items()
                for part, shape in _shapes(shapes[name], parts)
            }
            writer = FolderWriter(directory, tensors, file_bytes)
        except OSError as failed:
            error = failed
    _agree(model, directory, error, writer)
    for parameter, values in gathered(model):  # every rank joins, rank 0 gets the values
        name = names[id(parameter)]
        if writer is None or error is not None or name in adapters:
            continue
        if id(parameter) in adapted:
            values = _merged(adapted[id(parameter)], values)
        try:
            for part, rows in rows_of(parameter.shape, places[name]):
                whole = values[rows]
                writer.write(form.full_name(part.name), whole.T if part.transposed else whole)
        except OSError as failed:
            error = failed
    if writer is not None and error is None:
        try:
            writer.publish({"model_type": form.kind, "architectures": [form.architecture], **described})
        except OSError as failed:
            error = failed
    _agree(model, directory, error, writer)


@dataclass(frozen=True)
class Stored:
    """What a tensor is called in the files, without the prefix.

    rows: of the parameter, where it is several tensors one after the other. transposed: kept the other way
    round, as GPT-2's linear layers are.
    """

    name: str
    rows: int | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Format:
    """How one kind of model is kept.

    read: settings -> config. describe: config -> settings. tensors: config -> (parameter, its tensors).
    ignored: matches names of tensors that hold nothing to be read.
    """

    kind: str
    architecture: str
    model: type[nn.Module]
    prefix: str
    ignored: re.Pattern
    read: Callable[["_Settings"], Any]
    describe: Callable[[Any], dict[str, Any]]
    tensors: Callable[[Any], Iterator[tuple[str, list[Stored]]]]

    def full_name(self, name: str) -> str:
        """With the prefix, which the head alone does not have."""
        return name if name == HEAD else self.prefix + name


HEAD = "lm_head.weight"


def _gpt2_config(settings: "_Settings") -> GPTConfig:
    settings.one_of("activation_function", "gelu_new", "gelu_pytorch_tanh", default="gelu_new")
    settings.require("layer_norm_epsilon", 1e-5)
    settings.require("scale_attn_weights", True)
    settings.require("scale_attn_by_inverse_layer_idx", False)
    settings.require("add_cross_attention", False)
    settings.require("tie_word_embeddings", True)
    config = GPTConfig(
        n_layer=settings.layers("n_layer"),
        n_head=settings.size("n_head"),
        n_embd=settings.size("n_embd"),
        block_size=settings.size("n_positions"),
        vocab_size=settings.size("vocab_size"),
    )
    if settings.get("n_inner") is not None:
        settings.require("n_inner", 4 * config.n_embd)
    return config


def _gpt2_settings(config: GPTConfig) -> dict[str, Any]:
    if not config.bias:
        raise ValueError(
            "save_pretrained: GPT-2's format has biases, and this model was made with bias=False"
        )
    return {
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_positions": config.block_size,
        "vocab_size": config.vocab_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "bos_token_id": config.vocab_size - 1,
        "eos_token_id": config.vocab_size - 1,
    }


def _gpt2_tensors(config: GPTConfig) -> Iterator[tuple[str, list[Stored]]]:
    yield "wte.weight", [Stored("wte.weight")]
    yield "wpe.weight", [Stored("wpe.weight")]
    for i in range(config.n_layer):
        for ours, theirs in (
            ("norm1", "ln_1"),
            ("attention.qkv", "attn.c_attn"),
            ("attention.output", "attn.c_proj"),
            ("norm2", "ln_2"),
            ("mlp.up", "mlp.c_fc"),
            ("mlp.down", "mlp.c_proj"),
        ):
            linear = "ln" not in theirs
            yield f"blocks.{i}.{ours}.weight", [Stored(f"h.{i}.{theirs}.weight", transposed=linear)]
            yield f"blocks.{i}.{ours}.bias", [Stored(f"h.{i}.{theirs}.bias")]
    yield "norm.weight", [Stored("ln_f.weight")]
    yield "norm.bias", [Stored("ln_f.bias")]


def _llama_config(settings: "_Settings") -> LlamaConfig:
    settings.require("hidden_act", "silu")
    settings.require("attention_bias", False)
    settings.require("mlp_bias", False)
    heads = settings.size("num_attention_heads")
    config = LlamaConfig(
        n_layer=settings.layers("num_hidden_layers"),
        n_head=heads,
        n_kv_head=settings.size("num_key_value_heads", heads),
        n_embd=settings.size("hidden_size"),
        n_hidden=settings.size("intermediate_size"),
        block_size=settings.size("max_position_embeddings"),
        vocab_size=settings.size("vocab_size"),
        tied=settings.one_of("tie_word_embeddings", False, True, default=False),
        norm_eps=settings.number("rms_norm_eps", 1e-6),
    )
    if settings.get("head_dim") is not None:
        settings.require("head_dim", config.head_dim)
    rope = settings.table("rope_parameters") or settings.table("rope_scaling")
    theta = rope.number("rope_theta", settings.number("rope_theta", 10000.0))
    rope.require("partial_rotary_factor", 1.0)
    kind = rope.one_of("rope_type", "default", "llama3", default=rope.get("type", "default"))
    if kind == "default":
        return replace(config, rope_theta=theta)
    return replace(
        config,
        rope_theta=theta,
        rope_factor=rope.number("factor"),
        rope_low_freq_factor=rope.number("low_freq_factor"),
        rope_high_freq_factor=rope.number("high_freq_factor"),
        rope_original_size=rope.size("original_max_position_embeddings"),
    )


def _llama_settings(config: LlamaConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_factor != 1:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_size,
        }
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim,
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_hidden,
        "max_position_embeddings": config.block_size,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "dtype": "float32",
        # The same twice: transformers 5 reads the first, 4 the others.
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_factor == 1 else scaling,
    }


def _llama_tensors(config: LlamaConfig) -> Iterator[tuple[str, list[Stored]]]:
    yield "embedding.weight", [Stored("embed_tokens.weight")]
    width = config.head_dim
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}", f"layers.{i}"
        yield f"{ours}.norm1.weight", [Stored(f"{theirs}.input_layernorm.weight")]
        yield (
            f"{ours}.attention.qkv.weight",
            [
                Stored(f"{theirs}.self_attn.q_proj.weight", config.n_head * width),
                Stored(f"{theirs}.self_attn.k_proj.weight", config.n_kv_head * width),
                Stored(f"{theirs}.self_attn.v_proj.weight", config.n_kv_head * width),
            ],
        )
        yield f"{ours}.attention.output.weight", [Stored(f"{theirs}.self_attn.o_proj.weight")]
        yield f"{ours}.norm2.weight", [Stored(f"{theirs}.post_attention_layernorm.weight")]
        yield (
            f"{ours}.mlp.gate_up.weight",
            [
                Stored(f"{theirs}.mlp.gate_proj.weight", config.n_hidden),
                Stored(f"{theirs}.mlp.up_proj.weight", config.n_hidden),
            ],
        )
        yield f"{ours}.mlp.down.weight", [Stored(f"{theirs}.mlp.down_proj.weight")]
    yield "norm.weight", [Stored("norm.weight")]
    if not config.tied:
        yield "head.weight", [Stored(HEAD)]


FORMATS = {
    form.kind: form
    for form in (
        Format(
            kind="gpt2",
            architecture="GPT2LMHeadModel",
            model=GPT,
            prefix="transformer.",
            ignored=re.compile(r"h\.\d+\.attn\.(masked_)?bias|lm_head\.weight"),  # masks; the head is tied
            read=_gpt2_config,
            describe=_gpt2_settings,
            tensors=_gpt2_tensors,
        ),
        Format(
            kind="llama",
            architecture="LlamaForCausalLM",
            model=Llama,
            prefix="model.",
            ignored=re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq|lm_head\.weight"),
            read=_llama_config,
            describe=_llama_settings,
            tensors=_llama_tensors,
        ),
    )
}


class _Settings:
    """A table of config.json, read with suspicion: errors name the file and the setting."""

    def __init__(self, path: Path, table: dict[str, Any]) -> None:
        self._path, self._table = path, table
        self.layers_at_most = 0

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it stands; `default` where it is absent or null."""
        value = self._table.get(name)
        return default if value is None else value

    def one_of(self, name: str, *choices: Any, default: Any = None) -> Any:
        """A value that is one of `choices`."""
        value = self.get(name, default)
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            wanted = ", ".join(map(repr, choices))
            raise ValueError(f"{self._path}: {name} = {value!r} is not supported; supported: {wanted}")
        return value

    def require(self, name: str, wanted: Any) -> None:
        """What is there must be `wanted`."""
        value = self.get(name, wanted)
        if value != wanted:
            raise ValueError(f"{self._path}: {name} = {value!r} is not supported, only {wanted!r} is")

    def size(self, name: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        value = self.get(name, default)
        if type(value) is not int or not 1 <= value < 2**31:
            raise ValueError(f"{self._path}: {name} must be an integer of at least 1, got {value!r}")
        return value

    def layers(self, name: str) -> int:
        """A number of layers for which there can be tensors: nothing is made for more."""
        value = self.size(name)
        if value > self.layers_at_most:
            raise ValueError(f"{self._path}: {name} = {value}, but there are {self.layers_at_most} tensors")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not np.isfinite(value):
            raise ValueError(f"{self._path}: {name} must be a number, got {value!r}")
        return float(value)

    def table(self, name: str) -> "_Settings":
        """A table inside; an empty one, which is false, where there is none."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise ValueError(f"{self._path}: {name} must be an object, got {value!r}")
        return _Settings(self._path, value)

    def __bool__(self) -> bool:
        return bool(self._table)


@dataclass(frozen=True)
class _FromFiles:
    """What a parameter starts as: tensors of files, one after the other (nn.init.Initialiser)."""

    parts: tuple[tuple[StoredTensor, bool], ...]  # transposed or not

    def fill(self, out: Array, seed: int, key: int, offset: int) -> None:
        """Elements [offset, offset + out.size), read from where they are."""
        begin, stop = 0, offset + out.size
        for tensor, transposed in self.parts:
            end = begin + prod(tensor.shape)
            first, last = max(offset, begin), min(stop, end)
            at = first - offset
            for piece in tensor.pieces(first - begin, last - first, transposed) if first < last else ():
                device.of(out).copy(out[at : at + piece.size], piece.astype(out.dtype, copy=False))
                at += piece.size
            begin = end


def _merged(layer: LoRALinear, weight: np.ndarray) -> np.ndarray:
    """The weight with the adapter's product, which is gathered as it is."""
    a, b = (device.of(p.data).to_numpy(p.data) for p in (layer.lora_a, layer.lora_b))
    return weight + (b @ a) * weight.dtype.type(layer.lora_scale)


def _canonical(directory: Path, stored: dict[str, StoredTensor], prefix: str) -> dict[str, StoredTensor]:
    """By names without the prefix, which some files have and some have not."""
    found = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
    if len(found) < len(stored):
        twice = next(name for name in stored if prefix + name in stored)
        raise ValueError(f"{directory}: {twice!r} is there with and without {prefix!r}")
    return found


def _check_names(directory: Path, expected: set[str], found: Iterable[str], form: Format) -> None:
    missing = sorted(expected - set(found))
    extra = sorted(n for n in set(found) - expected if not form.ignored.fullmatch(n))
    if missing or extra:
        raise ValueError(
            f"{directory}: {len(missing)} tensors missing {missing[:10]}, "
            f"{len(extra)} not expected {extra[:10]}"
        )


def _joined(
    directory: Path, parameter: nn.Parameter, parts: list[Stored], found: dict[str, StoredTensor]
) -> _FromFiles:
    for part, shape in _shapes(parameter.shape, parts):
        if found[part.name].shape != shape:
            raise ValueError(
                f"{directory}: {part.name} has shape {found[part.name].shape}, and the model needs {shape}"
            )
    return _FromFiles(tuple((found[part.name], part.transposed) for part in parts))


def rows_of(shape: tuple[int, ...], parts: list[Stored]) -> Iterator[tuple[Stored, slice]]:
    """(tensor, rows of the parameter that it holds)."""
    start = 0
    for part in parts:
        stop = shape[0] if part.rows is None else start + part.rows
        yield part, slice(start, stop)
        start = stop


def _shapes(shape: tuple[int, ...], parts: list[Stored]) -> Iterator[tuple[Stored, tuple[int, ...]]]:
    """(tensor, its shape in the files)."""
    for part, rows in rows_of(shape, parts):
        own = (rows.stop - rows.start, *shape[1:])
        yield part, own[::-1] if part.transposed else own


def _agree(model: nn.Module, directory: Path, error: OSError | None, writer: FolderWriter | None) -> None:
    """Raise CheckpointError on every rank if rank 0 has an error, and leave nothing behind."""
    units = units_below(model)
    if units:
        told = talk.failures(units[0].schedule.control, error)
    else:
        told = [] if error is None else [f"{type(error).__name__}: {error}"]
    if told:
        if writer is not None:
            writer.abandon()
        raise CheckpointError(f"{directory} was not written: {'; '.join(told)}") from error
