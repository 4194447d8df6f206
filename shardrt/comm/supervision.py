"""What communicators ask of the supervisor of their process, and what they leave to be done at its end.

The supervisor is shardrt.faults', by registration (shardrt/_backends.py). Without one, a rank does not notice
that another one has left.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

last_words: list[Callable[[], None]] = []  # see at_program_end
very_last: list[Callable[[], None]] = []  # see after_all_programs


class Supervisor:
    """Of one process that a launcher started, from before MPI to its end. This one does nothing."""

    def launched(self, rank: int, variable: str) -> None:
        """A launcher started this process as `rank`, with `variable` set. Before MPI is loaded."""

    def met(self, everyone: Any, node: Any) -> None:
        """MPI has started; its communicators of all ranks, and of those of this node. Collective."""

    def departed(self) -> set[int]:
        """The ranks whose programs have ended while this one runs, as far as they have said so."""
        return set()

    def at(self, ranks: Sequence[int]) -> str:
        """ " on node1" for ranks that are all on one of several hosts; else ""."""
        return ""

    def within(self, seconds: float, words: str) -> AbstractContextManager[None]:
        """A block that ends the job with these words when it takes longer; 0: it may."""
        return nullcontext()

    def end_job(self, report: str, code: int) -> None:
        """Print `report` and end all ranks at once, from any thread."""
        sys.stderr.write(report)
        os._exit(code)


_supervisor = Supervisor()


def supervisor() -> Supervisor:
    """That of this process."""
    return _supervisor


def register(supervisor: Supervisor) -> None:
    """Have this process supervised by `supervisor` from now on."""
    global _supervisor
    _supervisor = supervisor


def at_program_end(function: Callable[[], None]) -> Callable[[], None]:
    """Call `function` when this rank's program ends without having to end the job; MPI still works then."""
    last_words.append(function)
    return function


def after_all_programs(function: Callable[[], None]) -> Callable[[], None]:
    """Call `function` when the programs of all ranks have ended, and their streams; MPI still works then."""
    very_last.append(function)
    return function
