"""Accelerate's configuration file, key by key, as settings of the training command.

Each key becomes settings, has no effect here for a reason that is given, or is refused; no key is passed
over. Written against Accelerate's sources of July 2026 (commands/config/cluster.py, utils/dataclasses.py,
commands/launch.py). DeepSpeed's JSON would be another file, which gives a Converted, too.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardrt.train.config import built
from shardrt.train.recipe import Recipe
from shardrt.untrusted import Refused, read_regular

__all__ = ["Converted", "Key", "Unconverted", "convert", "read_yaml"]

_LARGEST = 1 << 20  # bytes of a file
_ALL_BLOCKS = 1 << 14  # as many as a model may have

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # 1 to 5
_OURS = {"HYBRID_SHARD_ZERO2": "HYBRID_SHARD_GRAD_OP"}
_HYBRIDS = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_GRAD_OP"}
_ARCHITECTURES = {
    "GPT2Block": "gpt",
    "LlamaDecoderLayer": "llama",
    "MixtralDecoderLayer": "llama",
    "OlmoeDecoderLayer": "llama",
    "Qwen3MoeDecoderLayer": "llama",
    "ViTLayer": "vit",
    "RegNetYLayer": "regnet",
}
_TYPES = {"no": "float32", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

_MPI = "MPI finds the ranks"
_TPU = "it is for TPUs"
# Whatever the value.
_NO_EFFECT = {
    "machine_rank": _MPI,
    "main_process_ip": _MPI,
    "main_process_port": _MPI,
    "rdzv_backend": _MPI,
    "same_network": _MPI,
    "main_training_function": "the training command has its own",
    "debug": "collectives that do not match end the run anyway",
    "use_cpu": "a GPU is used where CuPy finds one; CUDA_VISIBLE_DEVICES= hides it",
    "enable_cpu_affinity": "binding is an option of mpirun",
    "gpu_ids": "set CUDA_VISIBLE_DEVICES",
    "commands": _TPU,
    "command_file": _TPU,
    "dynamo_backend": "there is no torch.compile",
    "dynamo_config": "there is no torch.compile",
    "mpirun_config.mpirun_ccl": "there is no oneCCL",
    "fsdp_config.fsdp_forward_prefetch": "fsdp.prefetch holds in forward and backward",
    "fsdp_config.fsdp_use_orig_params": "parameters keep their names and shapes",
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "no rank makes or reads the whole model",
    "fsdp_config.fsdp_sync_module_states": "initial weights are a function of the seed",
    "parallelism_config.cp_backend": "there is one way",
    "parallelism_config.cp_comm_strategy": "keys and values are gathered by head",
    "parallelism_config.sp_backend": "sp_size is 1",
    "parallelism_config.sp_seq_length": "sp_size is 1",
    "parallelism_config.sp_seq_length_is_variable": "sp_size is 1",
    "parallelism_config.sp_attn_implementation": "sp_size is 1",
}
# Where the value is empty or false; else refused.
_ONLY_EMPTY = {
    "downcast_bf16": _TPU,
    "tpu_name": _TPU,
    "tpu_zone": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "tpu_vm": _TPU,
    "tpu_env": _TPU,
    "fsdp_config.fsdp_ignored_modules": "in a loop of your own, fully_shard(model, ignored=[...])",
}
# Sections that Accelerate reads for one distributed_type alone.
_SECTIONS = {"deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM", "fsdp_config": "FSDP"}
_TABLES = (*_SECTIONS, "fp8_config", "parallelism_config", "mpirun_config")


@dataclass(frozen=True)
class Key:
    """What became of one key. settings: of the recipe, "fsdp.strategy"; none: no effect, for a reason."""

    name: str
    value: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Converted:
    """keys: every one of the file. ranks, hosts: for mpirun; None where the file has no such key."""

    keys: list[Key]
    ranks: int | None
    hosts: str | None

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the recipe, "section.name" -> value."""
        return {name: value for key in self.keys for name, value in key.settings.items()}

    def toml(self, title: str) -> str:
        """The recipe, each setting with the key that it is from. The title is a comment above it."""
        tables: dict[str, list[str]] = {"": []}
        for name, value in self.settings.items():
            section, _, last = name.rpartition(".")
            text = f'"{value}"' if isinstance(value, str) else str(value).lower()
            sources = ", ".join(key.name for key in self.keys if name in key.settings)
            tables.setdefault(section, []).append(f"{last} = {text}  # {sources}")
        lines = [f"# {title}"]
        for section, rows in tables.items():
            lines += ["", f"[{section}]", *rows] if section else ["", *rows] if rows else []
        return "\n".join(lines) + "\n"


