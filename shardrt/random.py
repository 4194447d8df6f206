"""Seeds. Every random number is a function of a seed and of what it is for; no generator is carried along.

A parameter's initial values depend on (seed, its name, element), a dropout mask on (seed, step, which call of
the model in the step, name of the innermost module, which use by that module in the call, element of the
global batch). So there is nothing to save, the numbers are the same at every world size, and a process that
has some layers of a model draws the masks that they have in the whole one. Where a step goes through the
model in micro-batches that are shared among the ranks (fsdp.set_world_invariant), "the step" is a round, in
which each rank has the micro-batch whose number is set here.
"""

import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd

State = tuple[int, int, int, bool, dict[str, int], int | None, dict[str, int]]


@dataclass(frozen=True)
class Block:
    """What a rank has of a tensor of the whole batch: of part `part`, along time some of `count` blocks.

    Batch parts are all of one size, as are blocks; time is the axis before the last. indices: which blocks,
    in the order in which they lie one behind the other.
    """

    part: int
    indices: tuple[int, ...] = (0,)
    count: int = 1

    @property
    def together(self) -> int:
        """How many ranks have blocks of the same part."""
        return self.count // len(self.indices)

    def cut(self, index: int, count: int) -> "Block":
        """Of these blocks together, equal part `index` of `count` along time."""
        finer = count // gcd(count, len(self.indices))
        every = [finer * place + piece for place in self.indices for piece in range(finer)]
        each = len(every) // count
        return Block(self.part, tuple(every[index * each : (index + 1) * each]), finer * self.count)


class _State(threading.local):
    def __init__(self) -> None:
        self.seed = 0
        self.step = 0
        self.calls = 0  # of the model in the step, that have used random numbers
        self.new_call = True  # the next use is the first of a call
        self.uses: dict[str, int] = {}  # in the latest call, by name of the module
        self.elsewhere: dict[str, int] = {}  # in the parts of the next call that other ranks have computed
        self.micro_batch: int | None = None
        self.turn: int | None = None
        self.rewound = False


_state = _State()


def manual_seed(seed: int, step: int = 0) -> None:
    """Set this thread's seed, a non-negative integer, and the step that dropout masks belong to.

    Raises ValueError for a negative seed or step.
    """
    if seed < 0 or step < 0:
        raise ValueError(f"manual_seed: seed and step must not be negative, got {seed} and {step}")
    restore((seed, step, 0, True, {}, None, {}))


def initial_seed() -> int:
    """The seed in force."""
    return _state.seed


def call_begins() -> None:
    """The outermost module is called: what it uses first begins a call."""
    _state.new_call = True


def begin_call(number: int, uses: Mapping[str, int] | None = None) -> None:
    """The call of the model that follows is that number of the step, from 0.

    For a model that is called in parts: each part of a call draws the numbers of that call. uses: those of
    modules in the parts before, by name.
    """
    _state.calls, _state.elsewhere = number, dict(uses or {})


def uses() -> dict[str, int]:
    """How often modules have used random numbers in this call, in the parts before as well, by name."""
    return dict(_state.elsewhere if _state.new_call else _state.uses)


def next_call() -> None:
    """Go on to the next call of the model, which uses random numbers."""
    _state.calls, _state.new_call, _state.uses = _state.calls + 1, False, dict(_state.elsewhere)


def draw(module: str | None) -> tuple[int, int, int]:
    """(seed, call, use) of one use of random numbers by the module of this name, another one each time.

    Its numbers are those of (seed, (call + use) % 2**64). Outside of all modules (None) a use is a call.
    """
    if _state.new_call or module is None:
        next_call()
    name = module or ""
    number = _state.uses[name] = _state.uses.get(name, 0) + 1
    return _state.seed, (_state.step << 20) + _state.calls, name_key(f"{name} {number}")


def upcoming() -> tuple[int, int]:
    """(seed, call) of the next call."""
    return _state.seed, (_state.step << 20) + _state.calls + 1


def restore(earlier: State) -> None:
    """Go on from where this thread stood when `state()` was `earlier`."""
    _state.seed, _state.step, _state.calls, _state.new_call, uses, _state.micro_batch, elsewhere = earlier
    _state.uses, _state.elsewhere = dict(uses), elsewhere


def rewound() -> bool:
    """Whether numbers are given out again (`at`)."""
    return _state.rewound


def calls() -> int:
    """How many calls of the model in the step have used random numbers."""
    return _state.calls


def micro_batch() -> int | None:
    """Which micro-batch of the step is computed; None where the ranks' parts are in the order of ranks."""
    return _state.micro_batch


def turn() -> int | None:
    """Which of this rank's micro-batches is computed, if that is not to be seen from what is done."""
    return _state.turn


def begin_turn(number: int | None) -> None:
    """What follows is of that one, from 0: forwards of several come before the backward of the first."""
    _state.turn = number


def begin_micro_batch(number: int, calls: int) -> None:
    """Micro-batch `number` of the step follows, and uses random numbers as if `calls` calls had been."""
    _state.micro_batch, _state.calls = number, calls


def end_micro_batch() -> None:
    """What follows belongs to no micro-batch."""
    _state.micro_batch = None


def state() -> State:
    """Where this thread stands, for `restore` and `at`."""
    here = _state
    uses = dict(here.uses)
    return here.seed, here.step, here.calls, here.new_call, uses, here.micro_batch, here.elsewhere


@contextmanager
def at(earlier: State) -> Iterator[None]:
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
