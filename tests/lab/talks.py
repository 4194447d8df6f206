"""Folders of Hugging Face with a chat template, and conversations in JSON lines.

    folder = talks.furnish(tmp_path / "model", "llama3")
    talks.write(tmp_path / "talks.jsonl", talks.CONVERSATIONS)

`from tests.lab import talks`; it is no part of tests.lab. tests/train/templates has the templates: the
public formats of families, and `marked`, which marks its answers. `python -m tests.lab.talks` writes what
transformers makes of CONVERSATIONS to its expected.json.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ROOT

TEMPLATES = ROOT / "tests" / "train" / "templates"
NAMES = ("chatml", "llama3", "mistral", "zephyr")
SPECIAL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
)
TEXT = "what is one two three four five six seven eight nine user assistant system zero plus"


def said(*turns: str, system: str = "", **more: Any) -> dict:
    """A record of what a user and the assistant say in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]
    return {"messages": [{"role": "system", "content": system}] * bool(system) + messages, **more}


CONVERSATIONS = [
    said("What is one?", "One is\n\n\ta number. "),
    said(
        "hi", "Hello <b>you</b> \u00e9\U0001f600", "  and?  ", "bye\U0001f600", system='Say "it" & be brief.'
    ),
    said("one", "two", "three", "four", "five", "six"),
]


def special_of(name: str) -> dict[str, str]:
    """The special tokens that a template names."""
    end = {"chatml": "<|im_end|>", "marked": "<|im_end|>", "llama3": "<|eot_id|>"}.get(name, "</s>")
    return {"bos_token": "<s>", "eos_token": end}


def tokenizer(path: Path) -> int:
    """A byte-level BPE tokenizer.json; gives its number of tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    own = tokenizers.Tokenizer(tokenizers.models.BPE())
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    own.train_from_iterator([TEXT] * 3, trainer)
    own.save(str(path))
    return own.get_vocab_size()


def furnish(folder: Path, name: str = "chatml", template: str | None = None) -> Path:
    """A folder with a tokenizer and a chat template, of the family or this one, without a model."""
    pytest.importorskip("jinja2")
    folder.mkdir(exist_ok=True)
    tokenizer(folder / "tokenizer.json")
    text = (TEMPLATES / f"{name}.jinja").read_text() if template is None else template
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special_of(name)}
    if template is None and name == "zephyr":  # as older folders have it
        config["chat_template"] = text
    else:
        (folder / "chat_template.jinja").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write(path: Path, records: Iterable[Any]) -> Path:
    """JSON lines."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def by_transformers() -> dict[str, list[str]]:
    """Template -> the text of each of CONVERSATIONS, as transformers renders it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def text_of(name: str, messages: list[dict]) -> str:
        source = (TEMPLATES / f"{name}.jinja").read_text()
        return render_jinja_template([messages], chat_template=source, **special_of(name))[0][0]

    return {
        name: [text_of(name, record["messages"]) for record in CONVERSATIONS] for name in (*NAMES, "marked")
    }


if __name__ == "__main__":
    (TEMPLATES / "expected.json").write_text(json.dumps(by_transformers(), indent=1) + "\n")
