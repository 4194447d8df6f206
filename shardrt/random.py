"""Seeds. Every random number is a function of a seed and of what it is for; no generator is carried along.

A parameter's initial values depend on (seed, its name, element), a dropout mask on (seed, step, which
dropout of the step, element of the global batch). So there is nothing to save, and the numbers are the
same at every world size. Where a step goes through the model in micro-batches that are shared among the ranks
(fsdp.set_world_invariant), "the step" is a turn, in which each rank has the micro-batch whose number is set
here.
"""

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager


class _State(threading.local):
    def __init__(self) -> None:
        self.seed = 0
        self.step = 0
        self.calls = 0
        self.micro_batch: int | None = None
        self.rewound = False


_state = _State()


def manual_seed(seed: int, step: int = 0) -> None:
    """Set this thread's seed, a non-negative integer, and the step that dropout masks belong to.

    Raises ValueError for a negative seed or step.
    """
    if seed < 0 or step < 0:
        raise ValueError(f"manual_seed: seed and step must not be negative, got {seed} and {step}")
    _state.seed, _state.step, _state.calls, _state.micro_batch = seed, step, 0, None


def initial_seed() -> int:
    """The seed in force."""
    return _state.seed


def next_call() -> tuple[int, int]:
    """(seed, call): the key of one use of random numbers, another one each time."""
    key = upcoming()
    _state.calls += 1
    return key


def restore(earlier: tuple[int, int, int, int | None]) -> None:
    """Go on from where this thread stood when `state()` was `earlier`."""
    _state.seed, _state.step, _state.calls, _state.micro_batch = earlier


def upcoming() -> tuple[int, int]:
    """What `next_call` would give."""
    return _state.seed, (_state.step << 20) + _state.calls + 1


def rewound() -> bool:
    """Whether numbers are given out again (`at`)."""
    return _state.rewound


def calls() -> int:
    """Uses of random numbers in the step so far."""
    return _state.calls


def micro_batch() -> int | None:
    """Which micro-batch of the step is computed; None where the ranks' parts are in the order of ranks."""
    return _state.micro_batch


def begin_micro_batch(number: int, calls: int) -> None:
    """Micro-batch `number` of the step follows, and uses random numbers from use `calls` of the step on."""
    _state.micro_batch, _state.calls = number, calls


def end_micro_batch() -> None:
    """What follows belongs to no micro-batch."""
    _state.micro_batch = None


def state() -> tuple[int, int, int, int | None]:
    """Where this thread stands: (seed, step, uses of random numbers in it, micro-batch)."""
    return _state.seed, _state.step, _state.calls, _state.micro_batch


@contextmanager
def at(earlier: tuple[int, int, int, int | None]) -> Iterator[None]:
    """Inside a with block, give out again the numbers that followed when `state()` was `earlier`."""
    before, was_rewound = state(), _state.rewound
    restore(earlier)
    _state.rewound = True
    try:
        yield
    finally:
        restore(before)
        _state.rewound = was_rewound


def name_key(name: str) -> int:
    """A 64-bit number for a parameter's name; unlike hash() it is the same in every process."""
    data = name.encode()
    return zlib.crc32(data) << 32 | zlib.crc32(data[::-1] + b"shardrt")
