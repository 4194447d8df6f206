"""Token files: tokenised text as one safetensors file, which is read piece by piece and never whole.

Tensors: "tokens", 1-D, uint8, uint16 or uint32, whichever holds the vocabulary; "documents", int64, where
each document begins. Metadata: the meaning of the tokens (vocabulary, tokenizer), how many bytes of text they
stand for, the largest of them, and XXH3-128 of both tensors. Any safetensors reader opens it.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.train.filearray import FileArray
from shardrt.train.unfinished import NAMES, Unfinished
from shardrt.untrusted import open_regular

__all__ = ["BadTokens", "SUFFIX", "open_tokens"]

SUFFIX = ".tokens"
_FORMAT = "shardrt tokens 1"
_CHUNK = 1 << 22  # tokens that are looked at together
_NUMBER = re.compile("[0-9]{1,18}")
_KEYS = ("format", "vocabulary", "tokenizer", "bytes", "largest", "xxh3_128")


class BadTokens(ValueError):
    """A token file that can't be used; the message names the file and its fault."""


@dataclass(frozen=True, eq=False)
class TokenFile:
    """An open token file. Tokens are read when they are used."""

    path: Path
    tokens: FileArray
    documents: np.ndarray
    vocabulary: int  # ids are below this: the largest that the tokenizer has, and 1
    tokenizer: str  # "bytes", or the name and the hash of a tokenizer.json
    bytes: int  # of the text
    largest: int
    digest: str  # of the content, as it was when the file was made
    end: int | None = None  # the token behind each document, if there is one

    def check_vocabulary(self, size: int) -> None:
        """Raise BadTokens, with the place of the first token that is too large, unless all are below size."""
        if self.largest < size:
            return
        for start in range(0, self.tokens.size, _CHUNK):
            wrong = np.flatnonzero(np.asarray(self.tokens[start : start + _CHUNK]) >= size)
            if wrong.size:
                place = start + int(wrong[0])
                raise BadTokens(
                    f"{self.path}: token {int(self.tokens[place])} at offset {place} is not below the "
                    f"model's vocabulary of {size}; the file's own is {self.vocabulary}"
                )
        raise BadTokens(
            f"{self.path}: the header says that the largest token is {self.largest}, but no token is; make "
            "the file again"
        )


class TokenWriter:
    """Makes a token file, document by document; it appears at `path` when it is whole.

    Args:
        end: the token that is the last of each document.
        made_from: what decides the content. A killed process's work on the same goes on, from `facts`.

    Raises:
        FileExistsError: for a `path` that exists.
        BadTokens: for a token that is not in the vocabulary, or if there is none.
        Refused: if another process is making the file.
        OSError: if the file system fails.
    """

    def __init__(
        self, path: Path, *, vocabulary: int, tokenizer: str, end: int | None = None, made_from: str = ""
    ) -> None:
        kind = next(np.dtype(name) for name in NAMES if np.iinfo(name).max >= vocabulary - 1)
        self.path, self._vocabulary, self._tokenizer, self._end = path, vocabulary, tokenizer, end
        self._file = Unfinished(path, made_from, {"tokens": kind, "documents": np.int64})
        self.facts = self._file.facts
        self.bytes, self._largest = self.facts.get("bytes", 0), self.facts.get("largest", 0)

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        """What was kept stays, unless the error is one of the content, which would come again."""
        if isinstance(error, ValueError):
            self._file.remove()
        elif error is not None:
            self._file.close()

    @property
    def documents(self) -> int:
        """How many there are."""
        return self._file.size("documents")

    def add(self, tokens: Sequence[int] | np.ndarray, size: int) -> None:
        """Add a document of `size` bytes of text, unless it has no tokens: integers from 0 on."""
        wide = np.asarray(tokens)
        if wide.size == 0:
            return
        low, high = int(wide.min()), int(wide.max())
        if low < 0 or high >= self._vocabulary:  # in fewer bits it would become another token
            wrong = low if low < 0 else high
            raise BadTokens(f"{self.path}: token {wrong} is not in the vocabulary of {self._vocabulary}")
        self._file.append("documents", np.array([self._file.size("tokens")]))
        self._file.append("tokens", wide)
        self.bytes, self._largest = self.bytes + size, max(self._largest, high)

    def keep(self, **facts: Any) -> None:
        """What there is outlives a kill, from time to time; `facts` say where the maker goes on."""
        self._file.keep({"bytes": self.bytes, "largest": self._largest, **facts})

    def finish(self) -> TokenFile:
        """Put the file in its place, and open it."""
        if not self.documents:
            raise BadTokens(f"{self.path}: the documents have no tokens")
        self._file.finish(self._metadata)
        return open_tokens(self.path)

    def _metadata(self, digest: str) -> dict[str, str]:
        facts = (_FORMAT, self._vocabulary, self._tokenizer, self.bytes, self._largest, digest)
        metadata = dict(zip(_KEYS, map(str, facts), strict=True))
        return metadata | ({} if self._end is None else {"end": str(self._end)})


