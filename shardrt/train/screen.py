"""The terminal's view: whole lines that fit it, colours, and one line that moves.

Under a launcher standard output is no terminal, and a launcher passes on whole lines only: then there are
lines alone, of 80 columns.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import fill
from typing import TYPE_CHECKING

from shardrt.comm import mpi_world
from shardrt.untrusted import encodable, printable, say

if TYPE_CHECKING:  # rich is imported where a terminal is written to: models and their tests run without it
    from rich.console import Console
    from rich.live import Live

__all__ = ["Screen"]

PLAIN_WIDTH = 80  # columns where the terminal's width is unknown
_EVERY = 0.1  # seconds between two pictures of the line that moves
_TELL = 10.0  # seconds between two lines about something long, where no line can move


class Screen:
    """Prints lines, and on a terminal a line that moves below them.

    Args:
        shown: False for ranks that print nothing.
    """

    def __init__(self, *, shown: bool = True) -> None:
        self.shown = shown
        self._console: Console | None = None
        if shown and sys.stdout.isatty():
            from rich import console

            self._console = console.Console()
        self._live: Live | None = None
        self._reported = 0.0

    @property
    def width(self) -> int:
        """Columns for a line."""
        return self._console.width if self._console else PLAIN_WIDTH

    def say(self, line: str) -> None:
        """Print a line, or several, at once; figures in colour on a terminal. Nothing in it moves a cursor.

        Where the output is a file on a disk that is full, the line is lost, and the run goes on.
        """
        try:
            if self._console:
                shown = encodable(printable(line, lines=True), self._console.file)
                self._console.print(shown, markup=False, emoji=False, soft_wrap=True)
            elif self.shown:
                say(line, lines=True)
        except BrokenPipeError:
            if mpi_world.launch() is None:  # `| head` has had enough; else a launcher is gone
                raise
        except OSError:
            pass

    def explain(self, text: str) -> None:
        """Print a sentence in as many lines as it needs, those after the first indented."""
        self.say(
            fill(
                text, self.width - 1, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
            )
        )

    @contextmanager
    def moving(self) -> Iterator[None]:
        """While inside, `show` moves a line at the bottom of a terminal."""
        if self._console is None:
            yield
            return
        from rich.live import Live

        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            try:
                yield
            finally:
                self._live = None

    def show(self, what: str, done: int, total: int, *, lines: bool = False) -> None:
        """How far something is: `done` of `total`.

        Args:
            lines: for code that prints no lines. Where no line can move, one is printed every ten seconds.
        """
        now, pause = time.perf_counter(), _EVERY if self._live else _TELL
        if done == 0:
            self._reported = now - pause if self._live else now
        if now - self._reported < pause or not (self._live or lines):
            return
        self._reported = now
        if self._live:
            from rich.progress_bar import ProgressBar
            from rich.table import Table
            from rich.text import Text

            row = Table.grid(padding=(0, 1))
            row.add_row(Text(what), ProgressBar(total=total, completed=done, width=24), f"{done}/{total}")
            self._live.update(row, refresh=True)
        else:
            self.say(f"{what}: {done}/{total}")
