"""Proves that the plans of all ranks fit together before any of them runs: no wrong call, no wait forever."""

from collections.abc import Sequence

from .plan import Plan


def prove(plans: Sequence[Sequence[tuple]]) -> None:
    """Check that every call is met by the same call of the other ranks, and that none waits forever.

    plans: by rank, an item as (stream, waits, communicator or None, what, parts); see `shown`.

    Raises:
        ValueError: for the first call that differs, or where the ranks would wait for each other.
    """
    _Proof(plans).run()


def shown(made: Plan) -> list[tuple]:
    """A plan as `prove` takes it, in JSON's types."""
    return [
        (
            item.stream,
            item.waits,
            item.key and (item.key.members, item.key.stream, item.call),
            item.what,
            item.sent and (item.sent, item.received),
        )
        for item in made.items
    ]


class _Proof:
    def __init__(self, plans: Sequence[Sequence[tuple]]) -> None:
        self.plans = plans
        self.queues: list[dict[str, list[int]]] = []
        for items in plans:
            queues: dict[str, list[int]] = {}
            for place, item in enumerate(items):
                queues.setdefault(item[0], []).append(place)
            self.queues.append({stream: queue[::-1] for stream, queue in queues.items()})
        self.done = [[False] * len(items) for items in plans]
        self.came: list[dict[tuple, int]] = [{} for _ in plans]  # by communicator, calls so far
        self.met: dict[tuple, dict[int, tuple[int, str]]] = {}  # by call, who has come, with what
        self.arrived: set[tuple[int, int]] = set()

    def run(self) -> None:
        todo = [(rank, stream) for rank, queues in enumerate(self.queues) for stream in queues]
        while todo:
            rank, stream = todo.pop()
            queue = self.queues[rank][stream]
            while queue and self._step(rank, queue[-1], todo):
                self._end(rank, queue[-1], todo)
                queue.pop()
        stuck = [
            f"rank {rank} at {self.plans[rank][queue[-1]][3]}"
            for rank, queues in enumerate(self.queues)
            for queue in queues.values()
            if queue and self.plans[rank][queue[-1]][2]
        ]
        if any(queue for queues in self.queues for queue in queues.values()):
            raise ValueError(
                "the ranks' traces do not fit together, or are cut off: they would wait for each other: "
                + "; ".join(stuck[:4])
            )

    def _end(self, rank: int, place: int, todo: list[tuple[int, str]]) -> None:
        self.done[rank][place] = True
        todo += [(rank, stream) for stream in self.queues[rank]]

    def _step(self, rank: int, place: int, todo: list[tuple[int, str]]) -> bool:
        """Whether an item is done, or can be."""
        _, waits, key, what, _ = self.plans[rank][place]
        if self.done[rank][place]:
            return True
        if not all(self.done[rank][wait] for wait in waits):
            return False
        if key is None:
            return True
        members, stream, call = tuple(key[0]), key[1], key[2]
        if (rank, place) in self.arrived:
            return False
        self.arrived.add((rank, place))
        communicator = (members, stream)
        number = self.came[rank].get(communicator, 0)
        self.came[rank][communicator] = number + 1
        met = self.met.setdefault((communicator, number), {})
        met[rank] = place, what
        other = next(iter(met))
        if what != met[other][1]:
            (first, one), (second, two) = sorted([(other, met[other][1]), (rank, what)])
            raise ValueError(
                f"ranks {first} and {second} differ at call {number} of the group {members!r:.60}: "
                f"{one}, and {two}"
            )
        if call == "send":
            self._receive(met, rank, todo)
            return True
        if len(met) < len(members):
            return False
        self._compare_parts(members, met)
        for other, (theirs, _) in met.items():
            if other != rank and not self.done[other][theirs]:
                self._end(other, theirs, todo)
        return True

    def _compare_parts(self, members: tuple[int, ...], met: dict[int, tuple[int, str]]) -> None:
        """Raise ValueError if a rank sends a part of another size than its receiver takes."""
        parts = {rank: self.plans[rank][place][4] for rank, (place, _) in met.items()}
        for here, rank in enumerate(members):
            for there, peer in enumerate(members):
                if parts[rank] and parts[rank][0][there] != parts[peer][1][here]:
                    raise ValueError(
                        f"rank {rank} sends {parts[rank][0][there]} elements to rank {peer} in an "
                        f"all_to_all, which receives {parts[peer][1][here]}"
                    )

    def _receive(self, met: dict[int, tuple[int, str]], sender: int, todo: list[tuple[int, str]]) -> None:
        for rank, (place, _) in met.items():
            if rank != sender:
                self._end(rank, place, todo)
