"""Formats of checkpoints: a module each, which is imported when it is needed.

A format is a line in FORMATS and a module with

    recognises(path) -> bool              looks at names of files alone
    read(path) -> Checkpoint              reads headers; tensors are read when a writer asks for elements
    files(checkpoint, options) -> Plan    the files to write, as ranges of tensors; output.py writes them
    DIALECT: str                          names that the files have: one of names.DIALECTS, or "" for any
    STATE: bool                           whether the files hold the state of training

`files` may be missing from a format that is only read.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType

from shardrt.exchange.checkpoint import BadCheckpoint
from shardrt.exchange.output import File

__all__ = ["FORMATS", "Options", "Plan", "format_of", "module_of"]

# In the order in which a folder is tried: its name for --from and --to, its module.
FORMATS = {
    "shardrt": "own",
    "peft": "peft",
    "safetensors": "safetensors",
    "dcp": "dcp",
    "deepspeed": "deepspeed",
}
SYNONYMS = {"huggingface": "safetensors"}


@dataclass(frozen=True)
class Options:
    """What the command line says about the files to write.

    Weights have their types and names before a format sees them: it writes them as they are.

    Attributes:
        target: the folder B.
        ranks: files, for formats that have a file for each rank.
        zero_stage: 1, 2 or 3, of DeepSpeed's ZeRO.
        zero_dtype: "float32" or "bfloat16", in which DeepSpeed computes; its master weights are float32.
        file_bytes: largest file, for formats that have as many as are needed.
        layout: the tables of the files, for formats that have several; "" for that of the names' dialect.
    """

    target: Path
    ranks: int = 1
    zero_stage: int = 3
    zero_dtype: str = "float32"
    file_bytes: int = 5_000_000_000
    layout: str = ""


@dataclass(frozen=True)
class Plan:
    """What is written.

    Attributes:
        files: all of them, in the order in which they are written.
        target: the folder that holds them, if it is not the Options' but one in it.
        left: what the Checkpoint holds and the format can't, one line each: `convert` prints them.
        tensors: keys of those of the Checkpoint that are written, if not all are.
    """

    files: Sequence[File]
    target: Path | None = None
    left: list[str] = field(default_factory=list)
    tensors: Collection[tuple[str, str]] | None = None


def module_of(name: str) -> ModuleType:
    """The module of a format."""
    return import_module(f"{__name__}.{FORMATS[SYNONYMS.get(name, name)]}")


def format_of(path: Path) -> str:
    """The name of the format of the files in a folder.

    Raises:
        BadCheckpoint: if no format knows them.
    """
    for name in FORMATS:
        if module_of(name).recognises(path):
            return name
    raise BadCheckpoint(f"{path}: no checkpoint of a known format is here ({', '.join(FORMATS)})")
