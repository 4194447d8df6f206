"""Writes deepspeed_keys.json: every key that DeepSpeed's sources read from its JSON configuration.

    pip download --no-deps --no-binary :all: deepspeed==0.19.8
    tar xzf deepspeed-0.19.8.tar.gz
    python -m tests.train.deepspeed_keys deepspeed-0.19.8 > tests/train/deepspeed_keys.json

Parses the sources, without importing them. Names of sections stand before their keys: "fp16.enabled".
"""

import ast
import json
import re
import sys
from pathlib import Path

# Section -> the file and the class of its pydantic model; a field of another model is a section of its own.
MODELS = {
    "zero_optimization": ("runtime/zero/config.py", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_param": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.offload_optimizer": (
        "runtime/zero/offload_config.py",
        "DeepSpeedZeroOffloadOptimizerConfig",
    ),
    "zero_optimization.zenflow": ("runtime/zenflow/zenflow_config.py", "ZenFlowConfig"),
    "zero_optimization.leaf_module": ("runtime/zero/leaf_module_config.py", "DeepSpeedZeroLeafModuleConfig"),
    "bf16": ("runtime/precision_config.py", "DeepSpeedBF16Config"),
    "fp16": ("runtime/precision_config.py", "DeepSpeedFP16Config"),
    "tensorboard": ("monitor/config.py", "TensorBoardConfig"),
    "wandb": ("monitor/config.py", "WandbConfig"),
    "csv_monitor": ("monitor/config.py", "CSVConfig"),
    "comet": ("monitor/config.py", "CometConfig"),
    "comms_logger": ("comm/config.py", "CommsLoggerConfig"),
    "compile": ("compile/config.py", "CompileConfig"),
    "timers.throughput": ("utils/config.py", "DeepSpeedThroughputTimerConfig"),
    "hybrid_engine": ("runtime/config.py", "HybridEngineConfig"),
    "tensor_parallel": ("runtime/tensor_parallel/config.py", "TPTrainingConfig"),
    "tensor_parallel.tp": ("runtime/tensor_parallel/config.py", "TPConfig"),
    "weight_quantization": ("inference/config.py", "WeightQuantConfig"),
}
# Section -> the file of functions that take keys from the variable.
READ = [
    ("", "runtime/config.py", "param_dict"),
    ("", "runtime/precision_config.py", "param_dict"),
    ("", "comm/config.py", "ds_config"),
    ("", "utils/config.py", "param_dict"),
    ("", "datastates/config.py", "param_dict"),
    ("", "runtime/zero/config.py", "param_dict"),
    ("", "profiling/config.py", "param_dict"),
    ("", "autotuning/config.py", "param_dict"),
    ("", "runtime/activation_checkpointing/config.py", "param_dict"),
    ("", "runtime/swap_tensor/aio_config.py", "param_dict"),
    ("", "runtime/model_checkpointing/config.py", "param_dict"),
    ("activation_checkpointing", "runtime/activation_checkpointing/config.py", "act_chkpt_config_dict"),
    ("aio", "runtime/swap_tensor/aio_config.py", "aio_dict"),
    ("autotuning", "autotuning/config.py", "autotuning_dict"),
    ("flops_profiler", "profiling/config.py", "flops_profiler_dict"),
    ("checkpoint", "runtime/model_checkpointing/config.py", "checkpoint_dict"),
    ("checkpoint", "runtime/config.py", "checkpoint_params"),
    ("checkpoint.writer", "runtime/model_checkpointing/config.py", "writer_dict"),
    ("checkpoint.parallel_write", "runtime/config.py", "par_write_params"),
    ("data_types", "runtime/config.py", "data_types_params"),
    ("expert_parallel", "module_inject/auto_ep_config.py", "param_dict"),
    ("optimizer.params", "runtime/engine.py", "optimizer_parameters"),
]
# Classes whose arguments are keys.
ARGUMENTS = [
    ("optimizer.params", "ops/adam/fused_adam.py", "FusedAdam"),
    ("optimizer.params", "ops/adam/cpu_adam.py", "DeepSpeedCPUAdam"),
    ("optimizer.params", "ops/lion/fused_lion.py", "FusedLion"),
    ("optimizer.params", "ops/lion/cpu_lion.py", "DeepSpeedCPULion"),
    *[
        ("scheduler.params", "runtime/lr_schedules.py", name)
        for name in ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
    ],
]
NO_KEYS = {"model_params", "params", "optimizer", "self", "last_batch_iteration"}  # a program's arguments
CONSTANTS = ("runtime", "comm", "profiling", "autotuning", "runtime/swap_tensor", "runtime/data_pipeline")
CONSTANTS += ("runtime/model_checkpointing",)


def keys_of(root: Path) -> list[str]:
    """All keys, sorted."""
    package = root / "deepspeed"
    trees = {path: ast.parse((package / path).read_text()) for _, path, _ in READ + ARGUMENTS}
    trees |= {path: ast.parse((package / path).read_text()) for path, _ in MODELS.values()}
    names = constants_of(package) | {"DATA_EFFICIENCY": "data_efficiency"}
    found = set()
    for section, (path, name) in MODELS.items():
        for base in bases_of(trees[path], name):
            found |= {joined(section, key) for key in fields_of(base)}
    for section, path, variable in READ:
        own = names | assigned(trees[path])
        found |= {joined(section, key) for key in taken(trees[path], variable, own)}
    for section, path, name in ARGUMENTS:
        found |= {joined(section, key) for key in arguments_of(trees[path], name)}
    for node in ast.walk(
        trees["runtime/engine.py"]
    ):  # for key in ["lr", "muon_lr"]: optimizer_parameters[key]
        if isinstance(node, ast.For) and "optimizer_parameters" in ast.unparse(node):
            found |= {joined("optimizer.params", key.value) for key in getattr(node.iter, "elts", ())}
    for node in trees["runtime/config.py"].body:  # what older versions read, and the pipeline's defaults
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").startswith("_REMOVED_"):
            if isinstance(node.value, ast.Dict):
                section = "zero_optimization" if "ZERO" in node.targets[0].id else ""
                found |= {joined(section, key.value) for key in node.value.keys}
        if isinstance(node, ast.FunctionDef) and node.name == "get_pipeline_config":
            found |= {joined("pipeline", key.value) for key in dict_in(node).keys}
    found |= {joined(section, key) for section in ("optimizer", "scheduler") for key in ("type", "params")}
    found |= {joined("torch_autocast", key) for key in ("enabled", "dtype", "lower_precision_safe_modules")}
    found |= {"optimizer.params.torch_adam"}
    found -= {"writer", "model_info"}  # variables of sections further in
    found |= {"autotuning.model_info", "communication_data_type", "seq_parallel_communication_data_type"}
    found |= {"optimizer.legacy_fusion", "data_efficiency", "timers", "bfloat16"}
    found |= {"data_efficiency.enabled", "data_efficiency.seed"}
    found |= {f"data_efficiency.{names[part]}" for part in ("DATA_SAMPLING", "DATA_ROUTING")}
    found |= {section for section in MODELS}
    return sorted(found)


def joined(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def assigned(tree: ast.Module) -> dict[str, str]:
    """Constants of a file that are texts."""
    return {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def constants_of(package: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for folder in CONSTANTS:
        found |= assigned(ast.parse((package / folder / "constants.py").read_text()))
    return found


def class_of(tree: ast.Module, name: str) -> ast.ClassDef | None:
    return next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name), None)


def bases_of(tree: ast.Module, name: str) -> list[ast.ClassDef]:
    own = class_of(tree, name)
    above = [] if own is None else [base.id for base in own.bases if isinstance(base, ast.Name)]
    return ([] if own is None else [own]) + [each for base in above for each in bases_of(tree, base)]


def fields_of(model: ast.ClassDef) -> set[str]:
    """The names of a model's fields, and their aliases."""
    found = set()
    for node in model.body:
        if isinstance(node, ast.AnnAssign):
            found.add(node.target.id)
            for word in getattr(node.value, "keywords", []):
                if word.arg == "alias":
                    found.add(word.value.value)
    return found


def taken(tree: ast.Module, variable: str, names: dict[str, str]) -> set[str]:
    """The keys that the file's functions take from `variable`: get, pop, [key], `in`, get_scalar_param."""

    def text(node: ast.AST) -> str | None:
        value = node.value if isinstance(node, ast.Constant) else names.get(getattr(node, "id", ""))
        return value if isinstance(value, str) and re.fullmatch(r"\w+", value) else None

    def is_it(node: ast.AST) -> bool:
        inner = node.func.value if isinstance(node, ast.Call) and hasattr(node.func, "value") else node
        return getattr(inner, "id", getattr(inner, "attr", "")).lstrip("_") == variable

    found: set[str | None] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if function in ("get", "pop") and is_it(node.func.value):
                found.add(text(node.args[0]))
            elif re.fullmatch("get_(scalar|dict|list)_param", function) and is_it(node.args[0]):
                found.add(text(node.args[1]))
        elif isinstance(node, ast.Subscript) and is_it(node.value):
            found.add(text(node.slice))
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In) and is_it(node.comparators[0]):
            found.add(text(node.left))
    return {key for key in found if key is not None}


def arguments_of(tree: ast.Module, name: str) -> set[str]:
    body = class_of(tree, name).body
    made = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return {argument.arg for argument in made.args.args} - NO_KEYS


def dict_in(function: ast.FunctionDef) -> ast.Dict:
    return next(node for node in ast.walk(function) if isinstance(node, ast.Dict) and node.keys)


def main(root: Path) -> None:
    """Print the file."""
    version = (root / "version.txt").read_text().strip()
    json.dump({"version": version, "keys": keys_of(root)}, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
