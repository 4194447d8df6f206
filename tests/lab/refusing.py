"""Tables of what is refused."""

import re
from collections.abc import Callable

import pytest

from shardrt.comm import thread

Kinds = type[BaseException] | tuple[type[BaseException], ...]
Refusal = tuple[Callable[[], object], str] | tuple[Callable[[], object], Kinds, str]


def refusals(*table: Refusal, ranks: int = 0, everywhere: bool = False, literal: bool = False) -> Callable:
    """A test of rows (call, exception, message), or (call, message): `test_x_refuses = lab.refusals(...)`.

    The exception is a ValueError where a row has none.
    The message is a regular expression, or `literal`: words of it. ranks: each call runs on so many ranks, of
    which the first that raises is heard. everywhere: all of them must raise, with the same one line but for
    the number of the rank.
    """

    rows = [row if len(row) == 3 else (row[0], ValueError, row[1]) for row in table]

    @pytest.mark.parametrize(("call", "kind", "message"), rows, ids=[words[:60] for *_, words in rows])
    def test(call: Callable, kind: Kinds, message: str) -> None:
        pattern = re.escape(message) if literal else message
        if not everywhere:
            with pytest.raises(kind, match=pattern):
                thread.run(ranks, call) if ranks else call()
            return

        def line() -> str:
            with pytest.raises(kind, match=pattern) as raised:
                call()
            return str(raised.value)

        lines = thread.run(ranks, line)
        assert len({re.sub("rank .", "", each) for each in lines}) == 1 and "\n" not in lines[0], lines

    return test
