"""Names of a model's tensors in the programs that train it, and the tensors under other names.

A dialect is a program's way to name and lay out a model. Hugging Face's is the hub: each other dialect has a
list of Made that makes its tensors of the hub's, and one that makes the hub's of its own. A Made says how one
tensor is made of others: joined, cut, transposed, its heads' rows interleaved. Nothing is read for that.

The names of Hugging Face and of shardrt are those of models/formats.
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from shardrt.exchange.checkpoint import PARAMETER, BadCheckpoint, Tensor
from shardrt.exchange.views import Heads, Reshaped, Rows, Transposed, concat
from shardrt.untrusted import Refused, natural, read_regular

__all__ = [
    "DIALECTS",
    "Family",
    "Renamed",
    "dialect_of",
    "family_of",
    "family_of_recipe",
    "from_table",
    "renamed",
]

SHARDRT, HUGGINGFACE, TORCHTITAN, TORCHTITAN_OLD = "shardrt", "huggingface", "torchtitan", "torchtitan-0.2"
# A dialect, and a pattern that a name of each of its models fits.
DIALECTS = {
    SHARDRT: re.compile(r"blocks\.\d+\.(attention\.qkv|norm1)\.weight"),
    TORCHTITAN: re.compile(r"layers\.\d+\.attention\.qkv_linear\.wq\.weight"),
    TORCHTITAN_OLD: re.compile(r"layers\.\d+\.attention\.wq\.weight"),
    HUGGINGFACE: re.compile(
        r"(.*\.)?(layers\.\d+\.self_attn\.q_proj|h\.\d+\.attn\.c_attn|layer\.\d+\.layernorm_before)\.weight"
    ),
}
_WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_LARGEST = 1 << 20  # bytes of a table of names
_LONGEST = 1000  # characters of a name that a line with {} or * may fit
_ROTARY = ("llama",)  # families whose queries and keys torchtitan pairs by neighbours
# Hugging Face's names, without "model.", and torchtitan's (models/*/state_dict_adapter.py there).
_TORCHTITAN = {
    "embed_tokens.weight": "tok_embeddings.weight",
    "layers.{}.self_attn.q_proj.weight": "layers.{}.attention.qkv_linear.wq.weight",
    "layers.{}.self_attn.k_proj.weight": "layers.{}.attention.qkv_linear.wk.weight",
    "layers.{}.self_attn.v_proj.weight": "layers.{}.attention.qkv_linear.wv.weight",
    "layers.{}.self_attn.o_proj.weight": "layers.{}.attention.wo.weight",
    "layers.{}.self_attn.q_norm.weight": "layers.{}.attention.q_norm.weight",
    "layers.{}.self_attn.k_norm.weight": "layers.{}.attention.k_norm.weight",
    "layers.{}.mlp.gate_proj.weight": "layers.{}.feed_forward.w1.weight",
    "layers.{}.mlp.down_proj.weight": "layers.{}.feed_forward.w2.weight",
    "layers.{}.mlp.up_proj.weight": "layers.{}.feed_forward.w3.weight",
    "layers.{}.input_layernorm.weight": "layers.{}.attention_norm.weight",
    "layers.{}.post_attention_layernorm.weight": "layers.{}.ffn_norm.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class Made:
    """How a tensor is made of others; `make` gets these, and the name for messages.

    weights_alone: there is no optimizer state for it.
    """

    name: str
    of: tuple[str, ...]
    make: Callable[[Sequence[Tensor], str], Tensor]
    weights_alone: bool = False


@dataclass(frozen=True)
class Renamed:
    """Tensors under other names.

    Attributes:
        tensors: as of a Checkpoint.
        of: new name -> the names of which it is made.
        left: a line for each tensor that has no new name.
    """

    tensors: dict[tuple[str, str], Tensor]
    of: dict[str, tuple[str, ...]]
    left: list[str]


@dataclass(frozen=True)
class Family:
    """A model of a family in models/formats.

    Attributes:
        form: the Format there.
        config: the model's config there.
        settings: config.json of Hugging Face's.
    """

    form: Any
    config: Any
    settings: dict[str, Any]


def dialect_of(names: Iterable[str]) -> str:
    """The dialect of names; "" if none is known."""
    names = list(names)
    for dialect, pattern in DIALECTS.items():
        if any(pattern.fullmatch(name) for name in names):
            return dialect
    return ""


def family_of(config: dict[str, Any], where: Path, tensors: int, kind: str = "") -> Family:
    """The family of a config.json.

    Args:
        where: its file, for messages.
        tensors: an upper limit of its layers, for files may say any number.
        kind: instead of its model_type.

    Raises:
        BadCheckpoint: if no family here is like that.
    """
    formats, settings = _models("formats").FORMATS, _models("config_file").Settings(where, config)
    settings.layers_at_most = 4 * tensors
    try:
        form = formats[kind or settings.one_of("model_type", *formats)]
        return Family(form, form.read(settings), config)
    except KeyError:
        raise BadCheckpoint(f"--family: {kind!r} is not one of {', '.join(formats)}") from None
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadCheckpoint(str(error)) from None


def family_of_recipe(recipe: Mapping[str, Any], where: Path, tensors: int) -> Family | None:
    """The family of a run, whose recipe its checkpoints hold; None if the recipe says none."""
    shape, recipes = recipe.get("model"), import_module(f"{_package()}.train").RECIPES
    kind = recipes.get(str(recipe.get("architecture") or "gpt"))
    if kind is None or not isinstance(shape, dict):
        return None
    try:
        config = type(kind.model)(**{name: _tuples(value) for name, value in shape.items()})
        layers = config.n_layer * max(1, getattr(config, "experts", 0))
        if not natural(layers) or layers > 4 * tensors:
            raise ValueError(f"the recipe has {layers} layers or experts, and the files {tensors} tensors")
        formats = [f for f in _models("formats").FORMATS.values() if f.model is kind.NETWORK]
        form = next((form for form in formats if form.holds(config)), None)
        if form is None:
            return None
        about = {"model_type": form.kind, "architectures": [form.architecture]} | form.describe(config)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadCheckpoint(f"{where}: the recipe in it is not one of a model: {error}") from None
    return Family(form, config, about)


def renamed(
    tensors: Mapping[tuple[str, str], Tensor], source: str, target: str, family: Family | None, where: Path
) -> Renamed:
    """The tensors in another dialect.

    Args:
        source, target: dialects. The same one needs no family.

    Raises:
        BadCheckpoint: if the family has tensors that are missing, or of other shapes.
    """
    found = Renamed(dict(tensors), {name: (name,) for _, name in tensors}, [])
    if source == target:
        return found
    if family is None:
        raise BadCheckpoint(
            f"{where}: {source}'s names become {target}'s by the model's config.json, which is not there; "
            f"give --config FILE or a table with --names FILE.toml, or keep the names with --dialect {source}"
        )
    for table in _way(source, target, family, tensors):
        found = _applied(found, table, where)
    return found


def from_table(tensors: Mapping[tuple[str, str], Tensor], path: Path) -> Renamed:
    """The tensors under names by a user's table.

    A line of it is `"layers.{}.q.weight" = "decoder.{}.query.weight"`: the new name, and the name in the
    files. {} is a number, * any text (two at most). In place of a name in the files a table may have: from (a
    name, or a list of names to join by rows), rows ([first, count]), transposed (true), interleave or halves
    (the number of heads whose rows for rotary embeddings are interleaved, or put in halves). Names that no
    line fits stay as they are.

    Raises:
        BadCheckpoint: for a table that is none.
    """
    try:
        table = tomllib.loads(read_regular(path, _LARGEST).decode())
    except (ValueError, RecursionError, Refused) as error:
        raise BadCheckpoint(f"{path}: not a table of names: {error}") from None
    rules = [_Rule.of_line(path, name, value) for name, value in table.items()]
    names = dict.fromkeys(name for _, name in tensors)
    made = {}
    for rule in rules:
        for one in rule.made(names):
            if one.name in made:
                raise BadCheckpoint(f"{path}: two lines make {one.name!r}")
            made[one.name] = one
    used = {name for one in made.values() for name in one.of}
    for name in names:
        if name not in used:
            if name in made:
                raise BadCheckpoint(f"{path}: {name!r} is made by a line, and is in the files already")
            made[name] = Made(name, (name,), _same)
    before = Renamed(dict(tensors), {name: (name,) for name in names}, [])
    return _applied(before, made.values(), path)


@dataclass(frozen=True)
class _Rule:
    """A line of a user's table."""

    path: Path
    name: str
    of: tuple[str, ...]
    how: Mapping[str, Any]

    @classmethod
    def of_line(cls, path: Path, name: str, value: Any) -> "_Rule":
        how = {"from": value} if isinstance(value, str | list) else value
        known = {"from": list, "rows": list, "transposed": bool, "interleave": int, "halves": int}
        if not isinstance(how, dict) or how.keys() - known or "from" not in how:
            raise BadCheckpoint(f"{path}: {name!r} must be a name, a list of names, or a table with `from`")
        of = how["from"] if isinstance(how["from"], list) else [how["from"]]
        rows = how.get("rows", [0, 0])
        right = of and all(isinstance(one, str) for one in of)
        right = right and isinstance(rows, list) and len(rows) == 2 and all(map(natural, rows))
        right = right and all(type(how[key]) is known[key] for key in how if key not in ("from", "rows"))
        if not right or len({_holes(text) for text in (name, *of)}) > 1 or name.count("*") > 2:
            raise BadCheckpoint(
                f"{path}: {name[:80]!r}: names have the same {{}} and *, two * at most; rows two numbers, "
                "transposed true or false, interleave and halves a number of heads"
            )
        return cls(path, name, tuple(of), how)

    def made(self, names: Mapping[str, None]) -> Iterable[Made]:
        """What it makes of the names that its first name fits."""
        text = re.escape(self.of[0]).replace(r"\{\}", r"(\d++)").replace(r"\*", "(.*)")
        pattern = re.compile(text)
        for name in names if _holes(self.of[0]) else names.keys() & {self.of[0]}:
            if len(name) <= _LONGEST and (found := pattern.fullmatch(name)):
                of = tuple(_filled(one, found.groups()) for one in self.of)
                yield Made(_filled(self.name, found.groups()), of, self._make)

    def _make(self, parts: Sequence[Tensor], name: str) -> Tensor:
        how = self.how
        tensor = parts[0] if len(parts) == 1 else concat(parts, name)
        if "rows" in how:
            tensor = Rows(tensor, *how["rows"], name)
        if how.get("transposed"):
            tensor = Transposed(tensor, name)
        for word in ("interleave", "halves"):
            if word in how:
                tensor = Heads(tensor, how[word], word == "interleave", name)
        return tensor


