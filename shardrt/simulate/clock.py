"""When everything of a program runs, on a machine: an event-driven simulation of hosts, streams and links.

    timing = price([program], Machine.load("h100-8"))
    timing.steps[0][-1], timing.split(0), timing.exposed(0)

- The host goes through its program; each item costs it time, and it stops where it waits. What the machine
  says the host does itself (`host_streams`, and items of the host) then stops it until it is done.
- A stream runs its items in order, each when it has been submitted; one that waits runs nothing.
- A kernel takes the longer of its computing and its moving of bytes, and a constant. Copies between host and
  device go over the link between them.
- A collective begins when the last recorded rank of its group has come to it (others are taken to come
  together with it), and ends for all at once. A message leaves with its sender, whose stream it keeps; one of
  more bytes than the machine's `eager` leaves when its receiver has come too, unless it is sent in a group.
- What runs at the same time shares: an item alone uses a part of each resource of its rank (processor,
  memory, links). Where the parts on a resource are more than the whole, all that use it slow down by as much;
  an item goes at the pace of its scarcest resource.

Ranks that were not recorded, and what they take of a node's memory and links, are not simulated: the figures
of a machine are those of a rank while all of its node are busy.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from statistics import NormalDist

from shardrt.device.program import (
    HOST,
    Collective,
    Free,
    HostRead,
    HostWait,
    Item,
    Program,
    Record,
    Step,
    Take,
    Wait,
    Work,
)
from shardrt.simulate.links import Transfer, transfer
from shardrt.simulate.machine import Machine, Processor
from shardrt.simulate.timing import Timing

__all__ = ["price"]

_NOTHING = 1e-12  # seconds; what takes no longer takes no time


def price(programs: Sequence[Program], machine: Machine, jitter: float = 0.0) -> Timing:
    """Run the programs of some ranks on a machine.

    What dies from now on adds nothing to the programs: they are copied.

    Args:
        jitter: by how many seconds ranks come earlier or later to a collective, as a standard deviation; each
            then waits for the last (`lateness`).

    Raises:
        ValueError: if programs wait for each other for ever, or for a mark that no program records.
    """
    copied = [
        Program(each.rank, each.world_size, list(each.items), each.groups, each.alike) for each in programs
    ]
    return _Clock(copied, machine, jitter).run()


def lateness(ranks: int) -> float:
    """By how many standard deviations the last of some ranks comes after the mean, as is to be expected.

    Of independent and normal times; by Blom (1958): the quantile (ranks - 0.375) / (ranks + 0.25). It is 0.59
    of 2 (0.56 is exact), 3.25 of 1,024 and 4.0 of 16,384.
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


@dataclass(eq=False)
class _Lane:
    """What runs items in order: a stream, or the host."""

    number: int
    name: str
    items: Sequence[Item]
    began: list[float]  # of all items of the rank
    ended: list[float]
    queue: deque[tuple[int, float]] = field(default_factory=deque)  # item, when it had been submitted
    busy: bool = False
    since: float | None = None  # waits since then
    woken: float | None = None  # when it will be


@dataclass(eq=False)
class _Host(_Lane):
    next: int = 0
    time: float = 0.0  # how far it is; submitting runs ahead of `now`
    paid: int = -1  # the item whose issuing it has spent its time on


@dataclass(eq=False)
class _Run:
    """An item that runs, of one lane or of all that met; left: seconds that it would take alone."""

    lanes: list[tuple[_Lane, int]]
    left: float
    uses: dict[Hashable, float]  # resource -> the part of it that it would use alone, never more than all
    then: Hashable = None  # what has come true when it ends
    speed: float = 1.0


Cost = tuple[float, dict[Hashable, float]]  # seconds alone, and what is used

_PASSED = frozenset({Take, Free, Step})  # by the host, in no time


