"""What communicators ask of the supervisor of their process, and what they leave to be done at its end.

shardrt/_backends.py makes the supervisor of functions of shardrt.faults. Without it, a rank does not notice
that another one has left.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

last_words: list[Callable[[], None]] = []  # see at_program_end
very_last: list[Callable[[], None]] = []  # see after_all_programs


def _end_job(report: str, code: int) -> None:
    sys.stderr.write(report)
    os._exit(code)


class Supervisor(NamedTuple):
    """Of one process. Unless something else is said, it does nothing."""

    # A launcher started this process as this rank, with this variable set. Before MPI is loaded.
    launched: Callable[[int, str], None] = lambda rank, variable: None
    # MPI has started; its communicators of all ranks, and of those of this node. Collective.
    met: Callable[[Any, Any], None] = lambda everyone, node: None
    # The ranks whose programs have ended while this one runs, as far as they have said so.
    departed: Callable[[], set[int]] = set
    # " on node1" for ranks that are all on one of several hosts; else "".
    at: Callable[[Sequence[int]], str] = lambda ranks: ""
    # A block that ends the job with these words when it takes longer than so many seconds; 0: it may.
    within: Callable[[float, str], AbstractContextManager[None]] = lambda seconds, words: nullcontext()
    # Print a report and end all ranks at once with an exit code, from any thread.
    end_job: Callable[[str, int], None] = _end_job


supervisor = Supervisor()  # of this process


def at_program_end(function: Callable[[], None]) -> Callable[[], None]:
    """Call `function` when this rank's program ends without having to end the job; MPI still works then."""
    last_words.append(function)
    return function


def after_all_programs(function: Callable[[], None]) -> Callable[[], None]:
    """Call `function` when the programs of all ranks have ended, and their streams; MPI still works then."""
    very_last.append(function)
    return function
