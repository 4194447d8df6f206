"""Twelve exercises, graded by the project's own tools: `shardrt learn`.

A module here is an exercise. The file of its name in start/ is the one to start from; its docstring is the
text of the exercise. `check(answer)` takes the module that a reader has written. It returns a sentence about
what was checked, or raises Hint. `prepare()`, where there is one, runs before the answer, whose time is
limited.
"""

__all__ = ["EXERCISES"]

EXERCISES = (  # in order of difficulty
    "traffic",
    "memory",
    "collectives",
    "clipping",
    "loop",
    "accumulation",
    "schedule",
    "waits",
    "repair",
    "tensor_parallel",
    "hybrid",
    "lion",
)
