"""Writes accelerate_keys.json: every key that Accelerate has for its configuration file and its plugins.

    pip install accelerate==1.15.0
    python -m tests.train.accelerate_keys > tests/train/accelerate_keys.json

Parses the sources, without importing them.
"""

import ast
import json
from importlib.util import find_spec
from pathlib import Path

GROUPS = {"fsdp": "fsdp_config", "parallelism": "parallelism_config", "mpirun": "mpirun_config"}


def installed() -> Path | None:
    """The folder of the installed package, if there is one."""
    found = find_spec("accelerate")
    return Path(found.submodule_search_locations[0]) if found else None


def keys(package: Path) -> dict[str, list[str]]:
    """Keys of the file by their whole name, and fields of the two plugins."""
    arguments = _parsed(package / "commands" / "launch.py")
    options = _parsed(package / "commands" / "config" / "config_args.py")
    plugins = _parsed(package / "utils" / "dataclasses.py")
    named = [name for name in _arguments(arguments) if name.partition("_")[0] in GROUPS]
    deepspeed = _arguments(arguments, "deepspeed_args")
    return {
        "file": [
            *(name for name in _fields(options, "BaseConfig") + _fields(options, "ClusterConfig")),
            *(f"{GROUPS[name.partition('_')[0]]}.{name}" for name in named),
            *(f"deepspeed_config.{name}" for name in deepspeed),
        ],
        "FullyShardedDataParallelPlugin": _fields(plugins, "FullyShardedDataParallelPlugin"),
        "DeepSpeedPlugin": _fields(plugins, "DeepSpeedPlugin"),
    }


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _fields(module: ast.Module, name: str) -> list[str]:
    (found,) = [each for each in module.body if isinstance(each, ast.ClassDef) and each.name == name]
    return [each.target.id for each in found.body if isinstance(each, ast.AnnAssign)]


def _arguments(module: ast.Module, group: str = "") -> list[str]:
    """The options of a command; of one of its groups, if it is given."""
    found = []
    for call in ast.walk(module):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument":
            whose, name = getattr(call.func.value, "id", ""), call.args[0]
            if isinstance(name, ast.Constant) and group in ("", whose):
                found.append(name.value.lstrip("-"))
    return found


if __name__ == "__main__":
    print(json.dumps(keys(installed()), indent=1))
