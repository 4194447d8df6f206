"""`python -m shardrt data`: make and check token files.

A .jsonl file holds one document per line, as {"text": ...}; any other file is one document.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.train.data import VOCABULARY
from shardrt.train.tokens import SUFFIX, BadTokens, TokenFile, open_tokens, verify, write

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
    checked = actions.add_parser("check", help="read every token, and say what is in the file")
    checked.set_defaults(run=check)
    checked.add_argument("file", metavar=f"FILE{SUFFIX}", type=Path)
    checked.add_argument("--vocabulary", type=int, metavar="N", help="of a model: every token must be below")


def make(options: argparse.Namespace) -> int:
    """Write a token file."""
    if options.file.suffix != SUFFIX:
        raise BadTokens(f"{options.file}: the name must end in {SUFFIX}")
    documents = _documents(options.texts, options.field)
    if options.tokenizer is None:
        if options.end is not None:
            raise BadTokens("--end needs --tokenizer: bytes have no token for it")
        facts = {"vocabulary": VOCABULARY, "tokenizer": "bytes"}
        file = write(options.file, documents, lambda text: np.frombuffer(text, np.uint8), **facts)
    else:
        tokenizer, name = open_tokenizer(options.tokenizer)
        last = _end(tokenizer, options)
        facts = {"vocabulary": vocabulary_of(tokenizer), "tokenizer": name, "end": last[0] if last else None}
        found = _tokenised(tokenizer, documents, last)
        file = write(options.file, found, lambda text: text.ids, **facts)
    print(_told(file))
    return 0


def check(options: argparse.Namespace) -> int:
    """Verify a token file."""
    file = open_tokens(options.file)
    verify(file)
    if options.vocabulary is not None:
        file.check_vocabulary(options.vocabulary)
    print(f"{_told(file)}, whole")
    return 0


def _told(file: TokenFile) -> str:
    return (
        f"{file.path}: {file.tokens.size} tokens of {file.tokens.dtype} in {file.documents.size} documents, "
        f"{file.bytes} bytes of text ({file.bytes / file.tokens.size:.2f} a token), "
        f"vocabulary {file.vocabulary} ({file.tokenizer}), largest {file.largest}"
    )


def _documents(paths: list[Path], field: str) -> Iterator[bytes]:
    for path in paths:
        if path.suffix != ".jsonl":
            yield path.read_bytes()
            continue
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _text_of(line, field, f"{path}, line {number}")


def _text_of(line: bytes, field: str, place: str) -> bytes:
    try:
        return json.loads(line)[field].encode()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadTokens(f"{place}: no JSON object with a text {field!r}") from None


def open_tokenizer(path: Path) -> tuple[Any, str]:
    """A tokenizer.json, as the package tokenizers has it, and its name. Raises BadTokens, OSError."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise BadTokens("a tokenizer needs a package: pip install tokenizers") from None
    content = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises nothing more exact
        raise BadTokens(f"{path}: no tokenizer ({error})") from None
    tokenizer.no_truncation()  # what such files say of batches for one model would cut or fill documents
    tokenizer.no_padding()
    return tokenizer, f"{path.name} sha256 {hashlib.sha256(content).hexdigest()[:16]}"


def vocabulary_of(tokenizer: Any) -> int:
    """What all its ids are below. Not their number: ids may have holes."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def _end(tokenizer: Any, options: argparse.Namespace) -> list[int]:
    """What is put behind each document."""
    last = [] if options.end is None else [tokenizer.token_to_id(options.end)]
    if last == [None]:
        raise BadTokens(f"{options.tokenizer}: has no token {options.end!r}")
    return last


class _Tokenised(bytes):
    """A document with its tokens."""

    ids: list[int]


def _tokenised(tokenizer: Any, documents: Iterator[bytes], last: list[int]) -> Iterator[_Tokenised]:
    """The documents with their tokens. Many are encoded at once: the library uses a thread for each core."""
    for texts in _batches(documents):
        readable = [text.decode(errors="replace") for text in texts]
        encoded = tokenizer.encode_batch(readable, add_special_tokens=False)
        for text, found in zip(texts, encoded, strict=True):
            document = _Tokenised(text)
            document.ids = found.ids + last if found.ids else []
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
