"""Proves every recipe of models/configs: `python -m tests.prove_recipes [--only NAME,...] [--ranks 1,8]`.

Prints a line for each recipe and number of ranks, and what is not proved. Exit code 1 if anything is not.

Up to 8 ranks each is recorded, of more one of each role. A recipe whose batch is too small trains with one
sequence for each rank. Recipes that begin with files of Hugging Face get those of a small Llama, with a
tokenizer, text and conversations, made in a temporary folder.
"""

import io
import re
import sys
import tempfile
import time
import tomllib
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.hub import save_pretrained
from models.llama import Llama, LlamaConfig
from shardrt.__main__ import main as shardrt
from tests.lab import talks
from tests.ranks import ROOT

RECIPES = {path.stem: path for path in sorted((ROOT / "models" / "configs").glob("*.toml"))}
RANKS = (1, 2, 8, 64, 1024)
EACH = 8  # the most ranks that are recorded one by one
CHECKS = ("order", "races", "gradients", "memory")
END = "<|im_end|>"
WIDTHS = (14, 6, 8, 8, 11, 18, 8)


@dataclass(frozen=True)
class Proof:
    """verdicts: check -> "proved", "NOT PROVED", or "-" if the recipe failed. lines: printed by `prove`."""

    recipe: str
    ranks: int
    verdicts: dict[str, str]
    most: str
    seconds: float
    more: tuple[str, ...]
    lines: str

    @property
    def proved(self) -> bool:
        return all(verdict == "proved" for verdict in self.verdicts.values())

    def __str__(self) -> str:
        checks = [self.verdicts[name] for name in CHECKS[:3]]
        columns = self.recipe, f"{self.ranks:,}", *checks, self.most, f"{self.seconds:.1f}"
        return f"{_row(columns)}  {' '.join(self.more)}".rstrip()


def furnish(folder: Path) -> None:
    """Write llama/ (a model's files), text.tokens and talks.jsonl."""
    words = talks.furnish(folder / "words")
    size = talks.tokenizer(words / "tokenizer.json")
    shape = {"n_layer": 4, "n_head": 4, "n_kv_head": 2, "n_embd": 64, "n_hidden": 128, "block_size": 1024}
    files = {file.name: file.read_bytes() for file in words.iterdir()}
    save_pretrained(Llama(LlamaConfig(**shape, vocab_size=size)), folder / "llama", files=files)
    talks.write(folder / "talks.jsonl", talks.CONVERSATIONS * 1000)
    texts = talks.write(folder / "texts.jsonl", [{"text": talks.TEXT * 40}] * 2000)
    tokens = ["data", "make", str(folder / "text.tokens"), str(texts), "--end", END]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        code = shardrt([*tokens, "--tokenizer", str(words / "tokenizer.json")])
    assert code == 0, f"data make ended with {code}"


def files_of(recipe: str, folder: Path) -> list[str]:
    """Options with the files that a recipe begins with."""
    text = _settings(recipe).get("text")
    if text is None:
        return []
    data = folder / ("talks.jsonl" if text.get("chat") else "text.tokens")
    return ["--init-from", str(folder / "llama"), "--data", str(data)]


def proof_of(recipe: str, ranks: int, folder: Path) -> Proof:
    """What `shardrt prove` says of a recipe."""
    each = ["--each"] if ranks <= EACH else []
    batch = ["--batch-size", str(ranks)] if _settings(recipe)["batch_size"] < ranks else []
    training = ["train", "--config", str(RECIPES[recipe]), *files_of(recipe, folder), *batch]
    command = ["prove", "--ranks", str(ranks), *each, "--", *training]
    started, out, messages = time.perf_counter(), io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(messages):
        shardrt(command)
    seconds, printed = time.perf_counter() - started, out.getvalue()
    verdicts = {name: "-" for name in CHECKS} | dict(re.findall(r"^(\w+): (.*)$", printed, re.MULTILINE))
    most = max((int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes at most", printed)), default=0)
    failed = "-" in verdicts.values()
    lines = f"shardrt {' '.join(command)}\n{messages.getvalue() if failed else printed}"
    return Proof(recipe, ranks, verdicts, f"{most:,} bytes" if most else "-", seconds, (*each, *batch), lines)


def prove(recipes: Sequence[str], ranks: Sequence[int]) -> list[Proof]:
    """Prove recipes on each number of ranks, and print a line for each."""
    print(_row(("recipe", "ranks", *CHECKS, "seconds")), " with", flush=True)
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if any("text" in _settings(recipe) for recipe in recipes):
            furnish(folder)
        for recipe in recipes:
            for count in ranks:
                found.append(proof_of(recipe, count, folder))
                print(found[-1], flush=True)
    return found


def _settings(recipe: str) -> dict[str, Any]:
    return tomllib.loads(RECIPES[recipe].read_text())


def _row(columns: Sequence[str]) -> str:
    return " ".join(f"{column:{width}}" for column, width in zip(columns, WIDTHS, strict=True))


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = ArgumentParser("python -m tests.prove_recipes", description="prove models/configs")
    recipes, ranks = ",".join(RECIPES), ",".join(map(str, RANKS))
    parser.add_argument("--only", default=recipes, metavar="NAME,...", help="recipes (all)")
    parser.add_argument("--ranks", default=ranks, metavar="N,...", help=f"numbers of ranks ({ranks})")
    options = parser.parse_args(arguments)
    proofs = prove(options.only.split(","), [int(count) for count in options.ranks.split(",")])
    wrong = [proof for proof in proofs if not proof.proved]
    for proof in wrong:
        print(f"\n{proof.recipe} on {proof.ranks:,} ranks is not proved\n{proof.lines}")
    print(f"\n{len(proofs) - len(wrong)} of {len(proofs)} are proved")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
