"""DeepSpeed's JSON configuration, key by key, as settings of the training command.

Each key becomes settings, has no effect here for a reason that is given, or is refused; no key is passed
over. Written against the sources of DeepSpeed 0.19.8; tests/train/deepspeed_keys.json has their keys. A value
"auto" is one that Hugging Face's Trainer fills in: it has no setting, and its account says what to give.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardrt.train.conversion import Converted, Reader, Unconverted, is_set
from shardrt.untrusted import Refused, number, read_regular, strict_json

__all__ = ["ON_HOST", "convert", "known", "read_json", "settle"]

_LARGEST = 1 << 20  # bytes of a file
_ZERO = "zero_optimization."
_OPTIMIZER, _SCHEDULER = "optimizer.params.", "scheduler.params."
ON_HOST: dict[str, Any] = {
    **{f"memory__offload_{part}": True for part in ("parameters", "gradients", "optimizer")},
    "memory__update_on": "host",
}
_WAITS = {"offload_optimizer": "DeepSpeed's float32 weights wait there, too", "offload_param": ""}
_STRATEGIES = ("NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "FULL_SHARD")  # by stage
_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_LONG = {long: long for long in _TYPES.values()} | {"float": "float32", "half": "float16"}
_LONG |= {f"torch.{name}": long for name, long in _LONG.items()} | _TYPES

# What to give where the Trainer would fill a value in.
_AUTO = {
    "train_batch_size": "give --batch-size",
    "train_micro_batch_size_per_gpu": "give --batch-size, of all ranks together",
    "gradient_accumulation_steps": "give --micro-batches",
    "gradient_clipping": "give --optimizer.clip-norm",
    "bf16.enabled": "give --precision.param bfloat16 --precision.reduce bfloat16",
    "fp16.enabled": "give --precision.param float16 --precision.reduce float16",
    "optimizer.params.lr": "give --optimizer.lr",
    "optimizer.params.muon_lr": "give --optimizer.muon-lr",
    "optimizer.params.adam_lr": "give --optimizer.lr",
    "optimizer.params.momentum": "give --optimizer.momentum",
    "optimizer.params.betas": "give --optimizer.betas",
    "optimizer.params.weight_decay": "give --optimizer.weight-decay",
    "scheduler.params.warmup_max_lr": "give --optimizer.lr",
    "scheduler.params.warmup_num_steps": "give --optimizer.warmup-steps",
    "scheduler.params.total_num_steps": "give --steps",
}


def _named(section: str, names: str, why: str) -> dict[str, str]:
    return {section + name: why for name in names.split()}


_UNITS = "units are whole blocks, and fsdp.prefetch of them are gathered ahead"
_BUCKETS = "a message has the gradients of a unit"
_SCALE = "the loss scale starts at 2^16 and doubles after 2,000 good steps"
_DISK = "memory.directory is read and written as mapped files"
_LOOP = "the training command has its own loop"
_TRACE = "report.trace keeps a trace of steps"
_CHECKPOINTS = "checkpoints are sharded, for any number of ranks; see checkpoint.every"
_COMPILE = "there is no torch.compile"
_TORCH = "the optimizer is a kernel of its own"
_MODEL = "the model says how it is split"
# Whatever the value.
_NO_EFFECT = {
    **_named(
        _ZERO,
        "reduce_bucket_size reduce_scatter use_multi_rank_bucket_allreduce contiguous_gradients "
        "round_robin_gradients",
        _BUCKETS,
    ),
    **_named(
        _ZERO,
        "allgather_bucket_size allgather_partitions stage3_param_persistence_threshold "
        "param_persistence_threshold stage3_model_persistence_threshold model_persistence_threshold "
        "stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance max_reuse_distance "
        "stage3_module_granularity_threshold module_granularity_threshold stage3_allgather_sequential "
        "allgather_sequential stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params "
        "leaf_module leaf_module.classes leaf_module.names leaf_module.name_suffixes",
        _UNITS,
    ),
    **_named(_ZERO, "overlap_comm", "messages and compute always overlap"),
    **_named(_ZERO, "sub_group_size", "the optimizer updates a unit at a time"),
    **_named(_ZERO, "compute_grad_norm", "optimizer.clip_norm = inf computes none to clip with"),
    **_named(_ZERO, "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint", _CHECKPOINTS),
    **_named(_ZERO, "cpu_offload_use_pin_memory", "buffers for copies are pinned"),
    **_named(_ZERO, "ignore_unused_parameters", "a parameter without a gradient is not an error"),
    **_named(_ZERO, "legacy_stage1 parameter_alignment override_module_apply", "it is DeepSpeed's own"),
    **_named(_ZERO, "memory_efficient_linear", "a linear layer keeps its input alone"),
    **_named(_ZERO, "log_trace_cache_warnings", "the order of gathers is the modules'"),
    **_named(_ZERO, "enable_sanity_checks", "collectives that do not match end the run anyway"),
    **_named(_ZERO, "save_muon_momentum_buffer_in_memory", "momenta are where other optimizer state is"),
    **_named(
        _ZERO, "mics_hierarchical_params_gather", "transports within and between hosts are chosen anyway"
    ),
    **_named(_ZERO + "offload_optimizer.", "buffer_count pipeline_read pipeline_write fast_init", _DISK),
    **_named(_ZERO + "offload_optimizer.", "pin_memory", "buffers for copies are pinned"),
    **_named(_ZERO + "offload_optimizer.", "super_offload", "the host updates by one kernel"),
    **_named(_ZERO + "offload_optimizer.", "cpuadam_cores_perc", "see threads"),
    **_named(_ZERO + "offload_param.", "buffer_count buffer_size max_in_cpu", _DISK),
    **_named(_ZERO + "offload_param.", "pin_memory", "buffers for copies are pinned"),
    **_named(
        "fp16.",
        "initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale",
        _SCALE,
    ),
    **_named("fp16.", "auto_cast", "inputs take the type of the parameters"),
    **_named("bf16.", "immediate_grad_update", "gradients are added as they come"),
    **_named(_OPTIMIZER, "torch_adam foreach set_grad_none fp32_optimizer_states", _TORCH),
    **_named("optimizer.", "legacy_fusion", _TORCH),
    **_named(
        "activation_checkpointing.", "contiguous_memory_optimization number_checkpoints", "blocks are units"
    ),
    **_named("activation_checkpointing.", "synchronize_checkpoint_boundary profile", _TRACE),
    **_named("aio.", "block_size queue_depth single_submit overlap_events", _DISK),
    **_named("aio.", "intra_op_parallelism thread_count use_gds", _DISK),
    **_named("checkpoint.", "tag_validation load_universal checkpoint_serialization", _CHECKPOINTS),
    **_named("checkpoint.", "parallel_write.pipeline_stage parallel_write", _CHECKPOINTS),
    **_named(
        "checkpoint.writer.",
        "type io_buffer_size io_buffer_double show_statistics data_parallel decoupled io_multiplier",
        "see checkpoint.in_background",
    ),
    **_named("pipeline.", "partition", "stages have as many blocks each as can be"),
    **_named("pipeline.", "seed_layers", "initial weights are a function of the seed"),
    **_named("pipeline.", "pipe_partitioned grad_partitioned", "see parallel.sequence"),
    **_named("pipeline.", "use_reentrant", "there is one way"),
    **_named("tensor_parallel.", "tp_overlap_comm", "messages and compute always overlap"),
    **_named("tensor_parallel.", "preset_model vocab_parallel_lm_head vocab_parallel_ce_backend", _MODEL),
    **_named("tensor_parallel.", "dtype", "precision.param has the type"),
    **_named("tensor_parallel.", "keep_module_on_host", "no rank makes or reads the whole model"),
    **_named("tensor_parallel.", "replace_with_kernel_inject kernel_inject", "kernels are its own"),
    **_named("compile.", "autoep_non_moe free_activation free_activation_threshold", _COMPILE),
    **_named("compile.", "offload_activation_pin_memory double_buffer symmetric_memory debug_log", _COMPILE),
    **_named("compile.", "deepcompile sync_before_reduce sync_after_reduce sync_before_allgather", _COMPILE),
    **_named("compile.", "sync_after_allgather keep_int_input_tensors keep_all_input_tensors", _COMPILE),
    **_named("compile.", "passes", _COMPILE),
    **_named("comms_logger.", "enabled prof_all prof_ops verbose debug", _TRACE),
    **_named("csv_monitor.", "enabled output_path job_name", "metrics.jsonl in runs/NAME has the figures"),
    **_named("tensorboard.", "output_path job_name", "files go to runs/NAME/tensorboard"),
    **_named(
        "flops_profiler.",
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
        _TRACE,
    ),
    **_named("timers.throughput.", "enabled synchronized", "each progress line has the rate"),
    **_named("", "wall_clock_breakdown", _TRACE),
    **_named("", "memory_breakdown", "metrics.jsonl in runs/NAME has the memory"),
    **_named("", "dump_state", "config.toml in runs/NAME has all settings"),
    **_named("", "log_level", "progress lines are the log; see report.log_interval"),
    **_named("", "disable_python_gc managed_gradient_accumulation", _LOOP),
    **_named("", "dataloader_drop_last", "each batch is whole"),
    **_named("", "vocabulary_size", "the model has it"),
    **_named("", "zero_allow_untested_optimizer", "optimizer.name has the choice"),
    **_named("", "zero_force_ds_cpu_optimizer", "memory.update_on says where"),
    **_named("", "prescale_gradients gradient_predivide_factor", "the gradient is the mean either way"),
    **_named("", "seq_parallel_communication_data_type", "it is for Ulysses"),
    **_named("", "use_data_before_expert_parallelism", "the mesh has its own order"),
    **_named("", "datastates_ckpt", "see checkpoint.in_background"),
    **_named("", "sparse_gradients", "gradients of embeddings are dense"),
    **_named("", "allgather_size", _UNITS),
    **_named("", "graph_harvesting", "there are no CUDA graphs of a model"),
}
# Where the value is DeepSpeed's default, empty or false; else refused.
_ONLY_DEFAULT: dict[str, tuple[Any, str]] = {
    _ZERO + "zero_quantized_nontrainable_weights": (False, "weights are gathered in precision.param"),
    _ZERO + "zeropp_loco_param": (None, "give --precision.error-feedback true: it keeps each error whole"),
    _ZERO + "offload_optimizer.ratio": (1, "all of a rank's state waits on the host, or none"),
    "fp16.loss_scale": (0, "the loss scale is dynamic"),
    "fp16.fp16_master_weights_and_grads": (False, "the updated weights stay float32"),
    "bf16.bf16_master_weights_and_grads": (False, "the updated weights stay float32"),
    "bf16.bf16_optimizer_states": (False, "give --optimizer.name adamw_bf16, or lion_bf16 or adamw8bit"),
    "torch_autocast.lower_precision_safe_modules": (None, "all layers but norms compute in precision.param"),
    "data_types.buffer_dtype": (None, "buffers keep their type"),
    "data_types.keep_in_fp32_modules": ("auto", "see precision.norms_in_float32"),
    _OPTIMIZER + "eps": (1e-8, "the training command has 1e-8"),
    _OPTIMIZER + "bias_correction": (True, "AdamW corrects it"),
    _OPTIMIZER + "amsgrad": (False, "there is no AMSGrad"),
    _OPTIMIZER + "max_grad_norm": (0, "use gradient_clipping, as for DeepSpeed"),
    _SCHEDULER + "warmup_min_lr": (0, "the warm-up starts at lr / warmup_steps"),
    _SCHEDULER + "warmup_min_ratio": (0, "the warm-up starts at lr / warmup_steps"),
    "gradient_allreduce_op": ("mean", "the gradient is the mean over all ranks"),
    "disable_allgather": (False, "weights are gathered"),
    "tensor_parallel.injection_policy_tuple": (None, _MODEL),
    "tensor_parallel.partition_config": (None, _MODEL),
    "tensor_parallel.tp.mpu": (None, _MODEL),
    "tensor_parallel.tp.tp_group": (None, _MODEL),
    "tensor_parallel.tp.tp_grain_size": (1, _MODEL),
    "compile.offload_activation": (False, "set memory.offload_activations in the recipe"),
    "compile.offload_opt_states": (False, "set memory.offload_optimizer in the recipe"),
    "compile.offload_parameters": (False, "set memory.offload_parameters in the recipe"),
    "expert_parallel.expert_tensor_parallel_size": (1, "experts are whole"),
    **{
        f"expert_parallel.{name}": (default, "the model says how its experts are routed")
        for name, default in {
            **dict.fromkeys(("route_norm", "load_balance_coeff", "num_expert_groups"), None),
            **dict.fromkeys(("num_limited_groups",), None),
            **dict.fromkeys(("score_apply", "score_func", "top_k", "routed_scaling_factor"), "auto"),
            "route_scale": 1,
        }.items()
    },
}
_NO_EFFECT |= _named(
    "expert_parallel.",
    "async_split_plan combine_impl comm_backend comm_max_tokens_per_rank comm_num_sm comm_qp_margin "
    "disable_triton_grouped_mm expert_activation expert_pattern expert_w1 expert_w2 expert_w3 gate_up_impl "
    "has_shared_experts moe_layer_pattern num_experts_attr preset_model router_pattern row_weighting_impl "
    "shared_experts_gate_pattern shared_experts_pattern top_k_attr use_grouped_mm validate_folding_routing",
    "experts are layers of the model",
)
# Sections with all keys in them: no effect where they are off, or not there; else refused.
_OTHER_TOOLS = {
    "wandb": "there is --tensorboard, and metrics.jsonl in runs/NAME",
    "comet": "there is --tensorboard, and metrics.jsonl in runs/NAME",
    "autotuning": "use shardrt plan",
    "hybrid_engine": "text is generated by another command",
    "data_efficiency": "samples have one order and one length",
    "curriculum_learning": "samples have one order and one length",
    "compression_training": "weights are not compressed",
    "quantize_training": "weights are not quantised",
    "weight_quantization": "weights are not quantised",
    "eigenvalue": "weights are not quantised",
    "sparse_attention": "attention is dense",
    "elasticity": "checkpoints are for any number of ranks; give the batch itself",
    "progressive_layer_drop": "all layers compute",
    "nebula": "see checkpoint.in_background",
    "amp": "use bf16 or fp16",
    _ZERO + "zenflow": "each gradient is used at its own step",
}
# Those that functions below read.
_READ = (
    *_AUTO,
    *(
        "steps_per_print",
        "communication_data_type",
        "optimizer.type",
        "scheduler.type",
        _OPTIMIZER + "adam_w_mode",
        _OPTIMIZER + "ns_method",
    ),
    *(
        _OPTIMIZER + "adamw_mode",
        _SCHEDULER + "cos_min_ratio",
        _SCHEDULER + "warmup_type",
        "tensorboard.enabled",
    ),
    *("bf16.check_grad_overflow", "torch_autocast.enabled", "torch_autocast.dtype", "data_types.param_dtype"),
    "data_types.grad_accum_dtype",
    *("activation_checkpointing.cpu_checkpointing", "activation_checkpointing.partition_activations"),
    *("pipeline.stages", "pipeline.activation_checkpoint_interval", "checkpoint.use_node_local_storage"),
    *("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size", "expert_parallel.enabled"),
    *("expert_parallel.autoep_size", _ZERO + "stage", _ZERO + "cpu_offload", _ZERO + "cpu_offload_param"),
    *(_ZERO + "zero_hpz_partition_size", _ZERO + "mics_shard_size", _ZERO + "stage3_prefetch_bucket_size"),
    *(_ZERO + "zero_quantized_weights", _ZERO + "zero_quantized_gradients"),
    *(_ZERO + "prefetch_bucket_size", _ZERO + "stage3_gather_16bit_weights_on_model_save"),
    *(_ZERO + "gather_16bit_weights_on_model_save", _ZERO + "stage3_gather_fp16_weights_on_model_save"),
    *(f"{_ZERO}offload_{part}.{name}" for part in ("optimizer", "param") for name in ("device", "nvme_path")),
)
# Arguments of schedules that are refused with their type.
_OTHER_SCHEDULES = (
    "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
    "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
    "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom "
    "cycle_max_mom decay_mom_rate"
)
_NO_EFFECT |= _named(_SCHEDULER, _OTHER_SCHEDULES, "the schedule has no such value")
_ALIASES = {"bfloat16.": "bf16.", "tensor_parallel.tensor_parallel.": "tensor_parallel.tp."}


def known() -> list[str]:
    """The keys that convert knows; of `_OTHER_TOOLS` the sections alone."""
    return [*dict.fromkeys((*_READ, *_NO_EFFECT, *_ONLY_DEFAULT, *_OTHER_TOOLS))]


def read_json(path: Path) -> dict[str, Any]:
    """A file's table of keys. Raises Refused, in one line, for other than a JSON object; OSError."""
    data = read_regular(path, _LARGEST)
    try:
        found = strict_json(data)
    except ValueError as error:
        raise Refused(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise Refused(f"{path}: it must be a table of keys and values")
    return found


def convert(config: Mapping[str, Any], drop: Iterable[str] = (), ranks: int | None = None) -> Converted:
    """The settings for the training command. drop: keys to leave out, by their whole name.

    Args:
        ranks: of the run; None where the file has all three batch sizes, or needs no number of ranks.

    Raises:
        Unconverted: for all keys that have no counterpart, and for values that can't be.
    """
    table = _flat(config)
    reader = Reader(table, list(drop))
    ranks = settle(reader, {name: reader.left.get(name) for name in table}, ranks)
    return reader.finish(ranks, nearest=known())


def settle(reader: Reader, table: Mapping[str, Any], ranks: int | None) -> int | None:
    """Take all keys that DeepSpeed has. table: the reader's, of which some are taken; gives the ranks."""
    for name in list(reader.left):
        if reader.left[name] == "auto" and name in _AUTO:
            reader.no_effect(name, f"the Trainer fills it in: {_AUTO[name]}")
        elif reader.left[name] == "auto" and _is_known(name):
            reader.no_effect(name, "the Trainer, or DeepSpeed, fills it in")
    _sections(reader)
    together = _parallelism(reader)
    ranks, accumulated = _batch(reader, table, ranks, together)
    _zero(reader, None if ranks is None else ranks // together, accumulated)
    _precision(reader)
    _offload(reader)
    _optimizer(reader, table)
    _rest(reader)
    for name in list(reader.left):
        if name in _NO_EFFECT:
            reader.no_effect(name, _NO_EFFECT[name])
        elif name in _ONLY_DEFAULT:
            default, why = _ONLY_DEFAULT[name]
            value = reader.left[name]
            same = type(value) in (bool, int, float, str) and value == default
            if same or value is None or value == [] or value == {}:
                reader.no_effect(name, "DeepSpeed's default, and the only way here")
            else:
                reader.refuse(name, why)
        elif any(each.startswith(f"{name}.") for each in known()):
            if reader.left[name] in (None, {}):
                reader.no_effect(name, "it is empty")
            else:
                reader.refuse(name, "must be a table of keys")
    return ranks


def _is_known(name: str) -> bool:
    inside = any(name.startswith(f"{section}.") for section in _OTHER_TOOLS)
    return inside or name in _NO_EFFECT or name in _ONLY_DEFAULT or name in _READ


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """All leaves by their whole name."""
    found: dict[str, Any] = {}
    todo = list(reversed([(str(name), value) for name, value in config.items()]))
    while todo:
        name, value = todo.pop()
        if "." in name.rpartition("\0")[2]:
            raise Unconverted([f"{name.replace(chr(0), '.')[:80]}: a key with a dot is none of DeepSpeed's"])
        if isinstance(value, Mapping) and value:
            todo.extend(reversed([(f"{name}\0{inner}", each) for inner, each in value.items()]))
            continue
        whole = whole_name(name.replace("\0", "."))
        if whole in found:
            raise Unconverted([f"{whole}: it stands there twice"])
        found[whole] = value
    return found


def whole_name(name: str) -> str:
    """A key by the newer of its names."""
    for other, ours in _ALIASES.items():
        if name.startswith(other) or f"{name}." == other:
            return (
                (ours + name.removeprefix(other)).removesuffix(".") if name.startswith(other) else ours[:-1]
            )
    return name


def _sections(reader: Reader) -> None:
    """Sections that are off, and those of features that are not here."""
    for section, why in _OTHER_TOOLS.items():
        inside = [name for name in reader.left if name == section or name.startswith(f"{section}.")]
        on = [name for name in inside if is_set(reader.left[name])]
        if section in (
            "wandb",
            "comet",
            "autotuning",
            "hybrid_engine",
            "data_efficiency",
            "curriculum_learning",
        ):
            on = [name for name in on if name == f"{section}.enabled"]
        elif f"{section}.enabled" in inside and f"{section}.enabled" not in on:
            on = []
        for name in on[:1]:
            reader.refuse(name, why)
        for name in inside:
            reader.noted(name, f"{on[0]} is refused" if on else f"{section.rpartition('.')[2]} is off")


def _size(reader: Reader, name: str, setting: str, nothing: tuple[int, ...] = (1,)) -> int:
    """An axis of ranks."""
    if reader.left.get(name) in nothing and type(reader.left.get(name)) is int:
        reader.no_effect(name, "there is no such axis")
    size = reader.count(name, 1) or 1
    if name in reader.left:
        reader.setting(name, reader.take(name), **{setting: size})
    return size


def _parallelism(reader: Reader) -> int:
    """Tensor, pipeline and expert parallelism; gives the ranks that share a part of the batch."""
    sizes = [
        _size(reader, f"tensor_parallel.{name}", "parallel__tp", (0, 1))
        for name in ("autotp_size", "tp.tp_size")
    ]
    if min(sizes) > 1 and sizes[0] != sizes[1]:
        reader.refused.append(f"tensor_parallel: autotp_size is {sizes[0]}, tp.tp_size is {sizes[1]}")
    stages = _size(reader, "pipeline.stages", "parallel__pp")
    if reader.flag("expert_parallel.enabled"):
        reader.noted("expert_parallel.enabled", "autoep_size says how")
        _size(reader, "expert_parallel.autoep_size", "parallel__ep")
    else:
        for name in [name for name in reader.left if name.startswith("expert_parallel.")]:
            reader.no_effect(name, "expert_parallel is off")
    return max(sizes) * stages


def _batch(
    reader: Reader, table: Mapping[str, Any], ranks: int | None, together: int
) -> tuple[int | None, int]:
    """The batch of all ranks and its parts; gives the ranks, and the micro-batches."""
    whole, part, rounds = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    batch, micro, parts = (reader.count(name, None) for name in (whole, part, rounds))
    if ranks is not None and ranks % together:
        reader.refused.append(f"--ranks {ranks}: must be a multiple of {together}, for the parallel axes")
        ranks = None
    shares = None if ranks is None else ranks // together
    if batch and micro and parts:
        found, rest = divmod(batch, micro * parts)
        if rest or not found or shares not in (None, found):
            of = f" x {shares}" if shares else ""
            reader.refuse(whole, f"{part} x {rounds}{of} is {micro * parts * (shares or 1)}")
        shares = found or 1
    needs = "it counts each rank's samples: give --ranks N"
    if batch is None and micro and shares is None:
        reader.refuse(part, needs)
    elif batch is None and micro:
        batch = micro * (parts or 1) * shares
        reader.setting(part, reader.take(part), batch_size=batch)
    elif batch and whole in reader.left:
        reader.setting(whole, reader.take(whole), batch_size=batch)
    if batch and micro and parts is None and table.get(rounds) != "auto" and part in reader.left:
        if shares is None:
            reader.refuse(part, needs)
        elif batch % (micro * shares):
            reader.refuse(part, f"{whole} is {batch}, of {shares} ranks with parts of the batch")
        else:
            parts = batch // (micro * shares)
            reader.setting(part, reader.take(part), micro_batches=parts)
    reader.noted(part, f"of the {batch} samples" if batch else "it is not set")
    if rounds in reader.left:
        reader.setting(rounds, reader.take(rounds), micro_batches=parts or 1)
    return (None if shares is None else shares * together), parts or 1


def _zero(reader: Reader, shares: int | None, accumulated: int) -> None:
    """The stage, groups of shards, and how early a unit is gathered."""
    name = _ZERO + "stage"
    value = reader.left.get(name)
    given = reader.choice(name, [str(stage) for stage in range(len(_STRATEGIES))], "0")
    stage = int(given or 0)
    settings: dict[str, Any] = {"fsdp__strategy": _STRATEGIES[stage]}
    weights = _quantised(reader, stage)
    if _in_groups(reader, stage, shares, weights):
        settings = {"fsdp__strategy": "HYBRID_SHARD"}
    if stage > 1 and accumulated > 1:
        settings["reduce_each"] = True
    if name in reader.left:
        reader.setting(name, value, **settings)
    else:
        reader.setting(name, 0, "DeepSpeed's default", **settings)
    for name in (_ZERO + "stage3_prefetch_bucket_size", _ZERO + "prefetch_bucket_size"):
        if name in reader.left and number(reader.left[name]):
            reader.setting(name, reader.left[name], fsdp__prefetch=int(reader.left[name] > 0))
        elif name in reader.left:
            reader.refuse(name, "must be a number")
    for name in ("stage3_gather_16bit", "gather_16bit", "stage3_gather_fp16"):
        name = f"{_ZERO}{name}_weights_on_model_save"
        if reader.flag(name):
            reader.setting(name, reader.take(name), "whole weights at the end", export=True)
        reader.noted(name, "checkpoints are sharded; export writes whole weights")


def _quantised(reader: Reader, stage: int) -> bool:
    """ZeRO++'s messages in 8 bits; gives whether weights are sent so."""
    found = {}
    for what, note in (
        ("weights", "where a unit lies on several hosts"),
        ("gradients", "between hosts; DeepSpeed has 4 bits, also within a host"),
    ):
        name = f"{_ZERO}zero_quantized_{what}"
        found[what] = reader.flag(name) and stage == 3
        if found[what]:
            reader.setting(name, reader.take(name), note, **{f"precision__quantized_{what}": 8})
        reader.noted(name, "DeepSpeed reads it with stage 3 alone" if stage != 3 else "off")
    return found["weights"]


def _in_groups(reader: Reader, stage: int, shares: int | None, quantised: bool) -> bool:
    """Whether each group of ranks has all shards: ZeRO++'s secondary partition, or MiCS.

    quantised: weights are, of which a secondary partition keeps the bits alone.
    """
    found = False
    for name in (_ZERO + "zero_hpz_partition_size", _ZERO + "mics_shard_size"):
        if type(reader.left.get(name)) is int and reader.left[name] in (-1, 0, 1):
            reader.no_effect(name, "there is one group")
        size = reader.count(name, None)
        if size is None:
            continue
        if stage != 3:
            reader.no_effect(name, "DeepSpeed reads it with stage 3 alone")
        elif shares is None:
            reader.refuse(name, "the number of groups depends on the ranks: give --ranks N")
        elif shares % size:
            reader.refuse(name, f"must divide {shares}, the ranks with parts of the batch")
        elif shares == size:
            reader.no_effect(name, "all ranks are one group")
        elif quantised and "hpz" in name:
            note = "each group keeps quantised weights for backward"
            reader.setting(name, reader.take(name), note, precision__hpz_partition_size=size)
        else:
            found = True
            note = f"a group of {size} ranks has all shards, the optimizer's too"
            if "hpz" in name:
                more = shares // size
                note += f": {more} times DeepSpeed's optimizer state; without the key it is FULL_SHARD"
            reader.setting(name, reader.take(name), note, fsdp__copies=shares // size)
    return found


def _precision(reader: Reader) -> None:
    """The types of parameters and of messages."""
    chosen = ""
    for section, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        name = f"{section}.enabled"
        value = reader.left.get(name)
        if reader.flag(name) and chosen:
            reader.refuse(name, "bf16 is enabled")
        elif name in reader.left and is_set(value):
            chosen = section
            reader.setting(name, reader.take(name), precision__param=dtype, precision__reduce=dtype)
        elif name in reader.left:
            reader.no_effect(name, "off, as in a recipe that says nothing")
            for each in [each for each in reader.left if each.startswith(f"{section}.")]:
                reader.no_effect(each, f"{section} is off")
    name = "bf16.check_grad_overflow"
    if reader.flag(name):
        reader.setting(name, reader.take(name), optimizer__on_nonfinite="skip")
    reader.noted(name, "gradients that are not finite end the run")
    on = reader.flag("torch_autocast.enabled")
    if on and chosen:
        reader.refuse("torch_autocast.enabled", f"{chosen} is enabled")
    reader.noted("torch_autocast.enabled", "dtype says how" if on else "off")
    if not on:
        for name in [name for name in reader.left if name.startswith("torch_autocast.")]:
            reader.no_effect(name, "torch_autocast is off")
    for name, settings in {
        "torch_autocast.dtype": ("precision.param",),
        "data_types.param_dtype": ("precision.param",),
        "communication_data_type": ("precision.reduce",),
    }.items():
        dtype = reader.choice(name, _LONG)
        if dtype is None or name not in reader.left:
            continue
        for setting in settings:
            reader.change(setting, _LONG[dtype])
        section, _, last = settings[0].partition(".")
        reader.setting(name, reader.take(name), **{f"{section}__{last}": _LONG[dtype]})
    name = "data_types.grad_accum_dtype"
    dtype = reader.choice(name, _LONG)
    if dtype and _LONG[dtype] != "float32":
        reader.refuse(name, "gradients are added in float32")
    reader.noted(name, "gradients are added in float32")


def _offload(reader: Reader) -> None:
    """What waits on the host, or in files of one folder."""
    stage = next((key.value for key in reader.keys if key.name == _ZERO + "stage"), 0)
    folders: list[str] = []
    for part, settings, old in (
        ("offload_optimizer", ON_HOST, "cpu_offload"),
        ("offload_param", {"memory__offload_parameters": True}, "cpu_offload_param"),
    ):
        device, path = f"{_ZERO}{part}.device", f"{_ZERO}{part}.nvme_path"
        where = reader.choice(device, ["none", "cpu", "nvme"], "none")
        if where != "none" and part == "offload_param" and str(stage) != "3":
            reader.no_effect(device, "DeepSpeed reads it with stage 3 alone")
            where = "none"
        if device in reader.left and where != "none":
            reader.setting(device, reader.take(device), _WAITS[part], **settings)
        reader.noted(device, "nothing waits on the host")
        given = reader.left.get(path)
        if where != "nvme":
            reader.noted(path, f"the device is {where}")
        elif not isinstance(given, str) or not given.isprintable() or given in ("", "none"):
            reader.refuse(path, "must be the folder for files, with device nvme")
        elif folders and folders != [given]:
            reader.refuse(path, f"there is one folder for files, {folders[0]}")
        else:
            folders = [given]
            note = "all that waits on the host is in its files"
            reader.setting(path, reader.take(path), note, memory__directory=given)
        name = _ZERO + old
        if reader.flag(name):
            reader.setting(name, reader.take(name), _WAITS[part], **settings)
        reader.noted(name, "nothing waits on the host")


def _optimizer(reader: Reader, table: Mapping[str, Any]) -> None:
    """The algorithm, its numbers, the schedule of its rate, and the clipping."""
    name = "optimizer.type"
    kinds = {"Adam": "adamw", "AdamW": "adamw", "Lion": "lion", "Muon": "muon"}
    chosen = reader.choice(name, kinds)
    if chosen and name in reader.left:
        absent = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
        if chosen == "Muon":
            absent = _muon(reader, table)
        settings = {
            f"optimizer__{key}": value for key, value in absent.items() if _OPTIMIZER + key not in table
        }
        notes = ["biases and norms have no weight decay"]
        notes += [] if "scheduler.type" in table else ["without a scheduler, the recipe's schedule"]
        reader.setting(name, reader.take(name), ", ".join(notes), optimizer__name=kinds[chosen], **settings)
    else:  # its numbers would be another algorithm's
        why = "there is no optimizer.type" if table.get(name) is None else "optimizer.type has no setting"
        for each in [each for each in reader.left if each.startswith(_OPTIMIZER)]:
            reader.no_effect(each, why)
    for each in ("lr", "weight_decay"):
        _number(reader, _OPTIMIZER + each, f"optimizer__{each}")
    betas = reader.left.get(_OPTIMIZER + "betas")
    if betas is not None and (
        not isinstance(betas, list) or len(betas) != 2 or not all(number(each) for each in betas)
    ):
        reader.refuse(_OPTIMIZER + "betas", "must be two numbers")
    elif betas is not None:
        reader.setting(_OPTIMIZER + "betas", betas, optimizer__betas=tuple(map(float, betas)))
    for each in ("adam_w_mode", "adamw_mode"):
        key = _OPTIMIZER + each
        if key in reader.left and not reader.flag(key) and is_set(table.get(_OPTIMIZER + "weight_decay")):
            reader.refuse(key, "weight decay is AdamW's")
        reader.noted(key, "weight decay is AdamW's")
    for each in ("muon_lr", "adam_lr", "momentum", "ns_method"):
        reader.noted(_OPTIMIZER + each, "it is Muon's")
    for each in ("lr", "betas", "weight_decay"):
        reader.noted(_OPTIMIZER + each, "it is not set")
    _schedule(reader, table)
    name = "gradient_clipping"
    if reader.left.get(name) in (0, False) and name in reader.left:
        reader.setting(name, reader.take(name), "never clips", optimizer__clip_norm=float("inf"))
    _number(reader, name, "optimizer__clip_norm")
    reader.noted(name, "it is not set")


def _muon(reader: Reader, table: Mapping[str, Any]) -> dict[str, Any]:
    """Muon's rates, momentum and method; gives settings for what the table has not."""
    common, *own = (table.get(_OPTIMIZER + each) for each in ("lr", "adam_lr", "muon_lr"))
    if number(common) and number(own[0]):
        name = _OPTIMIZER + "lr"
        if number(own[1]):
            reader.noted(name, "muon_lr and adam_lr are the rates")
        elif name in reader.left:
            reader.setting(name, reader.take(name), optimizer__muon_lr=common)
    for each, setting in {"adam_lr": "lr", "muon_lr": "muon_lr", "momentum": "momentum"}.items():
        _number(reader, _OPTIMIZER + each, f"optimizer__{setting}")
        reader.noted(_OPTIMIZER + each, "it is not set")
    method = _OPTIMIZER + "ns_method"
    reader.choice(method, ["gram", "standard"])
    reader.noted(method, "both give the same matrix")
    absent: dict[str, Any] = {"adjust_lr_fn": "original", "weight_decay": 0.0, "betas": (0.9, 0.95)}
    absent |= {"momentum": 0.95}
    rates = {"lr": 3e-4, "muon_lr": 0.02}
    absent |= {each: rates[each] for each, given in zip(rates, own, strict=True) if not number(given)}
    if number(common):  # it is in place of the other rates
        absent = {each: value for each, value in absent.items() if each not in rates}
    return absent


def _number(reader: Reader, name: str, setting: str) -> None:
    """A key that is a setting as it is; those that are not set stay."""
    value = reader.left.get(name)
    if value is None:
        return
    if number(value):
        reader.setting(name, reader.take(name), **{setting: value})
    else:
        reader.refuse(name, "must be a number")


def _schedule(reader: Reader, table: Mapping[str, Any]) -> None:
    name = "scheduler.type"
    kinds: dict[str, dict[str, Any]] = {
        "WarmupLR": {"optimizer__schedule": "wsd", "optimizer__decay_steps": 1},
        "WarmupDecayLR": {"optimizer__schedule": "linear", "optimizer__min_lr": 0.0},
        "WarmupCosineLR": {"optimizer__schedule": "cosine"},
    }
    chosen = reader.choice(name, kinds)
    prefix = _SCHEDULER
    if chosen is None or name not in reader.left:
        why = "there is no scheduler.type" if table.get(name) is None else "scheduler.type has no setting"
        for each in [each for each in reader.left if each.startswith(prefix)]:
            reader.no_effect(each, why)
        return
    settings = dict(kinds[chosen])
    rate = table.get(prefix + "warmup_max_lr") if chosen != "WarmupCosineLR" else None
    for own in ("adam_lr", "lr") if str(table.get("optimizer.type")).lower() == "muon" else ("lr",):
        rate = table.get(_OPTIMIZER + own) if rate is None else rate
    ratio = table.get(prefix + "cos_min_ratio", 1e-4)
    if chosen == "WarmupCosineLR" and number(rate) and number(ratio):
        settings["optimizer__min_lr"] = rate * ratio
    if prefix + "warmup_num_steps" not in table:
        settings["optimizer__warmup_steps"] = 1000
    linear = str(table.get(prefix + "warmup_type")).lower() == "linear"
    note = "" if linear else "the warm-up is a line, not a logarithm"
    reader.setting(name, reader.take(name), note, **settings)
    if number(reader.left.get(prefix + "warmup_max_lr")) and chosen != "WarmupCosineLR":
        reader.change("optimizer.lr", rate)
        reader.change("optimizer.muon_lr", 0.0)
    if chosen == "WarmupCosineLR":
        reader.noted(prefix + "warmup_max_lr", "optimizer.params.lr has the rate")
    _number(reader, prefix + "warmup_max_lr", "optimizer__lr")
    for each, setting in {"warmup_num_steps": "optimizer__warmup_steps", "total_num_steps": "steps"}.items():
        count = reader.count(prefix + each, None)
        if prefix + each in reader.left:
            reader.setting(prefix + each, reader.take(prefix + each), **{setting: count})
    kind = reader.choice(prefix + "warmup_type", ["log", "linear"])
    reader.noted(prefix + "warmup_type", "the warm-up is a line" if kind == "linear" else note)
    reader.noted(prefix + "warmup_max_lr", "it is not set")
    known_rate = "optimizer.min_lr is so much of the rate" if number(rate) else "give --optimizer.min-lr"
    reader.noted(prefix + "cos_min_ratio", known_rate)


def _rest(reader: Reader) -> None:
    """Reports, checkpoints, and recomputation."""
    name = "steps_per_print"
    value = reader.left.get(name)
    if value is not None and number(value) and value > 1e9 or value == "inf":
        reader.no_effect(name, "see report.log_interval")
    count = reader.count(name, None)
    if name in reader.left:
        reader.setting(name, reader.take(name), report__log_interval=count)
    name = "tensorboard.enabled"
    if reader.flag(name):
        reader.setting(name, reader.take(name), tensorboard=True)
    reader.noted(name, "off, as in a recipe that says nothing")
    name = "checkpoint.use_node_local_storage"
    if reader.flag(name):
        reader.setting(name, reader.take(name), checkpoint__folder="hosts")
    reader.noted(name, "off, as in a recipe that says nothing")
    prefix = "activation_checkpointing."
    for name, note, settings in (
        ("partition_activations", "parallel.sequence splits them along time", {}),
        ("cpu_checkpointing", "", {"memory__offload_activations": True}),
    ):
        if reader.flag(prefix + name):
            value = reader.take(prefix + name)
            reader.setting(prefix + name, value, note, memory__recompute="full", **settings)
        reader.noted(prefix + name, "off, as in a recipe that says nothing")
    name = "pipeline.activation_checkpoint_interval"
    if type(reader.left.get(name)) is int and reader.left[name] == 0:
        reader.no_effect(name, "off, as in a recipe that says nothing")
    reader.count(name, None)
    if name in reader.left:
        reader.setting(name, reader.take(name), "each block by itself", memory__recompute="full")
