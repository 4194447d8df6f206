"""From texts and records to a token file, document by document; and token files that training makes itself.

Training on a Parquet file, say, first writes runs/.tokens/NAME-KEY.tokens, once: after that the samples are
those of any token file, at every number of ranks, and a run resumes at any of them at once.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path

import numpy as np

from shardrt.train.metrics import RUNS
from shardrt.train.records import has_records, record_files, records
from shardrt.train.screen import Screen
from shardrt.train.tokenizer import LARGEST, Tokenizer
from shardrt.train.tokens import SUFFIX, BadTokens, TokenFile, write
from shardrt.untrusted import open_regular, read_regular

__all__ = ["Preparation", "make_tokens", "prepared"]

CACHE = ".tokens"  # in runs/
BYTES = 256  # the vocabulary without a tokeniser
_BATCH = 1 << 20  # bytes of text that are tokenised together
_ABANDONED = 3600.0  # seconds without a write
_FORMAT = 1  # of what is made; after a change all files are made again


@dataclass(frozen=True)
class Preparation:
    """How records become tokens."""

    tokenizer: Path | None = None  # a tokenizer.json; None: bytes
    end: str = ""  # the token behind each document, if any
    column: str = "text"
    split: str = "train"


def prepared(path: Path, how: Preparation) -> Path:
    """The token file of records: the one that was made of them before, or else made now.

    Ranks and runs that want the same file wait for the one that makes it. A changed source (its size or
    time), tokenizer or setting makes another file.

    Raises:
        BadTokens, BadRecords: for what can't be used.
        OSError: if the file system fails.
    """
    from xxhash import xxh3_128_hexdigest

    files = [(str(file.resolve()), file.stat()) for file in record_files(path, how.split)]
    sources = [(name, found.st_size, found.st_mtime_ns) for name, found in files]
    made_by = None if how.tokenizer is None else xxh3_128_hexdigest(read_regular(how.tokenizer, LARGEST))
    identity = json.dumps([_FORMAT, sources, made_by, how.end, how.column])
    key = xxh3_128_hexdigest(identity.encode())
    return once(f"{path.name.split('.')[0]}-{key[:16]}{SUFFIX}", lambda out: make_tokens(out, [path], how))


def once(name: str, make: Callable[[Path], object]) -> Path:
    """The file of this name in runs/.tokens, made by `make` if it is not there. Others wait meanwhile."""
    out = RUNS / CACHE / name
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system gives it back when a process ends, however it ends
        if not out.exists():
            _remove_unfinished(out)
            make(out)
    return out


def _remove_unfinished(out: Path) -> None:
    """Remove what processes that were killed have left of a file.

    A lock may not reach other hosts, so a new file stays, but for one of this process's number.
    """
    for left in out.parent.glob(f".{escape(out.name)}.*.tmp"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED or left.suffixes[-2] == f".{os.getpid()}":
                left.unlink()


def make_tokens(out: Path, paths: Sequence[Path], how: Preparation) -> TokenFile:
    """Make a token file of texts and records. A line on the screen says how far it is.

    Raises:
        FileExistsError: for an `out` that exists.
        BadTokens, BadRecords: for what can't be used.
        OSError: if the file system fails.
    """
    if how.tokenizer is None and how.end:
        raise BadTokens("--end needs --tokenizer: byte tokens have no end token")
    screen = Screen()
    with screen.moving():
        documents = _documents(paths, how, screen)
        if how.tokenizer is None:
            facts = {"vocabulary": BYTES, "tokenizer": "bytes"}
            return write(out, documents, lambda text: np.frombuffer(text, np.uint8), **facts)
        tokenizer = Tokenizer(how.tokenizer)
        last = _end(tokenizer, how)
        facts = {"vocabulary": tokenizer.vocabulary, "tokenizer": tokenizer.name}
        facts["end"] = last[0] if last else None
        found = _tokenised(tokenizer, documents, last)
        return write(out, found, lambda text: text.ids, **facts)


def _documents(paths: Sequence[Path], how: Preparation, screen: Screen) -> Iterator[bytes]:
    for path in paths:
        if not has_records(path):
            with open_regular(path) as file:
                yield file.read()
            continue
        rows = records(path, [how.column], split=how.split)
        screen.show(f"tokenising {path.name}, %", 0, 100)
        for row in rows:
            text = row[how.column]
            if not isinstance(text, str):
                kind = type(text).__name__
                raise BadTokens(f"{rows.where}: column {how.column!r} must have strings, got {kind}")
            yield _encoded(text, rows.where, how.column)
            screen.show(f"tokenising {path.name}, %", max(1, int(100 * rows.part)), 100, lines=True)


def _encoded(text: str, where: str, column: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadTokens(f"{where}: column {column!r} has text that is not Unicode") from None


def _end(tokenizer: Tokenizer, how: Preparation) -> list[int]:
    """The end token, put after each document."""
    last = [tokenizer.token_to_id(how.end)] if how.end else []
    if last == [None]:
        raise BadTokens(f"{how.tokenizer}: the tokenizer has no token {how.end!r}")
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