def write(
    path: Path,
    documents: Iterable[bytes],
    encode: Callable[[bytes], Sequence[int] | np.ndarray],
    *,
    vocabulary: int,
    tokenizer: str,
    end: int | None = None,
) -> TokenFile:
    """Make a token file of documents, one after the other, by a TokenWriter.

    Args:
        encode: a document's tokens, integers from 0 on and below `vocabulary`, which decides the bits of
            each.
        end: the token that `encode` puts after each document.
    """
    with TokenWriter(path, vocabulary=vocabulary, tokenizer=tokenizer, end=end) as writer:
        for document in documents:
            writer.add(encode(document), len(document))
        return writer.finish()


def open_tokens(path: Path) -> TokenFile:
    """Open a token file.

    Raises:
        BadTokens: that names its fault.
        OSError: if it can't be read.
    """
    from safetensors import SafetensorError, safe_open

    open_regular(path).close()  # a missing file is the system's error; the library waits for a pipe
    try:
        with safe_open(path, "numpy") as opened:
            facts, names = opened.metadata() or {}, set(opened.keys())
    except (SafetensorError, ValueError) as error:
        raise BadTokens(
            f"{path}: not a token file ({error}); make one with `python -m shardrt data make`"
        ) from None
    if facts.get("format") != _FORMAT or not {"tokens", "documents"} <= names:
        raise BadTokens(
            f"{path}: not a token file of format {_FORMAT!r}; make one with `python -m shardrt data make`"
        )
    try:
        numbers = {name: _natural(facts, name) for name in ("vocabulary", "bytes", "largest")}
        tokens, documents = _found(path, "tokens"), np.asarray(_found(path, "documents"))
        numbers |= {"end": _natural(facts, "end")} if "end" in facts else {}
        origin = {"tokenizer": facts["tokenizer"], "digest": facts["xxh3_128"]}
        file = TokenFile(path, tokens, documents, **origin, **numbers)
    except (KeyError, ValueError) as error:
        raise BadTokens(f"{path}: missing or invalid header entry {error}") from None
    if not file.bytes:
        raise BadTokens(f"{path}: the header says that its {tokens.size} tokens have 0 bytes of text")
    starts = file.documents
    if not tokens.size or not starts.size or starts[0] or not 0 <= starts[-1] < tokens.size:
        raise BadTokens(
            f"{path}: documents begin outside the file's {tokens.size} tokens; make the file again"
        )
    if (starts[1:] <= starts[:-1]).any():
        raise BadTokens(f"{path}: the documents are not in ascending order; make the file again")
    return file


def _natural(facts: dict[str, str], name: str) -> int:
    """A number of the header. Raises ValueError for other values, or more than any file has; KeyError."""
    if not _NUMBER.fullmatch(facts[name]):
        raise ValueError(f"{name!r}: {facts[name][:40]!r}")
    return int(facts[name])


def _found(path: Path, name: str) -> FileArray:
    """A tensor of a file whose header safetensors has checked."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[name]
    kind = {short: np.dtype(long) for long, short in NAMES.items()}[entry["dtype"]]
    if kind.name not in (("int64",) if name == "documents" else ("uint8", "uint16", "uint32")):
        raise ValueError(f"the type of its {name}: {entry['dtype']}")
    (count,) = entry["shape"]
    return FileArray(path, kind, 8 + length + entry["data_offsets"][0], count)


def verify(file: TokenFile) -> None:
    """Read all of a file.

    Raises:
        BadTokens: that names the difference from the written data.
    """
    from xxhash import xxh3_128

    hasher, largest = xxh3_128(), 0
    for start in range(0, file.tokens.size, _CHUNK):
        piece = np.ascontiguousarray(file.tokens[start : start + _CHUNK])
        hasher.update(piece)
        largest = max(largest, int(piece.max()))
    hasher.update(np.ascontiguousarray(file.documents))
    if hasher.hexdigest() != file.digest:
        raise BadTokens(f"{file.path}: wrong checksum: the content has changed; make the file again")
    if largest != file.largest or largest >= file.vocabulary:
        raise BadTokens(f"{file.path}: the largest token is {largest}, but the header says {file.largest}")
