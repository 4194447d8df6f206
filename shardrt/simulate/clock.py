"""When everything of a program runs, on a machine: an event-driven simulation of hosts, streams and links.

    timing = price([program], Machine.load("h100-8"))
    timing.steps[0][-1], timing.split(0), timing.exposed(0)

- The host goes through its program; each item costs it time, and it stops where it waits. What the machine
  says the host does itself (`host_streams`, and items of the host) stops it until it is done.
- A stream runs its items in order, each when it has been submitted; one that waits runs nothing.
- A kernel takes the longer of its computing and its moving of bytes, and a constant. Copies between host and
  device go over the link between them.
- A collective begins when the last recorded rank of its group has come to it (others are taken to come
  together with it), and ends for all at once. A message leaves with its sender, whose stream it keeps.
- What runs at the same time shares: an item alone uses a part of each resource of its rank (processor,
  memory, links). Where the parts on a resource are more than the whole, all that use it slow down by as much;
  an item goes at the pace of its scarcest resource.

Ranks that were not recorded, and what they take of a node's memory and links, are not simulated: the figures
of a machine are those of a rank while all of its node are busy.
"""

from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, count, islice, pairwise

from shardrt.device.program import (
    HOST,
    Collective,
    Free,
    HostRead,
    HostWait,
    HostWrite,
    Item,
    Program,
    Range,
    Record,
    Step,
    Take,
    Wait,
    Work,
)
from shardrt.device.timeline import Passed, Recording, Span
from shardrt.simulate.links import Transfer, transfer
from shardrt.simulate.machine import Machine, Processor

_NOTHING = 1e-12  # seconds; what takes no longer takes no time


