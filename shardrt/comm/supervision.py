"""Supervisor: functions by which communicators report failures, and functions that run at a program's end.

shardrt/_backends.py makes the supervisor from functions of shardrt.faults. Without it, a rank does not notice
that another rank has left.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

__all__ = ["Supervisor", "after_all_programs", "last_words", "supervisor", "very_last"]

last_words: list[Callable[[], None]] = []  # see at_program_end
very_last: list[Callable[[], None]] = []  # see after_all_programs


def _end_job(report: str, code: int) -> None:
    sys.stderr.write(report)
    os._exit(code)


class Supervisor(NamedTuple):
    """The supervisor of this process. By default it does nothing."""

    # A launcher started this process as this rank and set this variable. Called before MPI is loaded.
    launched: Callable[[int, str], None] = lambda rank, variable: None
    # MPI has started. Gets MPI's communicators of all ranks and of this node's ranks. Collective.
    met: Callable[[Any, Any], None] = lambda everyone, node: None
    # Gives the ranks whose programs have reported their end while this program runs.
    departed: Callable[[], set[int]] = set
    # Gives " on node1" if all these ranks are on one of several hosts; else "".
    at: Callable[[Sequence[int]], str] = lambda ranks: ""
    # Gives a with block that ends the job with a message after so many seconds; 0: no limit.
    within: Callable[[float, str], AbstractContextManager[None]] = lambda seconds, words: nullcontext()
    # Print a report and end all ranks at once with an exit code, from any thread.
    end_job: Callable[[str, int], None] = _end_job


supervisor = Supervisor()  # of this process


def at_program_end(function: Callable[[], None]) -> Callable[[], None]:
    """Call `function` when this rank's program ends and the job goes on; MPI still works then."""
    last_words.append(function)
    return function


def after_all_programs(function: Callable[[], None]) -> Callable[[], None]:
    """Call `function` when the programs of all ranks have ended, and their streams; MPI still works then."""
    very_last.append(function)
    return function
