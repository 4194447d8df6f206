"""Accelerate's configuration file, key by key, as settings of the training command.

Each key becomes settings, has no effect here for a reason that is given, or is refused; no key is passed
over. Written against the sources of Accelerate 1.15 (commands/config/cluster.py, utils/dataclasses.py,
commands/launch.py). Keys of deepspeed_config are those of DeepSpeed by other names: deepspeed.py has them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardrt.train import deepspeed
from shardrt.train.conversion import Converted, Reader, Unconverted, is_set
from shardrt.untrusted import Refused, read_regular

__all__ = ["convert", "read_yaml"]

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
    "deepspeed_config.zero3_init_flag": "no rank makes or reads the whole model",
    "deepspeed_config.deepspeed_moe_layer_cls_names": "units are whole blocks",
    "deepspeed_config.deepspeed_multinode_launcher": _MPI,
    "deepspeed_config.deepspeed_hostfile": "give the hosts to mpirun's -f, a line each",
    "deepspeed_config.deepspeed_exclusion_filter": "leave the hosts out of mpirun's -f",
    "deepspeed_config.deepspeed_inclusion_filter": "give the hosts to mpirun's -f, a line each",
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
# Those that functions below read.
_READ = (
    *("compute_environment", "distributed_type", "num_machines", "num_processes", "mixed_precision", "fp16"),
    *("mpirun_config.mpirun_hostfile", "deepspeed_config.deepspeed_config_file"),
    *(f"parallelism_config.{axis}_size" for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp")),
    *(
        f"fsdp_config.fsdp_{name}"
        for name in (
            *("version", "sharding_strategy", "reshard_after_forward", "auto_wrap_policy", "min_num_params"),
            *("transformer_layer_cls_to_wrap", "backward_prefetch", "offload_params", "state_dict_type"),
            *("activation_checkpointing", "activation_checkpointing_offload"),
        )
    ),
)
# Sections that Accelerate reads for one distributed_type alone.
_SECTIONS = {"deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM", "fsdp_config": "FSDP"}
_TABLES = (*_SECTIONS, "fp8_config", "parallelism_config", "mpirun_config")


def known() -> list[str]:
    """The keys that convert knows."""
    return [*_NO_EFFECT, *_ONLY_EMPTY, *_READ, *(f"deepspeed_config.{name}" for name in _DEEPSPEED)]


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
    reader = Reader(_flat(config), list(drop))
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
    if kind == "DEEPSPEED":
        shards = _deepspeed(reader, ranks)
    else:
        shards = _strategy(reader, kind, machines)
    _parallelism(reader, shards, ranks)
    _precision(reader, kind)
    _units(reader)
    _memory(reader)
    for name in list(reader.left):
        if name in _NO_EFFECT or name in _ONLY_EMPTY and not is_set(reader.left[name]):
            reader.no_effect(name, _NO_EFFECT.get(name) or "it is not set")
        elif name in _ONLY_EMPTY:
            reader.refuse(name, _ONLY_EMPTY[name])
    return reader.finish(ranks, hosts, known())


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


def _kind(reader: Reader) -> str | None:
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
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED"):
        megatron = kind == "MEGATRON_LM"
        why = "Megatron-LM's settings are not read" if megatron else "it is for other processors"
        reader.refuse("distributed_type", why)
        return None
    return kind if kind in ("NO", "FSDP", "DEEPSPEED") else "DDP"


def _ignored_sections(reader: Reader, kind: str) -> None:
    """Accelerate, too, reads these for their own distributed_type alone."""
    for name in list(reader.left):
        section, _, key = name.partition(".")
        wanted = _SECTIONS.get(section)
        if wanted and kind != wanted:
            reader.no_effect(name, f"Accelerate reads it with distributed_type {wanted} alone")
        elif not key and section in _TABLES:
            if is_set(reader.left[name]):
                reader.refuse(name, "must be a table of keys")
            else:
                reader.no_effect(name, "it is empty")


def _strategy(reader: Reader, kind: str, machines: int | None) -> str:
    """The strategy for shards that no parallelism_config doubles; sets the key that names it."""
    version = reader.choice("fsdp_config.fsdp_version", ["1", "2"], "1") if kind == "FSDP" else None
    reader.noted("fsdp_config.fsdp_version", "shardrt does the same for both")
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


# Accelerate's key -> DeepSpeed's.
_DEEPSPEED = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}


def _deepspeed(reader: Reader, ranks: int | None) -> str:
    """Keys of deepspeed_config; gives the strategy."""
    reader.no_effect("distributed_type", "zero_stage says how")
    file = "deepspeed_config.deepspeed_config_file"
    if is_set(reader.left.get(file)) and reader.left[file] != "none":
        reader.refuse(file, "convert this file itself: shardrt config convert FILE.json --ranks N")
    reader.noted(file, "it is not set")
    own = {ours: f"deepspeed_config.{name}" for name, ours in _DEEPSPEED.items()}
    table = {ours: reader.take(name) for ours, name in own.items() if name in reader.left}
    inner = Reader(table, [])
    if "zero_optimization.stage" not in table:
        table["zero_optimization.stage"] = inner.left["zero_optimization.stage"] = 2  # Accelerate's default
    deepspeed.settle(inner, table, ranks)
    for key in inner.keys:
        reader.keys.append(replace(key, name=own.get(key.name, key.name)))
    for line in inner.refused:
        name, colon, why = line.partition(": ")
        reader.refused.append(f"{own.get(name, name)}{colon}{why}")
    return next((key.settings["fsdp.strategy"] for key in inner.keys if "fsdp.strategy" in key.settings), "")


def _parallelism(reader: Reader, strategy: str, ranks: int | None) -> None:
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


def _precision(reader: Reader, kind: str) -> None:
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
            # FSDP's plugin and DeepSpeed reduce in the same type, DistributedDataParallel in float32.
            reduced = dtype if kind in ("FSDP", "DEEPSPEED") else "float32"
            value = reader.take("mixed_precision")
            reader.setting("mixed_precision", value, precision__param=dtype, precision__reduce=reduced)
    for name in [name for name in reader.left if name.startswith("fp8_config")]:
        reader.no_effect(name, "Accelerate reads it with mixed_precision fp8 alone")


def _units(reader: Reader) -> None:
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


def _memory(reader: Reader) -> None:
    prefix = "fsdp_config.fsdp_"
    name = prefix + "offload_params"
    on = reader.flag(name)
    if on:
        reader.setting(name, reader.take(name), **deepspeed.ON_HOST)
    elif name in reader.left:
        reader.no_effect(name, "off, as in a recipe that says nothing")
    name = prefix + "activation_checkpointing"
    on = reader.flag(name)
    if name in reader.left:
        reader.setting(name, reader.take(name), memory__recompute="full" if on else "none")
    name = prefix + "activation_checkpointing_offload"
    on = reader.flag(name)
    if on:
        reader.setting(name, reader.take(name), memory__offload_activations=True)
    elif name in reader.left:
        reader.no_effect(name, "off, as in a recipe that says nothing")
    name = prefix + "state_dict_type"
    kinds = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
    chosen = reader.choice(name, kinds, numbered=True)
    if name in reader.left and chosen == "FULL_STATE_DICT":
        reader.setting(name, reader.take(name), "whole weights at the end", export=True)
    elif name in reader.left:
        reader.no_effect(name, "checkpoints are sharded, for any number of ranks; see checkpoint.every")
