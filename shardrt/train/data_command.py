"""`python -m shardrt data`: make and check token files.

A .jsonl file holds one document per line, as {"text": ...}; any other file is one document.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.train import chat_file
from shardrt.train.chat import ChatFolder, read_examples
from shardrt.train.data import VOCABULARY
from shardrt.train.tokenizer import Tokenizer
from shardrt.train.tokens import SUFFIX, BadTokens, TokenFile, open_tokens, verify, write
from shardrt.untrusted import open_regular, say, strict_json

_BATCH = 1 << 20  # bytes of text that are tokenised together


def add_to(commands: Any) -> None:
    """Add `data` and its own commands to argparse's subparsers."""
    group = commands.add_parser("data", help="token files", description=__doc__.split("\n")[0])
    actions = group.add_subparsers(title="commands", required=True)
    made = actions.add_parser("make", help="tokenise text", description=__doc__.split("\n")[-2])
    made.set_defaults(run=make)
    made.add_argument("file", metavar=f"OUT{SUFFIX}", type=Path, help="a name that does not exist yet")
    made.add_argument("texts", metavar="TEXT", type=Path, nargs="+")
    made.add_argument("--tokenizer", metavar="tokenizer.json", type=Path, help="bytes if not given")
    made.add_argument("--end", metavar="TOKEN", help="put behind each document, as <|endoftext|>")
    made.add_argument("--field", default="text", help="of the lines of .jsonl files (text)")
    talks = actions.add_parser("chat", help="tokenise conversations", description=chat.__doc__)
    talks.set_defaults(run=chat)
    talks.add_argument(
        "file", metavar=f"OUT{chat_file.SUFFIX}", type=Path, help="a name that does not exist yet"
    )
    talks.add_argument("records", metavar="RECORDS", type=Path, nargs="+", help="JSON lines, Parquet, ...")
    talks.add_argument("--init-from", metavar="FOLDER", type=Path, required=True, help="with the template")
    talks.add_argument("--chat-template", metavar="FILE", type=Path, help="in place of the folder's own")
    checked = actions.add_parser("check", help="read every token, and say what is in the file")
    checked.set_defaults(run=check)
    checked.add_argument("file", metavar=f"FILE{SUFFIX}", type=Path, help=f"or FILE{chat_file.SUFFIX}")
    checked.add_argument("--vocabulary", type=int, metavar="N", help="of a model: every token must be below")


def make(options: argparse.Namespace) -> int:
    """Write a token file."""
    if options.file.suffix != SUFFIX:
        raise BadTokens(f"{options.file}: the name must end in {SUFFIX}")
    documents = _documents(options.texts, options.field)
    if options.tokenizer is None:
        if options.end is not None:
            raise BadTokens("--end needs --tokenizer: byte tokens have no end token")
        facts = {"vocabulary": VOCABULARY, "tokenizer": "bytes"}
        file = write(options.file, documents, lambda text: np.frombuffer(text, np.uint8), **facts)
    else:
        tokenizer = Tokenizer(options.tokenizer)
        last = _end(tokenizer, options)
        facts = {"vocabulary": tokenizer.vocabulary, "tokenizer": tokenizer.name}
        facts["end"] = last[0] if last else None
        found = _tokenised(tokenizer, documents, last)
        file = write(options.file, found, lambda text: text.ids, **facts)
    say(_reported(file))
    return 0


def chat(options: argparse.Namespace) -> int:
    """Write a file of conversations, tokenised by the chat template of a folder, for text.chat."""
    if options.file.suffix != chat_file.SUFFIX:
        raise BadTokens(f"{options.file}: the name must end in {chat_file.SUFFIX}")
    folder = ChatFolder(options.init_from, template=options.chat_template)
    chat_file.write(options.file, read_examples(options.records, folder))
    say(chat_file.described(options.file, chat_file.open_examples(options.file)))
    return 0


def check(options: argparse.Namespace) -> int:
    """Verify a token file, or one of conversations."""
    if options.file.suffix == chat_file.SUFFIX:
        say(f"{chat_file.described(options.file, chat_file.verify(options.file))}, whole")
        return 0
    file = open_tokens(options.file)
    verify(file)
    if options.vocabulary is not None:
        file.check_vocabulary(options.vocabulary)
    say(f"{_reported(file)}, whole")
    return 0


def _reported(file: TokenFile) -> str:
    return (
        f"{file.path}: {file.tokens.size} tokens of {file.tokens.dtype} in {file.documents.size} documents, "
        f"{file.bytes} bytes of text ({file.bytes / file.tokens.size:.2f} a token), "
        f"vocabulary {file.vocabulary} ({file.tokenizer}), largest {file.largest}"
    )


def _documents(paths: list[Path], field: str) -> Iterator[bytes]:
    for path in paths:
        if path.suffix != ".jsonl":
            with open_regular(path) as file:
                yield file.read()
            continue
        with open_regular(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _text_of(line, field, f"{path}, line {number}")


def _text_of(line: bytes, field: str, place: str) -> bytes:
    try:
        return strict_json(line)[field].encode()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadTokens(f"{place}: expected a JSON object with a string field {field!r}") from None


def _end(tokenizer: Tokenizer, options: argparse.Namespace) -> list[int]:
    """The end token, put after each document."""
    last = [] if options.end is None else [tokenizer.token_to_id(options.end)]
    if last == [None]:
        raise BadTokens(f"{options.tokenizer}: the tokenizer has no token {options.end!r}")
    return last


class _Tokenised(bytes):
    """A document with its tokens."""

    ids: np.ndarray


def _tokenised(tokenizer: Tokenizer, documents: Iterator[bytes], last: list[int]) -> Iterator[_Tokenised]:
    """The documents with their tokens. Many are encoded at once: the library uses a thread for each core."""
    for texts in _batches(documents):
        readable = [text.decode(errors="replace") for text in texts]
        for text, found in zip(texts, tokenizer.encode(readable), strict=True):
            document = _Tokenised(text)
            document.ids = np.append(found, last).astype(np.int64) if found.size else found
            yield document


def _batches(documents: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Neighbouring documents, _BATCH bytes at least of each; the last may be smaller."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    yield batch
