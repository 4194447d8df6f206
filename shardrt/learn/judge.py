"""Runs one answer and says what is wrong with it: `python -m shardrt.learn.judge MODULE FILE DESCRIPTOR`.

It is the process that `grading` starts. It writes two lines of JSON to the descriptor: BEGUN when the answer
begins to run, then the verdict.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from shardrt.learn.checking import Hint
from shardrt.untrusted import read_regular

__all__ = ["BEGUN", "LARGEST", "judge"]

BEGUN = "begun"
LARGEST = 1 << 20  # bytes of an answer


def judge(name: str, path: Path, begin: Callable[[], None] = lambda: None) -> tuple[bool, str]:
    """(True, what was checked), or (False, a hint), for the file as an answer to an exercise.

    begin: called before the first line of the answer runs.
    """
    exercise = importlib.import_module(f"shardrt.learn.{name}")
    getattr(exercise, "prepare", lambda: None)()
    answer = ModuleType("answer")
    answer.__file__ = str(path)
    sys.modules["answer"] = answer  # where dataclasses look for the module of a class
    begin()
    try:
        exec(compile(read_regular(path, LARGEST), str(path), "exec"), vars(answer))
        return True, exercise.check(answer)
    except Hint as hint:
        return False, str(hint)
    except BaseException as error:  # an answer may raise anything, SystemExit too
        return False, _raised(error, str(path))


def _raised(error: BaseException, path: str) -> str:
    """The hint for an error that an answer raised."""
    if isinstance(error, SyntaxError):
        return f"Python cannot read line {error.lineno or 1}: {error.msg}."
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, NotImplementedError) and frames:
        return f"Function {frames[-1].name} is still empty. Fill it in: its text says what it returns."
    place = f"Line {frames[-1].lineno}" if frames else "The check of your answer"
    return f"{place} raises {type(error).__name__}: {error}"


def main(name: str, path: str, descriptor: str) -> None:
    """Judge, and write the verdict."""
    with os.fdopen(int(descriptor), "w") as pipe:
        verdict = judge(name, Path(path), lambda: print(json.dumps(BEGUN), file=pipe, flush=True))
        print(json.dumps(verdict), file=pipe, flush=True)
    os._exit(0)  # threads of the answer may run for ever


if __name__ == "__main__":
    main(*sys.argv[1:])
