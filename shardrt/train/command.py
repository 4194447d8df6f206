"""`shardrt train`: the training command of the models, as `python -m models.train` in a checkout."""

from collections.abc import Sequence
from importlib import import_module

__all__ = ["main", "module_name"]


def module_name() -> str:
    """The module of the training command, under the name that the models have in this process."""
    try:
        import_module("shardrt.models")
    except ImportError:  # `models` is imported already: the same files, and each class is there once
        return "models.train"
    return "shardrt.models.train"


def main(arguments: Sequence[str]) -> int:
    """Train as the arguments say; returns 0. Exits with the codes of docs/howto/failures.md."""
    import_module(module_name()).main(arguments, program="shardrt train")
    return 0
