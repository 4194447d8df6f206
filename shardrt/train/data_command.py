"""`python -m shardrt data`: make and check token files.

A .jsonl file holds one document per line, as {"text": ...}; any other file is one document.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.train.data import VOCABULARY
from shardrt.train.tokens import SUFFIX, BadTokens, TokenFile, open_tokens, verify, write


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
    vocabulary, tokenizer, encode = 0, "bytes", None
    if options.tokenizer is None:
        if options.end is not None:
            raise BadTokens("--end needs --tokenizer: bytes have no token for it")
        vocabulary, encode = VOCABULARY, lambda document: np.frombuffer(document, np.uint8)
    else:
        vocabulary, tokenizer, encode = _tokenizer(options.tokenizer, options.end)
    file = write(
        options.file,
        _documents(options.texts, options.field),
        encode,
        vocabulary=vocabulary,
        tokenizer=tokenizer,
    )
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
    return tokenizer, f"{path.name} sha256 {hashlib.sha256(content).hexdigest()[:16]}"


def _tokenizer(path: Path, end: str | None) -> tuple[int, str, Callable[[bytes], np.ndarray]]:
    """(size of the vocabulary, name, what gives a document's tokens)."""
    tokenizer, name = open_tokenizer(path)
    last = [] if end is None else [tokenizer.token_to_id(end)]
    if last == [None]:
        raise BadTokens(f"{path}: has no token {end!r}")

    def encode(document: bytes) -> np.ndarray:
        ids = tokenizer.encode(document.decode(errors="replace"), add_special_tokens=False).ids
        return np.array(ids + last if ids else [], np.int64)

    return tokenizer.get_vocab_size(), name, encode
