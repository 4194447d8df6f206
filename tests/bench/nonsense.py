"""How a benchmark is to answer options that make no sense."""

import pytest


def assert_refused(main, words, message, capsys):
    """`main(words)` ends with exit code 2 and one line that holds `message`."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
