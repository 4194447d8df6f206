"""Generates tokens one after the other; every rank runs the same forward.

`python -m models.generate runs/NAME --prompt "def "` loads what models.train left there, or a folder of
Hugging Face's, on any number of ranks.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardrt import nn
from shardrt.checkpoint import load
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
from shardrt.train import config as settings
from shardrt.train import options
from shardrt.train.chat import ChatFolder
from shardrt.train.data import VOCABULARY
from shardrt.train.errors import USAGE, one_line
from shardrt.train.recipe import Recipe
from shardrt.untrusted import say

from .gpt import GPT
from .hub import ends_in, kind_in, load_pretrained
from .language import LanguageRecipe
from .llama import Llama
from .sampling import TOKENIZER, ByteText, ChatText, Text, TokenisedText, generate
from .train import load as load_recipe


@dataclass(frozen=True, kw_only=True)
class Config(settings.SampleConfig):
    """Generate text from a language model that models.train has left, or from a folder of Hugging Face's."""

    run: Path  # the directory of the run, or the folder with config.json, weights and tokenizer.json
    seed: int = 0  # of the draws
    chat: bool = False  # of a folder: the prompt is what a user says, by its chat template; runs know it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        settings.check_numbers(self, seed=2**64 - 1, length=2**20)


def of_folder(directory: Path, *, chat: bool = False) -> tuple[nn.Module, Text]:
    """The language model in a folder of Hugging Face's, and its tokenizer.json, with `chat` its template.

    Without one tokens are bytes, if there are 256. Raises ValueError if it writes no text; OSError.
    """
    kind = kind_in(directory)
    if kind not in (GPT, Llama):
        raise ValueError(f"{directory} has a {kind.__name__}, which can't generate text")
    model = load_pretrained(directory)
    path, tokens = directory / TOKENIZER, model.config.vocab_size
    if not path.exists() and tokens != VOCABULARY:
        raise ValueError(
            f"{path} does not exist, and the model's {tokens} tokens are not bytes; put its tokenizer.json "
            "there"
        )
    if chat:
        words: Text = ChatText(ChatFolder(directory), ends_in(directory))
    else:
        words = TokenisedText(path, ends_in(directory)) if path.exists() else ByteText()
    if words.size > tokens:
        raise ValueError(f"{path} has {words.size} tokens, more than the model's {tokens}")
    return model, words


def of_recipe(recipe: Recipe) -> tuple[nn.Module, Text]:
    """The language model of a run, with weights still to be loaded, and the meaning of its tokens."""
    if not isinstance(recipe, LanguageRecipe):
        raise ValueError(f"a run of {recipe.ARCHITECTURE} can't generate text")
    model = recipe.network()
    recipe.lora.prepare(model)
    return model, recipe.words()


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    with one_line(USAGE, kinds=(ValueError, OSError, RuntimeError)):
        config = options.command_line(Config, arguments, program="models.generate")
        is_run = not (config.run / "config.json").exists()
        recipe = load_recipe(config.run / "config.toml") if is_run else None
        mesh = init_device_mesh("auto")
    with one_line(USAGE, mesh):
        model, words = of_recipe(recipe) if recipe else of_folder(config.run, chat=config.chat)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if recipe:
            load(config.run / "checkpoint", model)
        text = generate(model, config, words, block_size=model.config.block_size, seed=config.seed)
    if mesh.rank == 0:
        say(text, lines=True)


if __name__ == "__main__":
    main(sys.argv[1:])
