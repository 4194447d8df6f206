"""A training job in a process of its own, run a few steps at a time: so that several can take turns.

The process reads one JSON object a line and answers with one: {"do": "steps", "count": 3}. Its first line
says what it is. What the libraries print goes to its errors.
"""

import json
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).parents[2]
ROOM = 1.25  # of the memory that the largest contestant has taken: what must be free for one more


class Trainer(Protocol):
    """What a contestant's process serves."""

    def about(self) -> dict:
        """What it is; its first line."""

    def steps(self, count: int) -> dict:
        """Train so many steps: {"seconds": of one, "loss": of the last}.

        On a GPU also the bytes of it that are "taken" by this one, and "free" for others.
        """


class Timed:
    """Steps of a Trainer by the host's clock, from an idle GPU to an idle GPU.

    A subclass has `batch`, `train`, `_finish`, which waits for the GPU, and `_free_now`, its bytes that are
    free; `_free`: those before anything was made.
    """

    _step = 0
    _free: int

    def steps(self, count: int) -> dict:
        """See Trainer."""
        batches = [self.batch(self._step + i) for i in range(count)]
        self._finish()
        start = time.perf_counter()
        for tokens, targets in batches:
            loss = self.train(tokens, targets)
        self._finish()
        seconds = (time.perf_counter() - start) / count
        self._step += count
        free = self._free_now()
        return {"seconds": seconds, "loss": loss.item(), "taken": self._free - free, "free": free}


def serve(make: Callable[[dict], Trainer]) -> None:
    """The process: settings are its first argument, a JSON object. Ends when its input does."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    sys.stdout.reconfigure(line_buffering=True)  # and comes before the error that ends them

    def answer(values: dict) -> None:
        print(json.dumps(values), file=answers, flush=True)

    trainer = make(json.loads(sys.argv[1]))
    answer(trainer.about())
    for line in sys.stdin:
        call = json.loads(line)
        answer(getattr(trainer, call.pop("do"))(**call))


class Contestant:
    """The other end: starts the process and asks it. Raises RuntimeError with its last error."""

    def __init__(self, name: str, module: str, settings: dict, timeout: float = 240) -> None:
        self.name = name
        self._timeout = timeout
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
        )
        self._rest = b""

    def start(self) -> dict:
        """Wait until it is ready; what it says it is."""
        return self._answer()

    def ask(self, do: str, **values: Any) -> dict:
        """Its answer."""
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer will say why
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def _answer(self) -> dict:
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._process.stdout], [], [], self._timeout)
            if not ready:
                raise RuntimeError(f"{self.name}: no answer within {self._timeout:.0f} s{self._last_error()}")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                self._process.wait()
                raise RuntimeError(
                    f"{self.name}: ended with exit code {self._process.returncode}{self._last_error()}"
                )
            self._rest += piece
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        return f": {lines[-1]}" if lines else ""


@dataclass
class Course:
    """What a race has shown of one contestant. `error`: why it ended early.

    heat: 0, or, where the GPU's memory did not hold them all, which of the races one after the other.
    """

    about: dict = field(default_factory=dict)
    alone: dict = field(default_factory=dict)  # the answer to its first steps after the warm-up
    seconds: list[float] = field(default_factory=list)
    answers: list[dict] = field(default_factory=list)
    error: str = ""
    heat: int = 0

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def losses(self) -> list[float]:
        """At the end of each round."""
        return [answer["loss"] for answer in self.answers]


def race(
    entrants: dict[str, tuple[str, dict]],
    *,
    warmup: int,
    rounds: int,
    steps: int,
    last: tuple[str, ...] = (),
    entered: Callable[[str, Course], None] = lambda name, course: None,
) -> dict[str, Course]:
    """Courses by name. All are warmed up, then take turns of `steps` steps; at the end each is asked `last`.

    entrants: name -> (module, settings). One that fails is out, the others go on. entered: told of each that
    is warm and has taken a turn, before the next one starts. If the GPU has no room for one more, those that
    are warm race without it, and end; then the rest race.
    """
    left, courses, heat = dict(entrants), {}, 0
    while left:
        runners, heat = _Field(heat), heat + 1
        try:
            while left and runners.have_room():  # one after the other: each sees what memory it takes
                name = next(iter(left))
                runners.enter(name, Contestant(name, *left.pop(name)))
                runners.one(name, lambda runner, course: _warm_up(runner, course, warmup, steps))
                if not runners.courses[name].error:
                    entered(name, runners.courses[name])
            for _ in range(rounds):
                runners.everyone(lambda runner, course: _turn(runner, course, steps))
            for question in last:
                runners.everyone(lambda runner, course, q=question: course.about.update(runner.ask(q)))
        finally:
            runners.close()
        courses |= runners.courses
    return courses


class _Field:
    """Everyone's course, and the runners that are still in the race."""

    def __init__(self, heat: int) -> None:
        self.courses: dict[str, Course] = {}
        self._heat = heat
        self._runners: dict[str, Contestant] = {}

    def have_room(self) -> bool:
        """Whether one more like the largest of those that are warm has room on the GPU."""
        warm = [self.courses[name] for name in self._runners]
        if not warm:
            return True
        largest = max(course.about["warmup"].get("taken", 0) for course in warm)
        return warm[-1].alone.get("free", math.inf) >= ROOM * largest

    def enter(self, name: str, runner: Contestant) -> None:
        self.courses[name], self._runners[name] = Course(heat=self._heat), runner

    def everyone(self, work: Callable[[Contestant, Course], None]) -> None:
        for name in list(self._runners):
            self.one(name, work)

    def one(self, name: str, work: Callable[[Contestant, Course], None]) -> None:
        """A contestant that fails is out."""
        try:
            work(self._runners[name], self.courses[name])
        except (RuntimeError, ValueError, LookupError) as error:
            self.courses[name].error = str(error)
            self._runners.pop(name).close()

    def close(self) -> None:
        for runner in self._runners.values():
            runner.close()


def _warm_up(runner: Contestant, course: Course, warmup: int, steps: int) -> None:
    course.about = runner.start() | {"warmup": runner.ask("steps", count=warmup)}
    course.alone = runner.ask("steps", count=steps)


def _turn(runner: Contestant, course: Course, steps: int) -> None:
    answer = runner.ask("steps", count=steps)
    course.seconds.append(answer["seconds"])
    course.answers.append(answer)
