"""A process for a library that may crash on what it reads: it is asked by messages, then ended."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import finalize

from shardrt.train.tokenizer_process import receive, send

__all__ = ["ReaderProcess"]


class ReaderProcess:
    """One that runs `script`, which answers each message with two parts.

    Args:
        script: a file of Python.
        environment: variables in addition to this process's.
    """

    def __init__(self, script: str, environment: Mapping[str, str] | None = None) -> None:
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
        # -P: the modules beside that file are not for it, nor for the library.
        command = [sys.executable, "-P", script]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._complaints}
        self._child = subprocess.Popen(command, **pipes, env={**os.environ, **(environment or {})})
        self.end = finalize(self, _end, self._child)

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes] | None:
        """The two parts of its answer; None if it gives none."""
        try:
            send(self._child.stdin, json.dumps(request).encode())
            self._child.stdin.flush()
        except BrokenPipeError:
            return None
        parts = receive(self._child.stdout), receive(self._child.stdout)
        return None if None in parts else (json.loads(parts[0]), parts[1])

    def last_words(self, seconds: float, lines: slice) -> str:
        """How it ended.

        Args:
            seconds: its limit of processor time.
            lines: which of the lines that it has printed say why.
        """
        self.end()
        code = self._child.returncode
        if code == -signal.SIGPROF:
            return f"it took more than {seconds:.0f} s"
        ended = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        self._complaints.seek(0)
        printed = self._complaints.read(1 << 20).decode(errors="replace").split("\n")
        return ": ".join([ended, *[line.strip() for line in printed if line.strip()][lines]])[:300]


def _end(child: subprocess.Popen) -> None:
    """It goes when nothing more comes; one that works on something is not waited for."""
    with suppress(BrokenPipeError):  # a request that a dead one never read
        child.stdin.close()
    try:
        child.wait(0.2)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    child.stdout.close()
