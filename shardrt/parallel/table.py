"""A pipeline is a table: the actions of each rank, in order. Integers only; it knows no model and no device.

A rank runs its row from left to right. A stage's input from another rank is received before the action that
uses it, its output is sent after the action that makes it; a send never waits, and receives of a
link are posted in order of use. So a table says all of a step: `check` proves that it ends and counts what it
holds, `replay` says when each action runs. Executor, memory plan and pictures read the same table.

    F  forward of a stage for a micro-batch        B  its whole backward: I and W at once
    I  gradients of its inputs                     W  the weight gradients that I deferred
    UNSHARD, RESHARD  the stage's parameters are gathered, and released

Letters and notation are PyTorch's (torch/distributed/pipelining/schedules.py, _Action). Its OVERLAP_F_B, an F
and a B of two micro-batches at once, is two actions here, one after the other.
"""

import csv
import os
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Number
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Table"]

# What a stage does once per micro-batch: forward, input gradients, weight gradients.
PARTS = {"F": "F", "B": "IW", "I": "I", "W": "W"}
MEMORY = ("UNSHARD", "RESHARD")

Cost = float | Sequence[float]
Key = tuple[str, int, int]  # the result of an action: F, B (of an I as well) or W, stage, micro-batch


class Action(NamedTuple):
    """kind: one of these. stage: its number in the whole pipeline. micro_batch: -1 for UNSHARD, RESHARD.

    reduces: gradients of the stage are complete with this action, and are reduced over the data axes.
    """

    kind: str
    stage: int
    micro_batch: int = -1
    reduces: bool = False

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.micro_batch == -1 else self.micro_batch}"


class Link(NamedTuple):
    """The way of activations (kind F) or of their gradients (kind B) from one rank to another."""

    sender: int
    receiver: int
    kind: str


@dataclass(frozen=True)
class TableStats:
    """The most that a table holds at a time, however fast its ranks and links are.

    activations: by rank: micro-batches of its stages between F and B, or F and W. late: those of them between
        I and W.
    kept: by link, for each message in order: those sent so far, with itself, whose use may not have ended.
        The sender knows of all before them that they have been used.
    """

    activations: tuple[int, ...]
    late: tuple[int, ...]
    kept: Mapping[Link, tuple[int, ...]]

    @property
    def slots(self) -> dict[Link, int]:
        """By link: messages that are sent and whose use has not ended.

        A receiver with so many slots lets none wait; where it has fewer, the sender keeps the rest, and one
        is enough for the table to end.
        """
        return {link: max(counts) for link, counts in self.kept.items()}


@dataclass(frozen=True)
class Replay:
    """When actions run, in the unit of the costs; start and end lie as the table's `ranks`.

    idle: by rank: the part of the makespan in which it computes nothing; the step of all ranks ends with the
        last of them, as one that clips by the global norm does. bubble: the idle part of the busiest rank.
        Other ranks idle longer because the stages are not balanced.
    """

    start: tuple[tuple[Any, ...], ...]
    end: tuple[tuple[Any, ...], ...]
    makespan: Any
    idle: tuple[Any, ...]
    bubble: Any


