"""Random numbers. Each number is a function of a seed and of its purpose; there is no generator state.

    initial value of a parameter   seed, name, element
    dropout mask                   seed, step, number of the model's call in the step, name of the innermost
                                   module, number of the module's use in the call, element of the global batch

So no state has to be saved, and numbers are the same at every world size. A process that holds only some
layers of a model draws the same masks as the whole model.

With fsdp.set_world_invariant, ranks share the micro-batches of a step. Each rank then sets the number of its
micro-batch here. Elements have the numbers that they have in this part of a global batch.
"""

import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd

__all__ = [
    "Block",
    "at",
    "begin_call",
    "begin_micro_batch",
    "begin_turn",
    "call_begins",
    "calls",
    "draw",
    "end_micro_batch",
    "initial_seed",
    "manual_seed",
    "micro_batch",
    "name_key",
    "next_call",
    "restore",
    "rewound",
    "state",
    "turn",
    "upcoming",
    "uses",
]

State = tuple[int, int, int, bool, dict[str, int], int | None, dict[str, int]]


@dataclass(frozen=True)
class Block:
    """The part of a global batch's tensor that a rank has.

    The batch is split into equal parts, and the time axis (the one before the last) into `count` equal
    blocks.

    Attributes:
        part: index of the batch part.
        indices: the rank's blocks along time, in the order in which they lie in its tensor.
    """

    part: int
    indices: tuple[int, ...] = (0,)
    count: int = 1

    @property
    def together(self) -> int:
        """Number of ranks that have blocks of the same batch part."""
        return self.count // len(self.indices)

    def cut(self, index: int, count: int) -> "Block":
        """Split these blocks into `count` equal parts along time; gives part `index`."""
        finer = count // gcd(count, len(self.indices))
        every = [finer * place + piece for place in self.indices for piece in range(finer)]
        each = len(every) // count
        return Block(self.part, tuple(every[index * each : (index + 1) * each]), finer * self.count)


class _State(threading.local):
    def __init__(self) -> None:
        self.seed = 0
        self.step = 0
        self.calls = 0  # calls of the model in this step that have used random numbers
        self.new_call = True  # the next use is the first of a call
        self.uses: dict[str, int] = {}  # name of a module -> its uses in the latest call
        self.elsewhere: dict[str, int] = {}  # uses in the parts of the next call that other ranks computed
        self.micro_batch: int | None = None
        self.turn: int | None = None
        self.rewound = False


_state = _State()


def manual_seed(seed: int, step: int = 0) -> None:
    """Set this thread's seed and the step that dropout masks belong to.

    Args:
        seed: a non-negative integer.
        step: number of the training step.

    Raises:
        ValueError: for a negative seed or step.

    Example:
        >>> from shardrt import manual_seed, nn
        >>> manual_seed(0)
        >>> first = nn.Linear(8, 8).weight.numpy()
        >>> manual_seed(0)
        >>> bool((nn.Linear(8, 8).weight.numpy() == first).all())
        True
    """
    if seed < 0 or step < 0:
        raise ValueError(f"manual_seed: seed and step must not be negative, got {seed} and {step}")
    restore((seed, step, 0, True, {}, None, {}))


def initial_seed() -> int:
    """The present seed of this thread."""
    return _state.seed


def call_begins() -> None:
    """Note that the outermost module is called. The next use of random numbers begins a new call."""
    _state.new_call = True


def begin_call(number: int, uses: Mapping[str, int] | None = None) -> None:
    """Set the number of the model's next call in the step, from 0.

    It serves models that run in parts (pipeline stages): each part of a call draws the numbers of that call.

    Args:
        uses: name of a module -> its uses in the parts before.
    """
    _state.calls, _state.elsewhere = number, dict(uses or {})


def uses() -> dict[str, int]:
    """Name of a module -> its uses of random numbers in this call, including the parts before."""
    return dict(_state.elsewhere if _state.new_call else _state.uses)


def next_call() -> None:
    """Begin the next call of the model that uses random numbers."""
    _state.calls, _state.new_call, _state.uses = _state.calls + 1, False, dict(_state.elsewhere)


def draw(module: str | None) -> tuple[int, int, int]:
    """(seed, call, use) of the next use of random numbers by the module of this name.

    The use draws the numbers of (seed, (call + use) % 2**64). Outside of all modules (None), each use is a
    call of its own.
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
    """Continue from the state of this thread at which `state()` returned `earlier`."""
    _state.seed, _state.step, _state.calls, _state.new_call, uses, _state.micro_batch, elsewhere = earlier
    _state.uses, _state.elsewhere = dict(uses), elsewhere


def rewound() -> bool:
    """Whether earlier numbers are drawn again (see `at`)."""
    return _state.rewound


def calls() -> int:
    """Number of calls of the model in this step that have used random numbers."""
    return _state.calls


def micro_batch() -> int | None:
    """Number of the present micro-batch in the step; None if the ranks' parts follow the order of ranks."""
    return _state.micro_batch


def turn() -> int | None:
    """Which of this rank's micro-batches is computed, if begin_turn has set it, else None."""
    return _state.turn


def begin_turn(number: int | None) -> None:
    """Set which of this rank's micro-batches follows, from 0; None: unknown.

    A pipeline needs this: it runs several forwards before the first backward, so the number of finished
    backwards does not give it.
    """
    _state.turn = number


def begin_micro_batch(number: int, calls: int) -> None:
    """Begin micro-batch `number` of the step; it draws random numbers as if `calls` calls had preceded."""
    _state.micro_batch, _state.calls = number, calls


def end_micro_batch() -> None:
    """End the micro-batch: later numbers belong to none."""
    _state.micro_batch = None


def state() -> State:
    """The state of this thread's random numbers, for `restore` and `at`."""
    here = _state
    uses = dict(here.uses)
    return here.seed, here.step, here.calls, here.new_call, uses, here.micro_batch, here.elsewhere


@contextmanager
def at(earlier: State) -> Iterator[None]:
    """Inside a with block, draw again the numbers that followed when `state()` returned `earlier`."""
    before, was_rewound = state(), _state.rewound
    restore(earlier)
    _state.rewound = True
    try:
        yield
    finally:
        restore(before)
        _state.rewound = was_rewound


def name_key(name: str) -> int:
    """A 64-bit hash of a parameter's name. Unlike hash(), it is the same in every process."""
    data = name.encode()
    return zlib.crc32(data) << 32 | zlib.crc32(data[::-1] + b"shardrt")