class Unconverted(ValueError):
    """Keys that have no counterpart. lines: one for each."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines


def read_yaml(path: Path) -> dict[str, Any]:
    """A file's table of keys. Raises Refused, in one line, for other than a plain YAML table; OSError.

    A key that is there twice is refused, and so are references: a file of a few lines could be endless.
    """
    try:
        import yaml
    except ImportError:
        raise Refused(f"{path}: reading YAML needs PyYAML: pip install 'shardrt[yaml]'") from None

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError(f"references are not read, line {self.peek_event().start_mark.line + 1}")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for name, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if str(name.value) in seen:
                    raise yaml.YAMLError(f"the key {str(name.value)[:80]!r} stands there twice")
                seen.add(str(name.value))
            return super().construct_mapping(node, deep=deep)

    data = read_regular(path, _LARGEST)
    try:
        found = yaml.load(data, Loader)  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        said = (
            "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        )
        raise Refused(f"{path}: {said}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise Refused(f"{path}: it must be a table of keys and values")
    return found


def convert(config: Mapping[str, Any], drop: Iterable[str] = ()) -> Converted:
    """The settings for the training command. drop: keys to leave out, by their whole name.

    Raises Unconverted for all keys that have no counterpart, and for values that can't be.
    """
    reader = _Reader(_flat(config), list(drop))
    kind = _kind(reader)
    if kind is None:
        raise Unconverted(reader.refused)
    _ignored_sections(reader, kind)
    machines = reader.count("num_machines", 1)
    reader.noted("num_machines", "one machine" if machines == 1 else "in the host file of mpirun's -f")
    ranks = reader.count("num_processes", 1 if kind == "NO" else None)
    reader.noted("num_processes", f"mpirun's -n {ranks}")
    hosts = reader.text("mpirun_config.mpirun_hostfile")
    reader.noted("mpirun_config.mpirun_hostfile", f"mpirun's -f {hosts}")
    shards = _strategy(reader, kind, machines)
    _parallelism(reader, shards, ranks)
    _precision(reader, kind)
    _units(reader)
    _memory(reader)
    for name in list(reader.left):
        if name in _NO_EFFECT or name in _ONLY_EMPTY and not _is_set(reader.left[name]):
            reader.no_effect(name, _NO_EFFECT.get(name) or "it is not set")
        elif name in _ONLY_EMPTY:
            reader.refuse(name, _ONLY_EMPTY[name])
        else:
            reader.refuse(name, "unknown key")
    _check(reader, ranks)
    if reader.refused:
        raise Unconverted(reader.refused)
    order = {name: number for number, name in enumerate(_flat(config))}
    keys = sorted(reader.keys, key=lambda key: order.get(key.name, -1))
    return Converted(keys, ranks, hosts)


class _Reader:
    """Takes keys, and keeps what became of each. left: those that are not taken yet."""

    def __init__(self, table: dict[str, Any], drop: list[str]) -> None:
        self.left, self.keys, self.refused = dict(table), [], []
        for name in drop:
            if name in self.left:
                self.no_effect(name, "dropped")
            else:
                self.refused.append(f"--drop {name}: there is no such key")

    def take(self, name: str) -> Any:
        return self.left.pop(name, None)

    def setting(self, name: str, value: Any, note: str = "", **settings: Any) -> None:
        """`name` becomes settings: "fsdp__strategy" for fsdp.strategy."""
        named = {setting.replace("__", "."): each for setting, each in settings.items()}
        self.left.pop(name, None)
        self.keys.append(Key(name, value, named, note))

    def change(self, setting: str, value: Any) -> None:
        """Give a setting of a key another value: two keys together decide."""
        for number, key in enumerate(self.keys):
            if setting in key.settings:
                self.keys[number] = replace(key, settings={**key.settings, setting: value})

    def no_effect(self, name: str, why: str) -> None:
        self.keys.append(Key(name, self.left.pop(name), note=why))

    def noted(self, name: str, why: str) -> None:
        """As no_effect, if the key is left."""
        if name in self.left:
            self.no_effect(name, why)

    def refuse(self, name: str, why: str, value: Any = None) -> None:
        value = self.left.pop(name, value)
        shown = str(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
        self.refused.append(f"{name}: {shown[:80]}: {why}")

    def _taken(self, name: str, default: Any, read: Callable[[Any], Any], wanted: str) -> Any:
        if self.left.get(name) is None:
            if name in self.left:
                self.no_effect(name, "it is not set")
            return default
        value = read(self.left[name])
        if value is None:
            self.refuse(name, f"must be {wanted}")
            return default
        return value

    def flag(self, name: str) -> bool:
        def read(value: Any) -> bool | None:
            text = str(value).lower()
            return True if text in _YES else False if text in _NO else None

        return self._taken(name, False, read, "true or false")

    def count(self, name: str, default: int | None) -> int | None:
        """An integer of at least 1."""

        def read(value: Any) -> int | None:
            text = str(value) if isinstance(value, int | str) else ""
            good = text.isascii() and text.isdecimal() and len(text) < 10
            return int(text) if good and int(text) else None

        return self._taken(name, default, read, "an integer of at least 1")

    def text(self, name: str) -> str | None:
        return self._taken(name, None, lambda value: value if isinstance(value, str) else None, "a text")

    def choice(
        self, name: str, choices: Iterable[str], default: str | None = None, numbered: bool = False
    ) -> str | None:
        """One of a few words in any case, or its number from 1 on. YAML takes a bare `no` for false."""
        by_name = {choice.lower(): choice for choice in choices}
        if numbered:
            by_name |= {str(number): choice for number, choice in enumerate(choices, start=1)}

        def read(value: Any) -> str | None:
            return by_name.get("no" if value is False else str(value).lower())

        return self._taken(name, default, read, f"one of {', '.join(choices)}")


_YES, _NO = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys with those of sections by their whole name. Old files leave "fsdp_" out."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        inside = value if name in _TABLES and isinstance(value, dict) else {}
        if not inside:
            found[name] = value
        for inner, each in inside.items():
            inner = str(inner).removeprefix("parallelism_config_")
            if name == "fsdp_config" and not inner.startswith("fsdp"):
                inner = f"fsdp_{inner}"
            if f"{name}.{inner}" in found:
                raise Unconverted([f"{name}.{inner}: it stands there twice"])
            found[f"{name}.{inner}"] = each
    return found


def _is_set(value: Any) -> bool:
    return bool(value) and str(value).lower() not in _NO


def _kind(reader: _Reader) -> str | None:
    """NO, FSDP or DDP; None where it is refused."""
    if "compute_environment" in reader.left:
        place = reader.choice("compute_environment", ["LOCAL_MACHINE", "AMAZON_SAGEMAKER"])
        if place == "AMAZON_SAGEMAKER":
            reader.refuse("compute_environment", "start the training command with MPI there")
        elif place:
            reader.no_effect("compute_environment", "MPI starts the ranks")
    if "distributed_type" not in reader.left:
        reader.refuse("distributed_type", "it must be there, as for Accelerate")
        return None
    given = reader.left["distributed_type"]
    kind = "NO" if given is False else str(given).upper()
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP"):
        others = {"DEEPSPEED": "DeepSpeed's", "MEGATRON_LM": "Megatron-LM's"}
        why = f"{others[kind]} settings are not read" if kind in others else "it is for other processors"
        reader.refuse("distributed_type", why)
        return None
    return kind if kind in ("NO", "FSDP") else "DDP"


def _ignored_sections(reader: _Reader, kind: str) -> None:
    """Accelerate, too, reads these for their own distributed_type alone."""
    for name in list(reader.left):
        section, _, key = name.partition(".")
        wanted = _SECTIONS.get(section)
        if wanted and kind != wanted:
            reader.no_effect(name, f"Accelerate reads it with distributed_type {wanted} alone")
        elif not key and section in _TABLES:
            if _is_set(reader.left[name]):
                reader.refuse(name, "must be a table of keys")
            else:
                reader.no_effect(name, "it is empty")


def _strategy(reader: _Reader, kind: str, machines: int | None) -> str:
    """The strategy for shards that no parallelism_config doubles; sets the key that names it."""
    version = reader.choice("fsdp_config.fsdp_version", ["1", "2"], "1") if kind == "FSDP" else None
    reader.noted("fsdp_config.fsdp_version", "both versions come to the same")
    if kind != "FSDP":
        reader.setting("distributed_type", reader.take("distributed_type"), fsdp__strategy="NO_SHARD")
        return "NO_SHARD"
    reader.no_effect("distributed_type", "the strategy says how")
    old, new = "fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward"
    if version == "2":
        reader.noted(old, "fsdp_version 2 has fsdp_reshard_after_forward")
        again = reader.flag(new) if reader.left.get(new) is not None else True
        chosen, source = ("FULL_SHARD" if again else "SHARD_GRAD_OP"), new
    else:
        strategies = {name: reader.choice(name, _STRATEGIES, numbered=True) for name in (old, new)}
        if strategies[old] and strategies[new] and strategies[old] != strategies[new]:
            reader.refuse(new, f"fsdp_sharding_strategy is {strategies[old]}")
        elif strategies[old] and strategies[new]:
            reader.no_effect(new, "fsdp_sharding_strategy says the same")
        source = new if strategies[new] and not strategies[old] else old
        chosen = strategies[source] or "FULL_SHARD"
    settings: dict[str, Any] = {"fsdp__strategy": _OURS.get(chosen, chosen)}
    note = "" if source in reader.left else "Accelerate's default"
    if "HYBRID" in chosen:
        if machines and machines > 1:
            settings["fsdp__copies"] = machines
        else:  # a group of shards is a machine, so there is one copy
            settings["fsdp__strategy"] = "FULL_SHARD" if chosen == "HYBRID_SHARD" else "SHARD_GRAD_OP"
            note = "one machine has one copy"
    value = reader.take(source) if source in reader.left else chosen
    reader.setting(source, value, note, **settings)
    return settings["fsdp__strategy"]


def _parallelism(reader: _Reader, strategy: str, ranks: int | None) -> None:
    prefix = "parallelism_config."
    sizes = {}
    for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp"):
        name = f"{prefix}{axis}_size"
        size = sizes[axis] = reader.count(name, 1)
        if name not in reader.left:
            continue
        value = reader.left[name]
        if size == 1:
            reader.no_effect(name, "1 is no axis")
        elif axis == "sp":
            reader.refuse(name, "Ulysses' sequence parallelism: use cp_size, or tp_size")
        elif axis == "dp_shard":
            reader.no_effect(name, "the ranks that the other axes leave")
        elif axis == "dp_replicate":
            if strategy == "NO_SHARD":
                reader.no_effect(name, "each rank has a copy")
            elif strategy in _HYBRIDS:
                reader.setting(name, value, fsdp__copies=size)
                reader.change("fsdp.strategy", _HYBRIDS[strategy])
            else:
                reader.refuse(name, f"copies of {strategy}: give the number of machines alone")
        elif axis == "tp":
            reader.setting(name, value, parallel__tp=size)
        else:
            reader.setting(name, value, parallel__cp=size)
    needed = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["tp"] * sizes["cp"]
    if ranks is not None and needed not in (1, ranks):
        reader.refused.append(f"parallelism_config: its axes have {needed} ranks, num_processes is {ranks}")


def _precision(reader: _Reader, kind: str) -> None:
    if "fp16" in reader.left:  # files of 2021
        old = reader.flag("fp16")
        if "fp16" in reader.left and "mixed_precision" in reader.left:
            reader.no_effect("fp16", "mixed_precision is there")
        elif "fp16" in reader.left:
            given = "float16" if old else "float32"
            reader.setting("fp16", reader.take("fp16"), precision__param=given, precision__reduce=given)
    if reader.left.get("mixed_precision") is None:
        if "mixed_precision" in reader.left:
            reader.no_effect("mixed_precision", "it is not set")
    elif str(reader.left["mixed_precision"]).lower() == "fp8":
        reader.refuse("mixed_precision", "in a loop of your own, MixedPrecisionPolicy(float8=True)")
    else:
        chosen = reader.choice("mixed_precision", _TYPES)
        if chosen is not None:
            dtype = _TYPES[chosen]
            # FSDP's plugin reduces in the same type; DistributedDataParallel's autocast in float32.
            reduced = dtype if kind == "FSDP" else "float32"
            value = reader.take("mixed_precision")
            reader.setting("mixed_precision", value, precision__param=dtype, precision__reduce=reduced)
    for name in [name for name in reader.left if name.startswith("fp8_config")]:
        reader.no_effect(name, "Accelerate reads it with mixed_precision fp8 alone")


def _units(reader: _Reader) -> None:
    """What is a unit, and how early it is gathered. No value of these changes a result."""
    prefix = "fsdp_config.fsdp_"
    policy, size = f"{prefix}auto_wrap_policy", f"{prefix}min_num_params"
    cls = f"{prefix}transformer_layer_cls_to_wrap"
    chosen = reader.choice(policy, ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"], numbered=True)
    if policy in reader.left:
        value = reader.take(policy)
        notes = {"SIZE_BASED_WRAP": "units are whole blocks; in a loop of your own, wrap(model, by_size(N))"}
        blocks = _ALL_BLOCKS if chosen == "NO_WRAP" else 1
        reader.setting(policy, value, notes.get(str(chosen), ""), fsdp__blocks=blocks)
    if reader.left.get(size) is not None:
        why = "units are whole blocks" if chosen in (None, "SIZE_BASED_WRAP") else f"the policy is {chosen}"
        reader.no_effect(size, why)
    if not isinstance(reader.left.get(cls), str | None):
        reader.refuse(cls, "must be a text: classes between commas")
    elif reader.left.get(cls) is not None:
        names = [name.strip() for name in reader.left[cls].split(",")]
        found = {_ARCHITECTURES.get(name) for name in names}
        if None in found or len(found) > 1:
            known = ", ".join(_ARCHITECTURES)
            reader.refuse(cls, f"the training command has the models of one of these: {known}")
        else:
            reader.setting(cls, reader.take(cls), architecture=found.pop())
    prefetch = prefix + "backward_prefetch"
    chosen = reader.choice(prefetch, ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"], numbered=True)
    if prefetch in reader.left:
        value = reader.take(prefetch)
        note = "gathers when it is needed" if chosen == "BACKWARD_POST" else ""
        reader.setting(prefetch, value, note, fsdp__prefetch=int(chosen == "BACKWARD_PRE"))
    for name in (size, cls):
        if name in reader.left and reader.left[name] is None:
            reader.no_effect(name, "it is not set")


def _memory(reader: _Reader) -> None:
    prefix = "fsdp_config.fsdp_"
    name = prefix + "offload_params"
    on = reader.flag(name)
    if on:
        parts = ("parameters", "gradients", "optimizer")
        settings: dict[str, Any] = {f"memory__offload_{part}": True for part in parts}
        reader.setting(name, reader.take(name), **settings, memory__update_on="host")
    elif name in reader.left:
        reader.no_effect(name, "off, as in a recipe that says nothing")
    name = prefix + "activation_checkpointing"
    on = reader.flag(name)
    if name in reader.left:
        reader.setting(name, reader.take(name), memory__recompute="full" if on else "none")
    name = prefix + "state_dict_type"
    kinds = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
    chosen = reader.choice(name, kinds, numbered=True)
    if name in reader.left and chosen == "FULL_STATE_DICT":
        reader.setting(name, reader.take(name), "whole weights at the end", export=True)
    elif name in reader.left:
        reader.no_effect(name, "checkpoints are sharded, for any number of ranks; see checkpoint.every")


def _check(reader: _Reader, ranks: int | None) -> None:
    """Refuse settings that do not fit together, as the training command would."""
    tables: dict[str, dict[str, Any]] = {}
    for key in reader.keys:
        for name, value in key.settings.items():
            section, _, last = name.rpartition(".")
            if section:
                tables.setdefault(section, {})[last] = value
    try:
        recipe = built(Recipe, tables)
        if ranks is not None:
            recipe.axes(ranks)
    except ValueError as error:
        reader.refused.append(str(error))
