"""What shardrt.faults does for communicators (comm/supervision.py); shardrt/_backends.py registers it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from shardrt.comm import supervision
from shardrt.faults import deadline, failure, guard


class Supervisor(supervision.Supervisor):
    """The guard, the hooks on a failure, and deadlines."""

    def launched(self, rank: int, variable: str) -> None:
        guard.start(rank, variable)

    def met(self, everyone: Any, node: Any) -> None:
        failure.install_hooks(everyone, node)  # as early as possible: from here on a lost rank is a hang

    def departed(self) -> set[int]:
        return failure.departed()

    def at(self, ranks: Sequence[int]) -> str:
        return failure.at(ranks)

    def within(self, seconds: float, words: str) -> AbstractContextManager[None]:
        code = failure.HANG
        return deadline.within(seconds, code, f"{words}; the job ends with exit code {code}")

    def end_job(self, report: str, code: int) -> None:
        failure.end_job(report, code)
