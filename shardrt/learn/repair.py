"""Exercise: put a missing wait back, without giving up the overlap."""

from collections import Counter
from functools import cache
from types import ModuleType

from shardrt.device.program import Collective, HostWait, Program, Take, Work
from shardrt.learn.checking import Hint, function, need, started
from shardrt.simulate.clock import price
from shardrt.simulate.machine import Machine
from shardrt.simulate.proof import prove
from shardrt.simulate.script import record_of

TITLE = "Put a wait back"
LEVEL = "hard"
TEACHES = "a wait that is enough and costs no time"
TAKEAWAY = (
    "The writer waits for the last reader of the same slot, just before it writes. A wait for the whole "
    "stream, or on the host, is right as well, and gives away the time that two slots are there to hide."
)

_SLOWER = 1.05


@cache
def prepare() -> tuple[Program, float]:
    """The racing program, and its time."""
    programs = record_of(started("repair")["train"], ranks=2)
    return programs[0], price(programs, Machine.load("h100-8")).seconds


def check(answer: ModuleType) -> str:
    """Prove the repaired program, and price it."""
    racing, seconds = prepare()
    programs = record_of(function(answer, "train"), ranks=2)
    program = programs[0]
    host_waits = _count(program, HostWait) > _count(racing, HostWait)
    need(
        not host_waits, "The host waits: nothing is issued meanwhile. Let a stream wait for an event instead."
    )
    more = _nbytes(program) > _nbytes(racing)
    need(not more, "The program takes more memory. Two slots are enough, if a writer waits for the reader.")
    same = _work(program) == _work(racing)
    need(same, "The program does other work than the starting file. Add events and waits, nothing else.")
    for race in prove(programs).races:
        first, second = race.first, race.second
        behind = "Record an event behind the first, and let the stream of the second wait for it."
        back = "That was in order in the starting file: put the waits that were there back."
        raise Hint(
            f"There is still a race: {first.stream} {first.does} and then {second.stream} {second.does} the "
            f"same memory, {race.count} times. {behind if first.does == 'reads' else back}"
        )
    own = price(programs, Machine.load("h100-8")).seconds
    need(
        own <= _SLOWER * seconds,
        f"There is no race, but the overlap is lost: {1e3 * own:.2f} ms, {1e3 * seconds:.2f} ms with the "
        "race. Wait for the reduction of the same slot, two layers ago, just before the write.",
    )
    return (
        f"no race at any speed, the same work, and {1e3 * own:.2f} ms ({1e3 * seconds:.2f} ms with the race)."
    )


def _count(program: Program, kind: type) -> int:
    return sum(isinstance(item, kind) for item in program.items)


def _nbytes(program: Program) -> int:
    return sum(item.memory.stop - item.memory.start for item in program.items if isinstance(item, Take))


def _work(program: Program) -> Counter[tuple[str, int]]:
    work = (item for item in program.items if isinstance(item, Work | Collective))
    return Counter((getattr(item, "name", "") or item.call, item.nbytes) for item in work)