def _way(
    source: str, target: str, family: Family, tensors: Mapping[tuple[str, str], Tensor]
) -> Iterable[list[Made]]:
    """The tables from one dialect to another, by way of Hugging Face's."""
    if source == SHARDRT:
        yield list(_shardrt_to_hub(family, {name for _, name in tensors}))
    elif source in (TORCHTITAN, TORCHTITAN_OLD):
        yield list(_torchtitan(family, source, False))
    else:
        yield list(_hub_to_hub(family, {name for _, name in tensors}))
    if target == SHARDRT:
        yield list(_hub_to_shardrt(family))
    elif target in (TORCHTITAN, TORCHTITAN_OLD):
        yield list(_torchtitan(family, target, True))


def _applied(before: Renamed, table: Iterable[Made], where: Path) -> Renamed:
    """What a table makes of tensors."""
    bare: dict[tuple[str, str], Tensor] = {}
    of = {_bare(name): names for name, names in before.of.items()}
    for (kind, name), tensor in before.tensors.items():
        if (kind, _bare(name)) in bare:
            raise BadCheckpoint(f"{where}: there are two tensors for {_bare(name)!r}")
        bare[kind, _bare(name)] = tensor
    after = Renamed({}, {}, list(before.left))
    table, used, missing = list(table), set(), []
    for kind in dict.fromkeys(kind for kind, _ in bare):
        for made in table:
            keys = [(kind, name) for name in made.of]
            absent = [name for _, name in keys if (kind, name) not in bare]
            if kind != PARAMETER and (made.weights_alone or len(absent) == len(keys)):
                continue
            if absent:
                missing += absent
                continue
            after.tensors[kind, made.name] = made.make([bare[key] for key in keys], made.name)
            after.of[made.name] = tuple(first for name in made.of for first in of[name])
            used.update(keys)
    if missing:
        lacking = list(dict.fromkeys(missing))
        rest = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
        raise BadCheckpoint(f"{where}: tensors are missing: {', '.join(map(repr, lacking[:5]))}{rest}")
    for kind, name in bare:
        if (kind, name) not in used:
            after.left.append(f"{kind} {name}: the model has no such tensor (a copy, a mask, another's)")
    return after


