"""Ranks as threads of this process, and what ranks that are processes print. tests/ranks.py starts these."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

from shardrt.comm import thread
from tests.ranks import mpirun


def on_ranks(*sizes: int) -> Callable[[Callable], Callable]:
    """The body of the test runs on so many ranks at once, and passes where it does on each.

    Several sizes: the test runs once for each of them, which it may have as its argument `ranks`.
    """

    def decorate(test: Callable) -> Callable:
        signature = inspect.signature(test)
        asked = "ranks" in signature.parameters

        @wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            size = sizes[0] if len(sizes) == 1 else kwargs["ranks"] if asked else kwargs.pop("ranks")
            thread.run(size, test, *args, **kwargs)

        if len(sizes) == 1:
            return run
        if not asked:
            extra = inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)
            run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), extra])
        return pytest.mark.parametrize("ranks", sizes)(run)

    return decorate


def first(ranks: int, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """What `function` gives on rank 0 of so many; `thread.run` has that of all ranks."""
    return thread.run(ranks, function, *args, **kwargs)[0]


def printed(size: int, *args: str, **variables: str) -> list[str]:
    """The lines that `python *args` prints on so many processes under mpirun, which must end well."""
    done = mpirun(size, list(args), **variables)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout.splitlines()
