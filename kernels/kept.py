"""Choices that were measured once and are kept on disk, a file for each: they are the same from then on.

The first process that has measured something makes its file, whole or not at all, and all others take what it
says: ranks that share a disk agree without talking, and a run that is repeated or resumed has the same bits.
"""

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LARGEST = 8192  # bytes of a file


def cache_directory() -> Path:
    """Where what is computed once is kept for later processes."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardrt"


class Kept:
    """A folder with a file for each choice.

    folder: gives it. identity: what choices belong to beside what they are about: a processor, versions.
    field: what a choice is called in a file. of: whose files they are, for a warning.
    """

    def __init__(
        self, folder: Callable[[], Path], identity: Callable[[], dict[str, Any]], field: str, of: str
    ) -> None:
        self._folder, self._identity, self._field, self._of = folder, identity, field, of
        self._complained = False

    def read(self, product: str) -> str | None:
        """The choice for a product; None if there is none, or what is there is damaged: with one warning."""
        text = self._read(product)
        if text is None and os.path.lexists(self._file(product)):
            text = self._read(product)  # another process may have made it in between
            if text is None:
                self.complain(product)
        return text

    def write(self, product: str, text: str, instead_of: str | None = None) -> str:
        """Keep a choice, unless another process has kept one: that one, or this, holds from now on.

        instead_of: a text that is no choice. A folder that can't be written is not worth an error.
        """
        file = self._file(product)
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
                json.dump(self._content(product, text), temporary, indent=1)
            try:
                os.link(temporary.name, file)  # whole or not at all, and by the first process only
            except FileExistsError:
                theirs = self._read(product)
                if theirs is not None and theirs != instead_of:
                    return theirs
                os.replace(temporary.name, file)
            finally:
                Path(temporary.name).unlink(missing_ok=True)
        except OSError:
            pass
        return text

    def complain(self, product: str) -> None:
        """Warn of a file that is not used, once in a process."""
        if not self._complained:
            self._complained = True
            message = f"is damaged or of another {self._of}, so this matmul is measured again"
            warnings.warn(f"{self._file(product)} {message}", stacklevel=2)

    def _read(self, product: str) -> str | None:
        try:
            file = self._file(product)
            if not file.is_file() or file.stat().st_size > _LARGEST:
                return None
            found = json.loads(file.read_bytes())
            text = found[self._field]
            return text if isinstance(text, str) and found == self._content(product, text) else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _content(self, product: str, text: str) -> dict[str, Any]:
        content = self._identity() | {"product": product, self._field: text}
        return content | {"sha256": hashlib.sha256(repr(content).encode()).hexdigest()}

    def _file(self, product: str) -> Path:
        name = hashlib.sha256(repr((*self._identity().values(), product)).encode()).hexdigest()[:24]
        return self._folder() / f"{name}.json"
