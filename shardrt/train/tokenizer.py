"""Tokenizers of the package tokenizers, from a tokenizer.json: the library runs in a separate process.

A panic, an abort, or endless memory or time that a file causes is a BadTokens in one line.
"""

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.train import tokenizer_process
from shardrt.train.reader_process import ReaderProcess
from shardrt.train.tokens import BadTokens
from shardrt.untrusted import read_regular

__all__ = ["Tokenizer"]

LARGEST = 256 << 20  # bytes of a tokenizer.json; Gemma's has an eighth of that


class Tokenizer:
    """A tokenizer.json.

    `name`: the file's, with its hash; `vocabulary`: all ids are below it.

    Raises:
        BadTokens: naming the file, for a file that the library refuses or does not survive, in every method.
        Refused: for other than a readable file.
        OSError: if the file system fails.
    """

    def __init__(self, path: Path) -> None:
        if find_spec("tokenizers") is None:
            raise BadTokens("reading a tokenizer.json needs the package tokenizers: pip install tokenizers")
        self.path, content = path, read_regular(path, LARGEST)
        self.name = f"{path.name} sha256 {hashlib.sha256(content).hexdigest()[:16]}"
        try:
            self._content = content.decode()
        except ValueError as error:
            raise BadTokens(f"{path}: not a tokenizer.json ({error})") from None
        self._process: ReaderProcess | None = None
        self._begin()

    def token_to_id(self, token: str) -> int | None:
        """The id of a token; None if it is none."""
        return self._ask("token", token)[0]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, uint32, without special tokens around it.

        Many texts are encoded at once: the library uses a thread for each core.
        """
        sizes, ids = self._ask("encode", list(texts), sum(map(len, texts)))
        ends = np.cumsum(sizes, dtype=np.int64).tolist()
        whole = np.frombuffer(ids, np.uint32)
        return [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return self._ask("decode", list(ids), len(ids))[0]

    def chat(
        self, given: dict[str, Any], size: int, what: str
    ) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
        """Tokens of conversations (chat_template.answer): (facts, ids, bytes that are 1 for answers).

        Args:
            size: characters of them all.
            what: their name and the template's, for a message where the process does not survive them.
        """
        facts, content = self._ask("chat", given, size, what)
        count = sum(facts["sizes"])
        ids = np.frombuffer(content, np.uint32, count)
        return facts, ids, np.frombuffer(content, np.uint8, count, 4 * count)

    def close(self) -> None:
        """End the process; when something is asked again, another is started."""
        if self._process is not None:
            self._process.end()
        self._process = None

    def _begin(self) -> None:
        self._process = ReaderProcess(tokenizer_process.__file__)
        self.vocabulary: int = self._ask("load", self._content)[0]

    def _ask(self, do: str, given: Any, size: int = 0, what: str = "") -> tuple[Any, bytes]:
        """(the process's message, numbers). what: the cause of a crash, the tokenizer.json if not given."""
        if self._process is None:
            self._begin()
        size += len(self._content)
        answer = self._process.ask({"do": do, "with": given, "size": size})
        if answer is None:
            message = self._process.last_words(tokenizer_process.seconds(size), slice(2))
            self._process = None
            what = what or f"{self.path}: the library tokenizers crashed on this file"
            raise BadTokens(f"{what} ({message})")
        if "error" in answer[0]:
            why = "not a tokenizer.json" if do == "load" else "the library tokenizers refuses it"
            raise BadTokens(f"{self.path}: {why} ({answer[0]['error']})")
        return answer[0]["is"], answer[1]