class _Clock:
    def __init__(self, programs: Sequence[Program], machine: Machine, jitter: float = 0.0) -> None:
        self.machine, self.programs, self.jitter = machine, programs, jitter
        self.timing = Timing(programs)
        self.hosts = []
        for number, program in enumerate(programs):
            began, ended = ([0.0] * len(program.items) for _ in range(2))
            self.timing.began.append(began)
            self.timing.ended.append(ended)
            self.hosts.append(_Host(number, HOST, program.items, began, ended))
        self.ranks = {program.rank: number for number, program in enumerate(programs)}
        self.own = {HOST, *machine.host_streams}
        self.lanes: dict[tuple[int, str], _Lane] = {}
        self.kernels: dict[Hashable, Cost] = {}  # models repeat theirs
        self.transfers: dict[Hashable, Transfer] = {}
        self.recorded: dict[Sequence[int], int] = {}  # how many of a group's ranks are
        self.now = 0.0
        self.wakes: list[tuple[float, int, _Lane]] = []
        self.order = count()  # of what happens at one time
        self.running: list[_Run] = []
        self.changed = False  # what runs, since their shares were made
        self.true: set[Hashable] = set()  # marks that were reached, messages that came
        self.waiting: dict[Hashable, dict[_Lane, None]] = defaultdict(dict)
        self.met: dict[Hashable, list[tuple[_Lane, int]]] = defaultdict(list)
        self.receiving: dict[Hashable, tuple[_Lane, int]] = {}
        self.ready: deque[_Lane] = deque(self.hosts)

    def run(self) -> Timing:
        while True:
            while self.ready:
                lane = self.ready.popleft()
                if isinstance(lane, _Host):
                    self._host(lane)
                else:
                    self._stream(lane)
            if self.changed:
                self._share()
            time = self.wakes[0][0] if self.wakes else inf
            for run in self.running:
                time = min(time, self.now + run.left / run.speed)
            if time == inf:
                break
            self._pass(time)
        stuck = [host for host in self.hosts if host.next < len(host.items)]
        if stuck := [*stuck, *(lane for lane in self.lanes.values() if lane.queue)]:
            places = (
                f"rank {self.programs[lane.number].rank}, {lane.name}, item {self._next(lane)}"
                for lane in stuck
            )
            raise ValueError(f"the recorded programs deadlock: {'; '.join(places)}")
        return self.timing

    def _pass(self, time: float) -> None:
        """Let time go on; what ends then ends."""
        nothing, ended = _NOTHING + 1e-15 * time, []  # what rounding may leave
        for run in self.running:
            run.left -= (time - self.now) * run.speed
            if run.left <= nothing:
                ended.append(run)
        self.now = time
        while self.wakes and self.wakes[0][0] <= time:
            lane = heappop(self.wakes)[2]
            lane.woken = None
            self.ready.append(lane)
        for run in ended:
            self.running.remove(run)
            for lane, index in run.lanes:
                lane.busy = False
                self._done(lane, index)
            self._come(run.then)
            self.changed = True

    def _share(self) -> None:
        """Say how fast each item goes from now on."""
        self.changed = False
        load: dict[Hashable, float] = {}
        for run in self.running:
            for resource, part in run.uses.items():
                load[resource] = load.get(resource, 0.0) + part
        for run in self.running:
            slowest = 1.0
            for resource in run.uses:
                if load[resource] > slowest:
                    slowest = load[resource]
            run.speed = 1 / slowest

    # -- lanes

    def _host(self, host: _Host) -> None:
        """Submit what comes, up to something that the host itself does or waits for."""
        item_cost, launch_cost = self.machine.host.item, self.machine.host.launch
        items, began, ended = host.items, host.began, host.ended
        while host.next < len(items) and not host.busy:
            index, item = host.next, items[host.next]
            if type(item) in _PASSED:
                began[index] = ended[index] = host.time
                host.next += 1
                continue
            stream = getattr(item, "stream", HOST) or HOST
            if stream != HOST and host.paid != index:
                host.paid = index
                host.time += item_cost + launch_cost * getattr(item, "launches", 0)
            if stream not in self.own:
                lane = self._lane(host, stream)
                lane.queue.append((index, host.time))
                if len(lane.queue) == 1:  # else it runs, waits, or will be woken
                    self.ready.append(lane)
                host.next += 1
            elif host.time > self.now:
                return self._wake(host.time, host)
            elif not self._execute(host, index):
                return None
        return None

    def _stream(self, lane: _Lane) -> None:
        while lane.queue and not lane.busy:
            index, submitted = lane.queue[0]
            if submitted > self.now:
                return self._wake(submitted, lane)
            if not self._execute(lane, index):
                return None
        return None

    def _lane(self, host: _Host, stream: str) -> _Lane:
        lane = self.lanes.get((host.number, stream))
        if lane is None:
            lane = _Lane(host.number, stream, host.items, host.began, host.ended)
            self.lanes[host.number, stream] = lane
        return lane

    def _next(self, lane: _Lane) -> int:
        return lane.next if isinstance(lane, _Host) else lane.queue[0][0]

    def _wake(self, time: float, lane: _Lane) -> None:
        if lane.woken != time:  # once is enough
            lane.woken = time
            heappush(self.wakes, (time, next(self.order), lane))

    def _done(self, lane: _Lane, index: int) -> None:
        """The lane's item has ended now."""
        lane.ended[index] = self.now
        lane.since = None
        if isinstance(lane, _Host):
            lane.next, lane.time = index + 1, self.now
        else:
            lane.queue.popleft()
        self.ready.append(lane)

    # -- items

    def _execute(self, lane: _Lane, index: int) -> bool:
        """Do the next item of a lane; whether it is done now."""
        item = lane.items[index]
        kind = type(item)
        if lane.since is None:
            lane.since = lane.began[index] = self.now
        if kind is Work:
            seconds, uses = self._cost(lane, index, item)
            if seconds > _NOTHING:
                self._start([(lane, index)], seconds, uses)
                return False
        elif kind is Wait or kind is HostWait:
            if not self._has_come(lane, (lane.number, item.mark)):
                return False
        elif kind is Collective:
            if not self._collective(lane, index, item):
                return False
        elif kind is HostRead:
            seconds = self._touching(item)
            if seconds > _NOTHING:
                self._start([(lane, index)], seconds, {})
                return False
        elif kind is not Record:
            raise ValueError(f"price: {kind.__name__} is not an item of a stream")
        self._done(lane, index)
        if kind is Record:
            self._come((lane.number, item.mark))
        return True

    def _has_come(self, lane: _Lane, what: Hashable) -> bool:
        if what not in self.true:
            self.waiting[what][lane] = None
        return what in self.true

    def _come(self, what: Hashable) -> None:
        if what is not None:
            self.true.add(what)
            self.ready.extend(self.waiting.pop(what, ()))

    def _collective(self, lane: _Lane, index: int, item: Collective) -> bool:
        """Begin it when all have come; whether it is done already."""
        program = self.programs[lane.number]
        ranks = program.groups[item.group].ranks
        if item.peer >= 0:
            return self._message(lane, index, item, ranks[item.peer])
        key = item.group, ranks, item.number
        self.met[key].append((lane, index))
        lane.busy = True
        if ranks not in self.recorded:
            self.recorded[ranks] = sum(rank in ranks for rank in self.ranks)
        if len(self.met[key]) == self.recorded[ranks]:
            self._move(self.met.pop(key), item, ranks)
        return False

    def _message(self, lane: _Lane, index: int, item: Collective, there: int) -> bool:
        """As `_collective`, with a rank that may not be recorded: it comes at once."""
        here = self.programs[lane.number].rank
        ends = (here, there) if item.call == "send" else (there, here)
        key, own = (item.group, ends, item.number), (lane, index)
        if there not in self.ranks:
            self._move([own], item, sorted(ends))
        elif item.call == "recv":
            if key not in self.met:
                self.receiving[key] = own
                return self._has_come(lane, key)
            self._move([*self.met.pop(key), own], item, sorted(ends))
        elif item.nbytes <= self.machine.collectives.eager or item.grouped:
            self._move([own], item, sorted(ends), key)
        elif key in self.receiving:
            receiver = self.receiving.pop(key)
            self.waiting.pop(key)
            self._move([own, receiver], item, sorted(ends))
        else:
            self.met[key].append(own)
            lane.busy = True
        return False

    def _move(
        self,
        lanes: list[tuple[_Lane, int]],
        item: Collective,
        ranks: Sequence[int],
        key: Hashable = None,
    ) -> None:
        """Begin a collective or a message, whose sender is the first; `key` has come when it ends."""
        each = [self._transfer(lane.items[index], ranks, lane.number) for lane, index in lanes]
        found, uses = max(each, key=lambda one: one.seconds), {}
        memory = found.sent * self.machine.collectives.memory / self.machine.device.bandwidth
        seconds = max(found.seconds, memory, _NOTHING)
        if self.jitter and item.peer < 0:
            seconds += self.jitter * lateness(len(ranks))
        parts = {"node": found.node, "network": found.network, "memory": memory}
        for lane, index in lanes:
            lane.began[index] = self.now
            for name, part in parts.items():
                if part and (item.peer < 0 or lane is lanes[0][0] or name == "memory"):
                    uses[lane.number, name] = part / seconds
            if share := self.machine.collectives.processor:
                uses[lane.number, "processor"] = share
        self._start(lanes, seconds, uses, key)

    def _transfer(self, item: Collective, ranks: Sequence[int], number: int) -> Transfer:
        """What a collective takes the links of a recorded rank."""
        of = self.programs[number].rank if item.parts else 0
        what = item.call, item.nbytes, tuple(ranks) if isinstance(ranks, list) else ranks, of, item.parts
        if what not in self.transfers:
            self.transfers[what] = transfer(self.machine, item.call, item.nbytes, ranks, of, item.parts)
        return self.transfers[what]

    def _start(
        self,
        lanes: list[tuple[_Lane, int]],
        seconds: float,
        uses: dict[Hashable, float],
        then: Hashable = None,
    ) -> None:
        for lane, _ in lanes:
            lane.busy = True
        self.running.append(_Run(lanes, seconds, uses, then))
        self.changed = True

    def _cost(self, lane: _Lane, index: int, work: Work) -> Cost:
        """Seconds of a kernel or a copy alone, and which part of its rank's resources it uses."""
        machine, number = self.machine, lane.number
        if machine.host_link is not None and (way := self.timing.copies[number].get(index)):
            direction, nbytes = way
            moving = nbytes / machine.host_link.bandwidth
            seconds = machine.host_link.latency + moving
            return seconds, {(number, direction): moving / seconds}
        own = work.stream == HOST and machine.host_processor is not None
        key = own, number, work.name, work.flops, work.nbytes, work.launches, work.sizes, work.dtype
        if key not in self.kernels:
            processor, of = (machine.host_processor, "host ") if own else (machine.device, "")
            self.kernels[key] = _kernel(processor, work, number, of)
        return self.kernels[key]

    def _touching(self, item: HostRead) -> float:
        """Seconds in which the host itself reads."""
        processor = self.machine.host_processor
        nbytes = sum(each.stop - each.start for each in item.reads)
        return self.machine.host.touch + (nbytes / processor.bandwidth if processor is not None else 0.0)


def _kernel(processor: Processor, work: Work, number: int, of: str) -> Cost:
    computing, moving = processor.demands(work)
    seconds = max(computing, moving) + processor.constant * work.launches
    if not seconds:
        return 0.0, {}
    busy = seconds if processor.whole else computing
    parts = {(number, f"{of}processor"): busy / seconds, (number, f"{of}memory"): moving / seconds}
    return seconds, {resource: part for resource, part in parts.items() if part}
