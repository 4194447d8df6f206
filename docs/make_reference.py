"""Writes docs/reference.md, the public names with their signatures and first sentences, from the docstrings.

python docs/make_reference.py            # after a public name has changed; a test compares
make docs                                # whole docstrings, as pages, to build/docs
"""

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).parent / "reference.md"
PACKAGES = {
    "shardrt": "Tensors and the tape",
    "shardrt.functional": "Ops (`from shardrt import functional as F`)",
    "shardrt.functional.collective": "Collectives on the tape",
    "shardrt.functional.vocabulary": "A vocabulary cut over ranks",
    "shardrt.nn": "Layers",
    "shardrt.nn.init": "Initial values",
    "shardrt.nn.utils": "Norms and clipping",
    "shardrt.optim": "Optimizers",
    "shardrt.fsdp": "Sharding",
    "shardrt.parallel": "Modules that are cut",
    "shardrt.comm": "Ranks and communicators",
    "shardrt.checkpoint": "Checkpoints",
    "shardrt.recompute": "Recomputation",
    "shardrt.activation_offload": "Activations on the host",
    "shardrt.models.gpt": "GPT-2",
    "shardrt.models.llama": "Llama",
    "shardrt.models.vit": "ViT",
    "shardrt.models.regnet": "RegNetY",
    "shardrt.models.plans": "Plans for the models",
    "shardrt.models.hub": "Hugging Face files",
    "shardrt.models.generate": "Text from a model",
}
HEAD = """# Reference

Every public name, with the first sentence of its docstring; `help(name)` in Python shows the rest, and
`make docs` makes pages of it. Written by `docs/make_reference.py`.
"""


def page() -> str:
    """The text of the page."""
    parts = [HEAD]
    for package, title in PACKAGES.items():
        module = importlib.import_module(package)
        rows = [row(name, getattr(module, name)) for name in public(module)]
        parts.append(f"## {title}\n\n`{package}`\n\n| | |\n|---|---|\n" + "".join(rows))
    return "\n".join(parts)


def public(module: ModuleType) -> list[str]:
    """The names in __all__, or what the module itself defines, in alphabetical order; packages left out."""
    own = [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]
    names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    return sorted((n for n in names if not inspect.ismodule(getattr(module, n))), key=str.lower)


def row(name: str, value: Any) -> str:
    """A line of the table, and one for each public method of a class."""
    lines = [f"| `{name}{signature(value)}` | {first_sentence(value)} |\n"]
    if inspect.isclass(value):
        for method, function in vars(value).items():
            function = function.__func__ if isinstance(function, classmethod | staticmethod) else function
            if not method.startswith("_") and inspect.isfunction(function) and inspect.getdoc(function):
                lines.append(f"| `.{method}{signature(function)}` | {first_sentence(function)} |\n")
    return "".join(lines)


def signature(value: Any) -> str:
    """The parameters, without types and self; empty for what can't be called."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    kept = [
        p.replace(annotation=inspect.Parameter.empty) for p in parameters if p.name not in ("self", "cls")
    ]
    return re.sub(r"<[^>]*>", "...", str(inspect.Signature(kept))).replace("|", "\\|")


def first_sentence(value: Any) -> str:
    """Of the docstring."""
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    found = re.match(r".*?\.(?= [A-Z(`]|$)", text)
    return (found[0] if found else text).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
