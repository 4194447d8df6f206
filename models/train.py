"""Trains a model, fully sharded over the ranks that mpirun starts (one rank without it).

    mpirun -n 2 shardrt train --config models/configs/default.toml --optimizer.lr 1e-3
    mpirun -n 2 shardrt train --config models/configs/digits-vit.toml
    mpirun -n 2 shardrt train --architecture llama --size llama-100m --data text.tokens

In a checkout `python -m models.train` is the same. What is trained is chosen here; the loop is
shardrt/train/loop.py. Leaves runs/NAME with config.toml, metrics.jsonl, loss.png and checkpoint/.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardrt.train import config as settings
from shardrt.train import options
from shardrt.train.errors import USAGE, one_line, plain_warnings
from shardrt.train.job import launch
from shardrt.train.recipe import Recipe

from .hub import kind_in
from .images import RegNetRecipe, ViTRecipe
from .language import GPTRecipe, LlamaRecipe

DEFAULT = Path(__file__).parent / "configs" / "default.toml"
RECIPES = {kind.ARCHITECTURE: kind for kind in (GPTRecipe, LlamaRecipe, ViTRecipe, RegNetRecipe)}


def main(arguments: Sequence[str], program: str = "models.train") -> None:
    """One run, as the command line says. program: its name in the help."""
    with one_line(USAGE):
        recipe = parse(arguments, program)
    with plain_warnings():
        launch(recipe)


def parse(arguments: Sequence[str], program: str = "models.train") -> Recipe:
    """The recipe of the command line. Raises ValueError, OSError."""
    given = {name: options.last_of(arguments, f"--{name}") for name in ("architecture", "size", "init-from")}
    file = options.last_of(arguments, "--config")
    if file is None and not any(given.values()):
        file = DEFAULT  # which describes one small model, and nothing of another
    chosen = given["architecture"]
    if not chosen and file:
        chosen = settings.read_toml(Path(file)).get("architecture", "")
    if not chosen:
        chosen = next((name for name, kind in RECIPES.items() if given["size"] in kind.SIZES), "")
    if not chosen and given["init-from"]:
        chosen = architecture_in(Path(given["init-from"]))
    recipe = options.parse(kind_of(chosen), arguments, file=file and Path(file), program=program)
    if chosen and not recipe.architecture:  # that of the size or of init_from: config.toml must name it
        recipe = replace(recipe, architecture=chosen)
    try:
        return recipe.resolved()
    except (ValueError, OSError):
        return recipe  # its task will say what is wrong with the data


def architecture_in(folder: Path) -> str:
    """The architecture of the model in a folder of Hugging Face; "" where the task will say what is wrong."""
    try:
        network = kind_in(folder)
    except (ValueError, OSError):
        return ""
    return next(name for name, kind in RECIPES.items() if kind.NETWORK is network)


def kind_of(architecture: str) -> type[Recipe]:
    """The recipe for an architecture; GPT's for "". Raises ValueError for an unknown one."""
    if architecture not in ("", *RECIPES):
        raise ValueError(f"architecture must be one of {', '.join(RECIPES)}, got {architecture!r}")
    return RECIPES[architecture or "gpt"]


def load(path: Path) -> Recipe:
    """The recipe in a file, such as a run's config.toml. Raises ValueError, OSError."""
    return settings.load(kind_of(settings.read_toml(path).get("architecture", "")), path)


if __name__ == "__main__":
    main(sys.argv[1:])