def _hub_to_shardrt(family: Family) -> Iterable[Made]:
    """Our parameters, of one tensor of Hugging Face's or several."""
    for ours, parts in family.form.tensors(family.config):
        yield Made(ours, tuple(family.form.full_name(p.name) for p in parts), _Joined(parts, family, ours))


@dataclass(frozen=True)
class _Joined:
    """One of our parameters."""

    parts: Sequence[Any]
    family: Family
    ours: str

    def __call__(self, tensors: Sequence[Tensor], name: str) -> Tensor:
        """Of its tensors."""
        turned = []
        for part, tensor in zip(self.parts, tensors, strict=True):
            if part.rows is not None and (not tensor.shape or tensor.shape[0] != part.rows):
                raise BadCheckpoint(f"{part.name} must have {part.rows} rows, got shape {tensor.shape}")
            turned.append(Transposed(tensor, part.name) if part.transposed else tensor)
        whole = turned[0] if len(turned) == 1 and self.parts[0].rows is None else concat(turned, name)
        if ".experts." in self.ours:  # matrices one below the other
            experts = self.family.config.experts
            whole = Reshaped(whole, (experts, whole.shape[0] // experts, *whole.shape[1:]))
        return whole


def _shardrt_to_hub(family: Family, names: set[str]) -> Iterable[Made]:
    """The tensors of Hugging Face's, each one of our parameters or rows of it; of LoRA adapters likewise.

    An adapter of several layers in one becomes one for each: they share A, and B has the rows of all.
    """
    for ours, parts in family.form.tensors(family.config):
        layer, first = ours.removesuffix(".weight"), 0
        for part in parts:
            full = family.form.full_name(part.name)
            yield Made(full, (ours,), _Part(part, first))
            if f"{layer}.lora_b" in names:
                theirs, rows = full.removesuffix(".weight"), _Part(replace(part, transposed=False), first)
                yield Made(f"{theirs}.lora_A.weight", (f"{layer}.lora_a",), _same)
                yield Made(f"{theirs}.lora_B.weight", (f"{layer}.lora_b",), rows)
            first += part.rows or 0


@dataclass(frozen=True)
class _Part:
    """A tensor of Hugging Face's: some rows of a parameter, or all of it."""

    part: Any
    first: int

    def __call__(self, tensors: Sequence[Tensor], name: str) -> Tensor:
        """Of the parameter."""
        (tensor,) = tensors
        if self.part.rows is not None:
            tensor = Rows(tensor, self.first, self.part.rows, name)
        return Transposed(tensor, name) if self.part.transposed else tensor


def _hub_to_hub(family: Family, names: set[str]) -> Iterable[Made]:
    """With the prefix that some files leave out."""
    for full in _hub_names(family):
        short = full.removeprefix(family.form.prefix)
        yield Made(full, (short if short in names and full not in names else full,), _same)


def _hub_names(family: Family) -> dict[str, None]:
    """The names of the tensors of Hugging Face's, in order."""
    tensors = family.form.tensors(family.config)
    return dict.fromkeys(family.form.full_name(part.name) for _, parts in tensors for part in parts)


def _torchtitan(family: Family, dialect: str, there: bool) -> Iterable[Made]:
    """Between Hugging Face's tensors and torchtitan's. there: to torchtitan.

    A tied head is there under both names in torchtitan.
    """
    form = family.form
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    tied = form.full_name("lm_head.weight") not in _hub_names(family)
    for full in _hub_names(family):
        short = full.removeprefix(form.prefix)
        pattern = re.sub(r"\.\d+\.", ".{}.", short, count=1)
        if pattern not in _TORCHTITAN:
            raise BadCheckpoint(f"{full!r} has no name in {dialect}: {form.kind} is not a family that it has")
        number = re.search(r"\d+", short)
        theirs = _in_dialect(_TORCHTITAN[pattern], dialect).format(number[0] if number else "")
        make = _same
        projection = pattern.split(".")[-2] if "." in pattern else ""
        if form.kind in _ROTARY and projection in heads and "self_attn" in pattern:
            count = family.settings.get(heads[projection]) or family.settings.get("num_attention_heads")
            make = _Turned(count if natural(count) else 0, there)
        yield Made(theirs, (full,), make) if there else Made(full, (theirs,), make)
        if tied and there and pattern == "embed_tokens.weight":
            yield Made(_in_dialect("lm_head.weight", dialect), (full,), _same, weights_alone=True)


def _in_dialect(name: str, dialect: str) -> str:
    """A name of torchtitan's as an earlier version has it."""
    if dialect == TORCHTITAN:
        return name
    return "output.weight" if name == "lm_head.weight" else name.replace(".qkv_linear.", ".")


@dataclass(frozen=True)
class _Turned:
    """Rows of heads in the order of the other dialect."""

    heads: int
    interleave: bool

    def __call__(self, tensors: Sequence[Tensor], name: str) -> Tensor:
        """Of one tensor."""
        return Heads(tensors[0], self.heads, self.interleave, name)


def _same(tensors: Sequence[Tensor], name: str) -> Tensor:
    return tensors[0]


def _bare(name: str) -> str:
    """A name without what wrappers of modules put in it."""
    return _WRAPPERS.sub("", name)


def _holes(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\{\}|\*", text))


def _filled(text: str, values: Sequence[str]) -> str:
    """A pattern with its holes filled, in order."""
    remaining = iter(values)
    return re.sub(r"\{\}|\*", lambda _: next(remaining), text)


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _package() -> str:
    """The package of the models, under the name that it has in this process."""
    from shardrt.train.command import module_name

    return module_name().rpartition(".")[0]


def _models(name: str) -> ModuleType:
    return import_module(f"{_package()}.{name}")
