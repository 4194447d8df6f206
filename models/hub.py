"""Models in the files of Hugging Face: config.json with model.safetensors, or several files with an index.

load_pretrained makes a model whose parameters start as what the files hold: each is read when it is first
needed, and of a sharded one only this rank's piece. models/formats has the names in the files.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shardrt import device, nn
from shardrt.checkpoint import CheckpointError
from shardrt.checkpoint.state import failures, gathered
from shardrt.checkpoint.tensorfiles import (
    BESIDE,
    TOKENIZER_FILES,
    FolderWriter,
    StoredTensor,
    open_folder,
    plain_files,
    read_json,
)
from shardrt.nn.extents import Extent, Extents
from shardrt.nn.lora import adapted_layers
from shardrt.nn.overlaps import within
from shardrt.nn.ranks import is_leader

from .config_file import Settings
from .formats import FORMATS, Format, Stored

Array = Any
GENERATION = "generation_config.json"
PREPROCESSOR = "preprocessor_config.json"
# Of the files that a model is from: said otherwise in what is written, or of files that do not go along.
_UNTRUE = ("torch_dtype", "num_labels", "auto_map", "quantization_config")


def load_pretrained(directory: str | Path, **changes: Any) -> nn.Module:
    """The model that is kept in `directory`: a GPT, Llama or ViT. Reads config.json and headers alone.

    Parameters are read, and converted to float32, when they are first needed: fully_shard the model before,
    and each rank reads what it holds. The files must stay as they are until then. changes: fields of
    the model's config other than its shape, such as dropout (0 unless given), and a ViT's classes; another
    number of classes than the files' makes a new head (starts_afresh).

    Raises ValueError, in one line, for another kind of model, settings that it does not know, tensors that
    are missing, not expected or of another shape, and damaged files; OSError.
    """
    directory = Path(directory)
    settings, form = _opened(directory)
    stored = open_folder(directory)
    settings.layers_at_most = len(stored)
    settings.require("quantization_config", None)
    kept = form.read(settings)
    config = replace(kept, **changes)
    model = form.model(config)
    model.origin = Origin(directory, settings.kept())
    found = _canonical(directory, stored, form.prefix)
    places = dict(form.tensors(config))
    names = {name: {part.name for part in parts} for name, parts in places.items()}
    fresh = set()
    for name, value in changes.items():
        head = form.fresh.get(name, ())
        if value != getattr(kept, name) or not all(names[p] <= found.keys() for p in head):
            fresh.update(head)
    unread = {part for name in fresh for part in names[name]}
    _check_names(directory, set().union(*names.values()) - unread, found.keys() - unread, form)
    for name, parameter in model.named_parameters():
        if name not in fresh:
            parameter.init = _joined(directory, parameter, places[name], found)
    return model


@dataclass(frozen=True)
class Origin:
    """Where a model is from: what is said of it there goes along when it is saved."""

    directory: Path
    settings: dict[str, Any]  # all of config.json


def ends_in(directory: str | Path) -> list[int]:
    """The tokens that end a text, as generation_config.json says, or else config.json.

    Raises ValueError for what can be no token, and as load_pretrained does.
    """
    settings, _ = _opened(Path(directory))
    path = Path(directory) / GENERATION
    own = Settings(path, read_json(path)) if path.exists() else settings
    if "eos_token_id" not in own.kept():
        own = settings
    found = own.kept().get("eos_token_id")
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(end) is int and 0 <= end < 2**31 for end in ends):
        raise ValueError(f"{directory}: eos_token_id must be one token or a list of them, got {found!r}")
    return ends


def side_files(directory: Path, names: Iterable[str] = ()) -> dict[str, bytes]:
    """Name -> content of what lies beside weights and config.json and is not made here, or of `names`."""
    return plain_files(directory, names or BESIDE)


def kind_in(directory: str | Path) -> type[nn.Module]:
    """The kind of model that load_pretrained would make. Reads config.json alone. Raises as it does."""
    return _opened(Path(directory))[1].model


def starts_afresh(model: nn.Module) -> list[str]:
    """The parameters of a model by load_pretrained that the files do not have: those of a new head."""
    return [name for name, p in model.named_parameters() if not isinstance(p.init, _FromFiles)]


def described(model: nn.Module) -> tuple[Format, dict[str, Any]]:
    """How `model` would be kept: its format and config.json. Raises ValueError if there is no way."""
    forms = [form for form in FORMATS.values() if type(model) is form.model]
    if not forms:
        kinds = ", ".join(dict.fromkeys(form.model.__name__ for form in FORMATS.values()))
        raise ValueError(f"save_pretrained: a {type(model).__name__} has no format; supported: {kinds}")
    origin = getattr(model, "origin", None)
    own = origin.settings.get("model_type") if origin else None
    forms.sort(key=lambda form: form.kind != own)  # that of its files first
    form = next((form for form in forms if form.holds(model.config)), None)
    if form is None:
        kinds = ", ".join(form.kind for form in forms)
        raise ValueError(
            f"save_pretrained: none of the formats {kinds} can describe this model: {model.config}"
        )
    settings = {"model_type": form.kind, "architectures": [form.architecture]} | form.describe(model.config)
    if origin is None:
        return form, settings
    kept = {name: value for name, value in origin.settings.items() if name not in _UNTRUE}
    classes = settings.get("id2label", {})
    if len(kept.get("id2label") or {}) == len(classes) or not classes:
        settings = {name: value for name, value in settings.items() if name not in form.names}
    return form, kept | settings


def save_pretrained(
    model: nn.Module,
    directory: str | Path,
    *,
    file_bytes: int = 5_000_000_000,
    settings: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write `model`, sharded or not, to the new folder `directory`. Collective.

    Rank 0 writes float32, one gathered unit at a time, into a folder that gets its name when it is complete.
    LoRA adapters are merged into what is written; the model stays as it is. Of a model by load_pretrained the
    other settings and the files of its tokenizer, its generation and its images go along (side_files).
    file_bytes: above this there are several files and an index. settings: more of config.json, such as the
    names of classes, id2label. files: more to put beside it, name -> content; those of a tokenizer are then
    all of it. Only rank 0's count. Raises ValueError for a model that has no such format; CheckpointError, on
    every rank of a sharded model, where the folder is not empty or writing fails.
    """
    directory = Path(directory)
    form, config = described(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shapes = {name: parameter.whole_shape for name, parameter in model.named_parameters()}
    places = dict(form.tensors(model.config))
    adapted = {id(layer.weight): layer for layer in adapted_layers(model)}
    adapters = {names[id(p)]: p for layer in adapted.values() for p in (layer.lora_a, layer.lora_b)}
    if odd := shapes.keys() ^ places.keys() ^ adapters.keys():
        raise ValueError(f"save_pretrained: the format has no tensors for {sorted(odd)[:10]}")
    writer, error = None, None
    if is_leader(model):
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
    known = _copies(model, adapters.values())
    for parameter, values in gathered(model):  # every rank joins, rank 0 gets the values
        name = names[id(parameter)]
        if writer is not None and error is None and name not in adapters:
            layer = adapted.get(id(parameter))
            values = values if layer is None else _merged(layer, values, known)
            error = _write(writer, form, places[name], values)
        del values  # a view that would keep its unit in memory while the next is gathered
    if writer is not None and error is None:
        try:
            writer.publish({**config, **(settings or {})}, _beside(model, files or {}))
        except OSError as failed:
            error = failed
    _agree(model, directory, error, writer)


def _beside(model: nn.Module, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """What goes along with a model, `files` over what it came with."""
    origin = getattr(model, "origin", None)
    own = side_files(origin.directory) if origin else {}
    if not files.keys().isdisjoint(TOKENIZER_FILES):
        own = {name: content for name, content in own.items() if name not in TOKENIZER_FILES}
    return own | files


def _write(writer: FolderWriter, form: Format, parts: list[Stored], values: np.ndarray) -> OSError | None:
    """Put a parameter into its places; gives the errors."""
    try:
        for part, tensor in in_files(values, parts):
            writer.write(form.full_name(part.name), tensor)
    except OSError as failed:
        return failed
    return None


@dataclass(frozen=True)
class _FromFiles:
    """What a parameter starts as: tensors of files, one after the other (nn.init.Initialiser)."""

    parts: tuple[tuple[StoredTensor, bool], ...]  # transposed or not

    def fill(self, out: Array, seed: int, key: int, offset: int) -> None:
        """Elements [offset, offset + out.size), read from where they are."""
        self.fill_extent(out, Extent(offset, out.size, out.size, 1))

    def fill_extent(self, out: Array, extent: Extent) -> None:
        """Several runs of them, in rows of a matrix one below the other."""
        begin = 0
        for tensor, transposed in self.parts:
            at, inside = _inside(extent, begin, prod(tensor.shape))
            for some in inside:
                for piece in tensor.pieces(some, transposed):
                    device.of(out).copy(out[at : at + piece.size], piece.astype(out.dtype, copy=False))
                    at += piece.size
            begin += prod(tensor.shape)


def _inside(extent: Extent, begin: int, size: int) -> tuple[int, Extents]:
    """(place in `runs`, what from there on lies in a tensor that begins at element `begin`, counted there).

    A tensor holds whole rows, and each of several runs lies in one.
    """
    if extent.count > 1:
        touched = within(extent, begin, begin + size)
        start, stop = touched.start * extent.length, touched.stop * extent.length
    else:
        start, stop = max(begin - extent.first, 0), min(begin + size - extent.first, extent.length)
    return start, tuple(replace(some, first=some.first - begin) for some in extent.cut(start, stop))


def _copies(model: nn.Module, parameters: Collection[nn.Parameter]) -> dict[int, np.ndarray]:
    """The whole of some parameters by their id, on rank 0. Collective where there are any."""
    wanted, found = {id(parameter) for parameter in parameters}, {}
    for parameter, values in gathered(model) if wanted else ():
        if id(parameter) in wanted:
            found[id(parameter)] = np.array(values)
        del values  # as above
    return found


def _merged(layer: nn.Linear, weight: np.ndarray, known: Mapping[int, np.ndarray]) -> np.ndarray:
    """The weight plus the adapter's matrix."""
    a, b = known[id(layer.lora_a)], known[id(layer.lora_b)]
    return weight + (b @ a) * weight.dtype.type(layer.adapter.scale)


def _opened(directory: Path) -> tuple[Settings, Format]:
    settings = Settings(directory / "config.json", read_json(directory / "config.json"))
    return settings, FORMATS[settings.one_of("model_type", *FORMATS)]


def _canonical(directory: Path, stored: dict[str, StoredTensor], prefix: str) -> dict[str, StoredTensor]:
    """By names without the prefix, which some files have and some have not."""
    found = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
    if len(found) < len(stored):
        twice = next(name for name in stored if prefix + name in stored)
        raise ValueError(f"{directory}: tensor {twice!r} exists with and without the prefix {prefix!r}")
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
    for part, shape in _shapes(parameter.whole_shape, parts):
        if found[part.name].shape != shape:
            raise ValueError(
                f"{directory}: {part.name} must have shape {shape}, got {found[part.name].shape}"
            )
    return _FromFiles(tuple((found[part.name], part.transposed) for part in parts))


def in_files(values: np.ndarray, parts: list[Stored]) -> Iterator[tuple[Stored, np.ndarray]]:
    """(tensor, what it holds of a parameter's values, as it lies in the files): views."""
    start, rows = 0, values.reshape(-1, *_row(values.shape))
    for part in parts:
        stop = start + (part.rows or 0)
        own = values if part.rows is None else rows[start:stop]
        yield part, own.T if part.transposed else own
        start = stop


def _shapes(shape: tuple[int, ...], parts: list[Stored]) -> Iterator[tuple[Stored, tuple[int, ...]]]:
    """(tensor, its shape in the files)."""
    for part in parts:
        own = shape if part.rows is None else (part.rows, *_row(shape))
        yield part, own[::-1] if part.transposed else own


def _row(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a row of a matrix, of one of several matrices, or of a vector."""
    return shape[max(1, len(shape) - 1) :]


def _agree(model: nn.Module, directory: Path, error: OSError | None, writer: FolderWriter | None) -> None:
    """Raise CheckpointError on every rank if rank 0 has an error, and leave nothing behind."""
    if errors := failures(model, error):
        if writer is not None:
            writer.abandon()
        raise CheckpointError(f"{directory} was not written: {'; '.join(errors)}") from error