@dataclass
class Timing:
    """What ran when, in seconds from the start; each list lies as the programs.

    recordings: as a run's that is traced, so that traces and their pictures are made of them alike.
    ended: by item, when it was done; where nothing runs (a Take, a Step), when the host passed it.
    """

    programs: Sequence[Program]
    recordings: list[Recording] = field(default_factory=list)
    began: list[list[float]] = field(default_factory=list)
    ended: list[list[float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """When the last of all ranks has ended."""
        return max((max(ended, default=0.0) for ended in self.ended), default=0.0)

    @property
    def steps(self) -> list[list[float]]:
        """Of each program, the seconds of each of its optimizer steps, to the end of all that it issued."""
        found = []
        for ended, program in zip(self.ended, self.programs, strict=True):
            ends = [0.0] + [max(ended[:end], default=0.0) for _, end in _steps(program)]
            found.append([after - before for before, after in pairwise(ends)])
        return found

    def split(self, number: int, step: int = -1) -> dict[str, float]:
        """Seconds for which each stream of a program was busy with what a step issued; "host" with waits."""
        found: dict[str, float] = defaultdict(float)
        for index, item in self.items_of(number, step):
            if not isinstance(item, Wait | Record):
                found[getattr(item, "stream", HOST) or HOST] += (
                    self.ended[number][index] - self.began[number][index]
                )
        return dict(found)

    def exposed(self, number: int, step: int = -1) -> dict[str, float]:
        """Seconds of a step's collectives and messages, by label, in which no kernel of the rank ran.

        "" is that of all together: of what runs at the same time once.
        """
        working, moving = [], defaultdict(list)
        for index, item in self.items_of(number, step):
            span = self.began[number][index], self.ended[number][index]
            if isinstance(item, Work):
                working.append(span)
            elif isinstance(item, Collective):
                moving[_label(item)].append(span)
        hidden = _joined(working)
        found = {label: _beyond(_joined(spans), hidden) for label, spans in moving.items()}
        return {"": _beyond(_joined([s for spans in moving.values() for s in spans]), hidden)} | found

    def window(self, number: int, step: int = -1) -> tuple[float, float]:
        """When a step of a program begins and ends, as `steps` counts it."""
        ends = [0.0, *accumulate(self.steps[number])]
        return tuple(list(pairwise(ends))[step])

    def items_of(self, number: int, step: int = -1) -> list[tuple[int, Item]]:
        """The items of a step with their places; all, where no step ended."""
        program = self.programs[number]
        begin, end = (_steps(program) or [(0, len(program.items))])[step]
        return list(enumerate(islice(program.items, begin, end), begin))


def price(programs: Sequence[Program], machine: Machine) -> Timing:
    """Run the programs of some ranks on a machine.

    What dies from now on adds nothing to them: they are copied. Raises ValueError where they wait for each
    other for ever, or for a mark that nobody records.
    """
    copied = [Program(each.rank, each.world_size, list(each.items), each.groups) for each in programs]
    return _Clock(copied, machine).run()


@dataclass(eq=False)
class _Lane:
    """What runs items in order: a stream, or the host."""

    number: int
    name: str
    queue: deque[tuple[int, float]] = field(default_factory=deque)  # item, when it had been submitted
    busy: bool = False
    since: float | None = None  # waits since then
    woken: float | None = None  # when it will be


@dataclass(eq=False)
class _Host(_Lane):
    next: int = 0
    time: float = 0.0  # how far it is; submitting runs ahead of `now`


@dataclass(eq=False)
class _Run:
    """An item that runs, of one lane or of all that met; left: seconds that it would take alone."""

    lanes: list[tuple[_Lane, int]]
    left: float
    uses: dict[Hashable, float]  # resource -> the part of it that it would use alone
    then: Hashable = None  # what has come true when it ends
    speed: float = 1.0


class _Clock:
    def __init__(self, programs: Sequence[Program], machine: Machine) -> None:
        self.machine, self.programs = machine, programs
        self.timing = Timing(programs)
        for program in programs:
            self.timing.recordings.append(Recording())
            self.timing.began.append([0.0] * len(program.items))
            self.timing.ended.append([0.0] * len(program.items))
        self.ranks = {program.rank: number for number, program in enumerate(programs)}
        self.hosts = [_Host(number, HOST) for number in range(len(programs))]
        self.own = {HOST, *machine.host_streams}
        self.lanes: dict[tuple[int, str], _Lane] = {}
        self.copies = [copies(program) for program in programs]
        self.transfers: dict[Hashable, Transfer] = {}
        self.now = 0.0
        self.wakes: list[tuple[float, int, _Lane]] = []
        self.order = count()  # of what happens at one time
        self.running: list[_Run] = []
        self.changed = False  # what runs, since their shares were made
        self.true: set[Hashable] = set()  # marks that were reached, messages that came
        self.waiting: dict[Hashable, dict[_Lane, None]] = defaultdict(dict)
        self.met: dict[Hashable, list[tuple[_Lane, int]]] = defaultdict(list)
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
            times = [self.now + run.left / run.speed for run in self.running]
            times += [self.wakes[0][0]] if self.wakes else []
            if not times:
                break
            self._pass(min(times))
        stuck = [host for host in self.hosts if host.next < len(self.programs[host.number].items)]
        if stuck := [*stuck, *(lane for lane in self.lanes.values() if lane.queue)]:
            told = (
                f"rank {self.programs[lane.number].rank}, {lane.name}, item {self._next(lane)}"
                for lane in stuck
            )
            raise ValueError(f"the programs wait for ever: {'; '.join(told)}")
        for program, kept, steps in zip(
            self.programs, self.timing.recordings, self.timing.steps, strict=True
        ):
            numbers = [item.number for item in program.items if isinstance(item, Step)]
            ends = list(accumulate(steps, initial=0.0))
            for number, (begin, end) in zip(numbers, pairwise(ends), strict=True):
                kept.spans.append(Span("compute", f"step {number}", begin, end))
        return self.timing

    def _pass(self, time: float) -> None:
        """Let time go on; what ends then ends."""
        for run in self.running:
            run.left -= (time - self.now) * run.speed
        self.now = time
        while self.wakes and self.wakes[0][0] <= time:
            lane = heappop(self.wakes)[2]
            lane.woken = None
            self.ready.append(lane)
        nothing = _NOTHING + 1e-15 * time  # what rounding may leave
        ended = [run for run in self.running if run.left <= nothing]
        if ended:
            self.running = [run for run in self.running if run.left > nothing]
            for run in ended:
                for lane, index in run.lanes:
                    lane.busy = False
                    self._done(lane, index)
                self._come(run.then)
            self.changed = True

    def _share(self) -> None:
        """Say how fast each item goes from now on."""
        self.changed = False
        load: dict[Hashable, float] = defaultdict(float)
        for run in self.running:
            for resource, part in run.uses.items():
                load[resource] += part
        for run in self.running:
            run.speed = 1 / max([1.0, *(load[resource] for resource in run.uses)])

    # -- lanes

    def _host(self, host: _Host) -> None:
        """Submit what comes, up to something that the host itself does or waits for."""
        program, cost = self.programs[host.number], self.machine.host
        while host.next < len(program.items) and not host.busy:
            index, item = host.next, program.items[host.next]
            stream = getattr(item, "stream", HOST) or HOST
            if isinstance(item, Take | Free | Step):
                self.timing.began[host.number][index] = self.timing.ended[host.number][index] = host.time
                host.next += 1
            elif stream not in self.own:
                host.time += cost.item + cost.launch * getattr(item, "launches", 0)
                lane = self._lane(host.number, stream)
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

    def _lane(self, number: int, stream: str) -> _Lane:
        if (number, stream) not in self.lanes:
            self.lanes[number, stream] = _Lane(number, stream)
        return self.lanes[number, stream]

    def _next(self, lane: _Lane) -> int:
        return lane.next if isinstance(lane, _Host) else lane.queue[0][0]

    def _wake(self, time: float, lane: _Lane) -> None:
        if lane.woken != time:  # once is enough
            lane.woken = time
            heappush(self.wakes, (time, next(self.order), lane))

    def _done(self, lane: _Lane, index: int) -> None:
        """The lane's item has ended now."""
        item, number = self.programs[lane.number].items[index], lane.number
        began = self.timing.began[number][index]
        self.timing.ended[number][index] = self.now
        kept, stream = self.timing.recordings[number], getattr(item, "stream", HOST) or HOST
        if isinstance(item, Record):
            kept.passed.append(Passed(stream, item.mark, self.now, False))
        elif isinstance(item, Wait | HostWait):
            kept.passed.append(Passed(stream, item.mark, self.now, True))
            if self.now > began:
                kept.spans.append(Span(stream, "wait", began, self.now))
        elif self.now > began:
            kept.spans.append(Span(stream, _label(item), began, self.now))
        lane.since = None
        if isinstance(lane, _Host):
            lane.next, lane.time = index + 1, self.now
        else:
            lane.queue.popleft()
        self.ready.append(lane)

    # -- items

    def _execute(self, lane: _Lane, index: int) -> bool:
        """Do the next item of a lane; whether it is done now."""
        item = self.programs[lane.number].items[index]
        if lane.since is None:
            lane.since = self.timing.began[lane.number][index] = self.now
        if isinstance(item, Wait | HostWait):
            if not self._has_come(lane, (lane.number, item.mark)):
                return False
        elif isinstance(item, Collective):
            if not self._collective(lane, index, item):
                return False
        elif not isinstance(item, Record):
            seconds, uses = self._cost(lane, index, item)
            if seconds > _NOTHING:
                self._start([(lane, index)], seconds, uses)
                return False
        self._done(lane, index)
        if isinstance(item, Record):
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
        program = self.programs[lane.number]
        ranks = program.groups[item.group].ranks
        if item.peer >= 0:
            there = ranks[item.peer]
            ends = (program.rank, there) if item.call == "send" else (there, program.rank)
            key = item.group, ends, item.number
            if item.call == "recv" and there in self.ranks:
                return self._has_come(lane, key)
            self._move([(lane, index)], item, sorted(ends), key)
            return False
        key = item.group, ranks, item.number
        self.met[key].append((lane, index))
        lane.busy = True
        if len(self.met[key]) == sum(rank in ranks for rank in self.ranks):
            self._move(self.met.pop(key), item, ranks, None)
        return False

    def _move(
        self, lanes: list[tuple[_Lane, int]], item: Collective, ranks: Sequence[int], key: Hashable
    ) -> None:
        """Begin a collective; what each of its ranks uses it uses for all of them."""
        what = item.call, item.nbytes, tuple(ranks) if isinstance(ranks, list) else ranks
        if what not in self.transfers:
            self.transfers[what] = transfer(self.machine, item.call, item.nbytes, ranks)
        found, uses = self.transfers[what], {}
        seconds = max(found.seconds, _NOTHING)
        memory = found.sent * self.machine.collectives.memory / self.machine.device.bandwidth
        seconds = max(seconds, memory)
        for lane, index in lanes:
            self.timing.began[lane.number][index] = self.now
            parts = {"node": found.node, "network": found.network, "memory": memory}
            uses |= {(lane.number, name): part / seconds for name, part in parts.items() if part}
            if share := self.machine.collectives.processor:
                uses[lane.number, "processor"] = share
        self._start(lanes, seconds, uses, key)

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

    def _cost(self, lane: _Lane, index: int, item: Item) -> tuple[float, dict[Hashable, float]]:
        """Seconds of an item alone, and which part of its rank's resources it uses."""
        machine, number = self.machine, lane.number
        if (
            isinstance(item, Work)
            and (way := self.copies[number].get(index))
            and machine.host_link is not None
        ):
            direction, nbytes = way
            moving = nbytes / machine.host_link.bandwidth
            seconds = machine.host_link.latency + moving
            return seconds, {(number, direction): moving / seconds}
        if isinstance(item, Work):
            own = item.stream == HOST and machine.host_processor is not None
            processor, of = (machine.host_processor, "host ") if own else (machine.device, "")
            return _kernel(processor, item, number, of)
        if isinstance(item, HostRead | HostWrite):
            return 0.0, {}
        raise ValueError(f"price: {type(item).__name__} is no item of a stream")


def _kernel(processor: Processor, work: Work, number: int, of: str) -> tuple[float, dict[Hashable, float]]:
    computing, moving = processor.demands(work)
    seconds = max(computing, moving) + processor.constant * work.launches
    if not seconds:
        return 0.0, {}
    busy = seconds if processor.whole else computing
    parts = {(number, f"{of}processor"): busy / seconds, (number, f"{of}memory"): moving / seconds}
    return seconds, {resource: part for resource, part in parts.items() if part}


def copies(program: Program) -> dict[int, tuple[str, int]]:
    """By item, those between host and device memory: "to device" or "to host", and their bytes."""
    host: list[tuple[int, int]] = []  # what is lent of host memory, ascending
    found = {}
    for index, item in enumerate(program.items):
        if isinstance(item, Take) and item.place == "host":
            insort(host, (item.memory.start, item.memory.stop))
        elif isinstance(item, Free) and host:
            place = bisect_right(host, (item.start, 0))
            if place < len(host) and host[place][0] == item.start:
                del host[place]
        elif isinstance(item, Work) and item.stream != HOST and host:
            read, written = ([r for r in ranges if _within(r, host)] for ranges in (item.reads, item.writes))
            if read or written:
                nbytes = sum(r.stop - r.start for r in read or written)
                found[index] = "to device" if read else "to host", nbytes
    return found


def _within(memory: Range, lent: list[tuple[int, int]]) -> bool:
    place = bisect_right(lent, (memory.start, float("inf"))) - 1
    return place >= 0 and memory.start < lent[place][1]


def _steps(program: Program) -> list[tuple[int, int]]:
    """The items of each step: the first, and the one after the last."""
    ends = [index for index, item in enumerate(program.items) if isinstance(item, Step)]
    return list(zip([0, *(end + 1 for end in ends)], ends, strict=False))


def _label(item: Item) -> str:
    """As in a trace."""
    name = getattr(item, "call", "") or getattr(item, "name", "") or "host"
    label = getattr(item, "label", "")
    if isinstance(item, Collective) and not label.startswith(name):
        return f"{name} {label}".strip()
    return label or name


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times in ascending order, without overlap."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def _beyond(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """How much of the first lies outside of the others; both ascending and without overlap."""
    beyond, place = 0.0, 0
    for start, stop in spans:
        beyond += stop - start
        while place < len(others) and others[place][1] <= start:
            place += 1
        for begin, end in islice(others, place, None):
            if begin >= stop:
                break
            beyond -= min(stop, end) - max(start, begin)
    return beyond