@dataclass(frozen=True)
class Table:
    """ranks: by pipeline rank, its actions in order. stages: of all ranks together.

    It may hold anything: call `check` on a table that somebody wrote.
    """

    ranks: tuple[tuple[Action, ...], ...]
    stages: int
    micro_batches: int

    @cached_property
    def _rank_of(self) -> dict[int, int]:
        return {action.stage: rank for rank, row in enumerate(self.ranks) for action in row}

    @cached_property
    def _order(self) -> list[tuple[int, int]]:
        return _order(self)

    def rank_of(self, stage: int) -> int:
        """Which rank has a stage.

        Raises:
            ValueError: where none has.
        """
        if stage not in self._rank_of:
            raise ValueError(f"stage {stage} is on no rank; stages are 0 to {self.stages - 1}")
        return self._rank_of[stage]

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in ascending order."""
        return sorted({action.stage for action in self.ranks[rank]})

    def check(self) -> TableStats:
        """Prove that every rank comes to the end of its row, and that sums of gradients have one order.

        Every stage is on one rank. Its F, its I and its W each run once per micro-batch, in ascending order
        (B is both I and W): so all tables give equal bits. One action of a stage reduces, its last B or W. A
        stage with UNSHARD or RESHARD computes only between the two. On each link the order of sends is the
        order of uses. No rank waits for ever.

        Raises:
            ValueError: with the rank, the action and its place in the row, from 0, for what fails first.
            TypeError: for a table that is not made of Actions and integers.
        """
        _check_types(self)
        _check_actions(self)
        _check_once(self)
        _check_reductions(self)
        _check_gathered(self)
        sends, uses = _messages(self)
        _check_links(self, sends, uses)
        kept = _kept(self, uses)
        ranks = range(len(self.ranks))
        held = [[(sum(whole.values()), sum(late.values())) for whole, late in self.held(r)] for r in ranks]
        activations = tuple(max(whole + late for whole, late in row) for row in held)
        return TableStats(activations, tuple(max(late for _, late in row) for row in held), kept)

    def held(self, rank: int) -> Iterator[tuple[dict[int, int], dict[int, int]]]:
        """After each action of a rank: micro-batches from F to B or I, and from I to W; each by stage."""
        whole: Counter[int] = Counter()
        late: Counter[int] = Counter()
        for action in self.ranks[rank]:
            parts = PARTS.get(action.kind, "")
            whole[action.stage] += ("F" in parts) - ("I" in parts)
            late[action.stage] += ("I" in parts) - ("W" in parts)
            yield dict(whole), dict(late)

    def replay(
        self,
        forward: Cost = 1,
        backward: Cost | None = None,
        inputs: Cost = 1,
        weights: Cost = 1,
        transfer: float = 0,
    ) -> Replay:
        """Run the table with these times of F, B, I and W of a stage: a number, or one for each stage.

        Gathering, releasing and reducing take no time here. Fractions stay exact.

        Args:
            backward: None: inputs + weights.
            transfer: of one message; a link moves one after the other, while its ranks compute.

        Raises:
            ValueError: for costs that are not one per stage or are below 0, and for a table that does not
                end.
        """
        costs = {"F": self._by_stage(forward), "I": self._by_stage(inputs), "W": self._by_stage(weights)}
        both = [i + w for i, w in zip(costs["I"], costs["W"], strict=True)]
        costs |= {"B": both if backward is None else self._by_stage(backward)}
        costs |= dict.fromkeys(MEMORY, [0] * self.stages)
        start, end = ([[0] * len(row) for row in self.ranks] for _ in range(2))
        clock: list[Any] = [0] * len(self.ranks)  # when the last action of a rank ended
        work: list[Any] = [0] * len(self.ranks)
        made: dict[Key, Any] = {}  # when it was
        there: dict[Key, Any] = {}  # when it is on the rank of the stage that uses it
        moved: dict[Link, Any] = {}  # when the last message arrived
        for rank, place in self._order:
            action = self.ranks[rank][place]
            needed = [(made if need[1] == action.stage else there)[need] for need in _needs(self, action)]
            start[rank][place] = max([clock[rank], *needed])
            cost = costs[action.kind][action.stage]
            work[rank] += cost
            end[rank][place] = clock[rank] = start[rank][place] + cost
            key, link = _made(action), _link(self, rank, action)
            made[key] = there[key] = clock[rank]
            if link is not None:
                there[key] = moved[link] = max(moved.get(link, 0), clock[rank]) + transfer
        idle = tuple(max(clock) - own for own in work)
        return Replay(tuple(map(tuple, start)), tuple(map(tuple, end)), max(clock), idle, min(idle))

    def _by_stage(self, cost: Cost) -> Sequence[Any]:
        costs = [*cost] if isinstance(cost, Iterable) else [cost] * self.stages
        numbers = all(isinstance(c, Number) for c in costs)
        if len(costs) != self.stages or not numbers or not all(c >= 0 for c in costs):
            raise ValueError(
                f"replay: a cost must be one number of at least 0, or {self.stages} of them, one per stage; "
                f"got {cost}"
            )
        return costs

    def picture(self, forward: int = 1, backward: int = 2, inputs: int = 1, weights: int = 1) -> str:
        """A line per rank, time from left to right, as papers draw tables; costs are whole columns.

        Each action with its micro-batch, and its stage where ranks have several; "." where a rank waits.
        """
        replay = self.replay(forward, backward, inputs, weights)
        several = any(self.stages_of(rank) != [rank] for rank in range(len(self.ranks)))
        labels = {a: str(a) if several else f"{a.kind}{a.micro_batch}" for row in self.ranks for a in row}
        width = 1 + max(len(label) for action, label in labels.items() if action.kind not in MEMORY)
        lines = []
        for rank, row in enumerate(self.ranks):
            line = [*(".".ljust(width) * replay.makespan)]
            for action, start, end in zip(row, replay.start[rank], replay.end[rank], strict=True):
                if end > start:
                    line[start * width : end * width] = (
                        labels[action].ljust((end - start) * width - 1, "-") + " "
                    )
            lines.append(f"rank {rank:<{len(str(len(self.ranks) - 1))}}  " + "".join(line).rstrip())
        return "\n".join(lines)

    def __str__(self) -> str:
        """The table in PyTorch's notation: a line per rank, commas between its actions."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.ranks)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a CSV file like PyTorch's, without reductions; a stage's last action reduces."""
        Path(path).write_text(str(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Table":
        """Read a CSV file: written by `save`, by PyTorch's _dump_csv, or by the user.

        A line per rank; cells may be empty. SEND, RECV and REDUCE_GRAD are left out, as their places follow
        from the other actions. The table is not checked.

        Raises:
            ValueError: with line and cell, from 1, for a cell that is no action, and for a file that is no
                text.
        """
        rows = []
        try:
            lines = [*csv.reader(Path(path).read_text(encoding="utf-8").splitlines())]
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{os.fspath(path)} is not a schedule table: {error}") from None
        for line, cells in enumerate(lines, 1):
            if cells:
                rows.append(_read(cells, f"{os.fspath(path)}, line {line}"))
        return table_of(rows)


def table_of(rows: Iterable[Iterable[Action]]) -> Table:
    """The table of these rows; the last B or W of each stage reduces."""
    ranks = [[*row] for row in rows]
    for row in ranks:
        last = {action.stage: place for place, action in enumerate(row) if action.kind in ("B", "W")}
        for place in last.values():
            row[place] = row[place]._replace(reduces=True)
    stages = 1 + max((action.stage for row in ranks for action in row), default=-1)
    micro_batches = 1 + max((action.micro_batch for row in ranks for action in row), default=-1)
    return Table(tuple(map(tuple, ranks)), stages, micro_batches)


ACTION = re.compile(r"(\d{1,6})(?:([FBIW])(\d{1,6})|(UNSHARD|RESHARD))")
LEFT_OUT = re.compile(r"\d+(?:(?:SEND|RECV)_[FB]\d+|REDUCE_GRAD)|")
PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")


def _read(cells: list[str], where: str) -> Iterator[Action]:
    """The actions in a line of a file."""
    for number, cell in enumerate(cells, 1):
        for text in PAIR.sub(r"\1", cell).split(";"):
            found = ACTION.fullmatch(text.strip())
            if found:
                yield Action(found[2] or found[4], int(found[1]), int(found[3] or -1))
            elif not LEFT_OUT.fullmatch(text.strip()):
                raise ValueError(
                    f"{where}, cell {number}: {text.strip()!r} is not an action such as 0F1 or 0UNSHARD"
                )


# Needs and results of actions. A need on the same rank is met at once, else when the message is there.


def _made(action: Action) -> Key:
    return ("B" if action.kind == "I" else action.kind, action.stage, action.micro_batch)


def _needs(table: Table, action: Action) -> list[Key]:
    kind, stage, micro_batch, _ = action
    if kind == "F":
        return [("F", stage - 1, micro_batch)] if stage else []
    if kind == "W":
        return [("B", stage, micro_batch)]
    if kind in MEMORY:
        return []
    own = ("F", stage, micro_batch)
    return [own, ("B", stage + 1, micro_batch)] if stage + 1 < table.stages else [own]


def _link(table: Table, rank: int, action: Action) -> Link | None:
    """The link over which its result travels, if it goes to another rank."""
    user = action.stage + {"F": 1, "B": -1, "I": -1}.get(action.kind, table.stages)
    if not 0 <= user < table.stages or table.rank_of(user) == rank:
        return None
    return Link(rank, table.rank_of(user), "F" if action.kind == "F" else "B")


# The proofs of `check`, in order; each may rely on the earlier proofs.


def _at(table: Table, rank: int, place: int) -> str:
    return f"rank {rank}, action {place}, {table.ranks[rank][place]}"


def _actions(table: Table) -> Iterator[tuple[int, int, Action]]:
    for rank, row in enumerate(table.ranks):
        for place, action in enumerate(row):
            yield rank, place, action


def _check_types(table: Table) -> None:
    rows = table.ranks if isinstance(table.ranks, tuple | list) else [None]
    if not all(isinstance(row, tuple | list) and all(isinstance(a, Action) for a in row) for row in rows):
        raise TypeError("the table's ranks must be tuples of Actions")
    numbers = {"stages": table.stages, "micro_batches": table.micro_batches}
    for what, number in numbers.items():
        if not isinstance(number, Integral):
            raise TypeError(f"the table's {what} must be an integer, got {number!r}")
    for rank, place, action in _actions(table):
        if not (isinstance(action.stage, Integral) and isinstance(action.micro_batch, Integral)):
            at = f"rank {rank}, action {place}"
            raise TypeError(f"{at}: stage and micro-batch must be integers, got {action[1:3]!r}")


def _check_actions(table: Table) -> None:
    if not table.ranks or not table.micro_batches:
        raise ValueError(
            f"the table must have at least 1 rank and 1 micro-batch, got {len(table.ranks)} and "
            f"{table.micro_batches}"
        )
    rank_of: dict[int, int] = {}
    for rank, place, action in _actions(table):
        kind, stage, micro_batch, _ = action
        at = _at(table, rank, place)
        if kind not in PARTS and kind not in MEMORY:
            raise ValueError(f"{at}: unknown kind {kind!r}; known: {', '.join([*PARTS, *MEMORY])}")
        if not 0 <= stage < table.stages:
            raise ValueError(f"{at}: stage must be 0 to {table.stages - 1}, got {stage}")
        if kind in MEMORY and micro_batch != -1:
            raise ValueError(f"{at}: {kind} takes a stage and no micro-batch")
        if kind in PARTS and not 0 <= micro_batch < table.micro_batches:
            raise ValueError(f"{at}: micro-batch must be 0 to {table.micro_batches - 1}, got {micro_batch}")
        if rank_of.setdefault(stage, rank) != rank:
            raise ValueError(f"{at}: stage {stage} is on rank {rank_of[stage]} already")
    for rank, row in enumerate(table.ranks):
        if not row:
            raise ValueError(f"rank {rank} has no actions")
    for stage in range(table.stages):
        if stage not in rank_of:
            raise ValueError(f"stage {stage} is on no rank")


def _check_once(table: Table) -> None:
    """The next of each part of a stage is always one micro-batch on; so none is missing, twice or astray."""
    following: Counter[tuple[str, int]] = Counter()
    for rank, place, (kind, stage, micro_batch, _) in _actions(table):
        for part in PARTS.get(kind, ""):
            if micro_batch != following[part, stage]:
                raise ValueError(
                    f"{_at(table, rank, place)}: {part} of stage {stage} is next for micro-batch "
                    f"{following[part, stage]}; each runs once, in ascending order (B is I and W)"
                )
            following[part, stage] += 1
    for stage in range(table.stages):
        for part in "FIW":
            if following[part, stage] < table.micro_batches:
                raise ValueError(
                    f"rank {table.rank_of(stage)}: its row ends without {part} of stage {stage} for "
                    f"micro-batch {following[part, stage]} (B is I and W)"
                )


def _check_reductions(table: Table) -> None:
    last = {action.stage: place for _, place, action in _actions(table) if action.kind in ("B", "W")}
    for rank, place, action in _actions(table):
        if action.reduces != (place == last.get(action.stage)):
            does = "reduces" if action.reduces else "does not reduce"
            raise ValueError(
                f"{_at(table, rank, place)}: it {does}; the last B or W of a stage does, no other"
            )


def _check_gathered(table: Table) -> None:
    managed = {action.stage for _, _, action in _actions(table) if action.kind in MEMORY}
    for rank, row in enumerate(table.ranks):
        gathered: dict[int, int] = {}  # stage -> where it was
        for place, action in enumerate(row):
            if action.stage in managed and (action.kind == "UNSHARD") == (action.stage in gathered):
                state = "gathered already" if action.stage in gathered else "not gathered"
                raise ValueError(f"{_at(table, rank, place)}: stage {action.stage} is {state}")
            if action.kind == "UNSHARD":
                gathered[action.stage] = place
            elif action.kind == "RESHARD":
                del gathered[action.stage]
        for place in gathered.values():
            raise ValueError(f"{_at(table, rank, place)}: no RESHARD follows")


Messages = dict[Link, list[tuple[int, Key]]]  # place in the row and what is sent, in the order of the row


def _messages(table: Table) -> tuple[Messages, Messages]:
    """The messages that senders send over each link, and those that receivers use of it."""
    sends: Messages = defaultdict(list)
    uses: Messages = defaultdict(list)
    for rank, place, action in _actions(table):
        link = _link(table, rank, action)
        if link is not None:
            sends[link].append((place, _made(action)))
        for need in _needs(table, action):
            sender = table.rank_of(need[1])
            if sender != rank:
                uses[Link(sender, rank, need[0])].append((place, need))
    return sends, uses


def _check_links(table: Table, sends: Messages, uses: Messages) -> None:
    for link, sent in sends.items():
        for (from_place, made), (to_place, needed) in zip(sent, uses[link], strict=True):
            if made != needed:
                raise ValueError(
                    f"{_at(table, link.receiver, to_place)}: it uses {_name(needed)} of rank {link.sender}, "
                    f"which sends {_name(made)} first (action {from_place}); a link keeps the order of sends"
                )


def _name(key: Key) -> str:
    return str(Action(*key))


def _order(table: Table) -> list[tuple[int, int]]:
    """(rank, place) of all actions, each after its needs. Raises ValueError with a deadlock's circle."""
    done: set[Key] = set()
    order: list[tuple[int, int]] = []
    places = [0] * len(table.ranks)
    waiting: dict[Key, list[int]] = defaultdict(list)  # need -> ranks
    ready = [*range(len(table.ranks))]
    while ready:
        rank = ready.pop()
        row = table.ranks[rank]
        while places[rank] < len(row):
            action = row[places[rank]]
            missing = next((need for need in _needs(table, action) if need not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            order.append((rank, places[rank]))
            places[rank] += 1
            done.add(_made(action))
            ready += waiting.pop(_made(action), [])
    if waiting:
        raise ValueError(
            _circle(table, {rank: need for need, ranks in waiting.items() for rank in ranks}, places)
        )
    return order


def _circle(table: Table, needs: dict[int, Key], places: list[int]) -> str:
    """In words: the waiting ranks that wait for one another. needs: what each rank waits for."""
    makers = {_made(action): (rank, place) for rank, place, action in _actions(table)}
    path = [min(needs)]
    while True:
        need = needs[path[-1]]
        if need not in makers:
            return f"{_at(table, path[-1], places[path[-1]])}: no rank makes {_name(need)}, which it needs"
        maker = makers[need][0]
        if maker in path:
            break
        path.append(maker)
    circle = path[path.index(maker) :]
    waits = (f"{_at(table, r, places[r])}, waits for {_at(table, *makers[needs[r]])}" for r in circle)
    return f"the table does not end: {'; '.join(waits)}"


def _kept(table: Table, uses: Messages) -> dict[Link, tuple[int, ...]]:
    """By link, at each send: messages sent and not used, where receivers do only what the sender waits for.

    So far a rank is sure to be, when another has come to an action, as the needs of that action and of those
    before it say, near and far (the vector clocks of Fidge and Mattern).
    """
    used = {link: [place for place, _ in messages] for link, messages in uses.items()}
    clocks = np.zeros((len(table.ranks), len(table.ranks)), np.int64)  # [rank, other]: actions of other
    sent: dict[Key, np.ndarray] = {}
    kept: dict[Link, list[int]] = defaultdict(list)
    for rank, place in table._order:
        action = table.ranks[rank][place]
        for need in _needs(table, action):
            if table.rank_of(need[1]) != rank:
                np.maximum(clocks[rank], sent.pop(need), out=clocks[rank])
        clocks[rank, rank] = place + 1
        link = _link(table, rank, action)
        if link is not None:
            sent[_made(action)] = clocks[rank].copy()
            over = bisect_left(used[link], clocks[rank, link.receiver])
            kept[link].append(len(kept[link]) + 1 - over)
    return {link: tuple(counts) for link, counts in kept.items()}
