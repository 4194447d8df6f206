"""Tables of pipelines: what check refuses, what it counts, when a replay says actions run, and their files.

Truth is a simulator that moves messages through queues, an action of one rank at a time, and knows no rule
but what a rank can do next and what a stage must have seen in the end.
"""

import random
import re
from collections import Counter, defaultdict, deque
from dataclasses import replace
from fractions import Fraction

import pytest

from shardrt.parallel.schedules import SCHEDULES, schedule
from shardrt.parallel.table import Action, Link, Table, table_of

# Stages 0 and 2 on a rank, 1 and 3 on the other; parameters are gathered for a while.
GATHERED = (
    "0UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 2F0 2F1 2B0 2I1 0UNSHARD 2W1 2RESHARD 0B0 0B1 0RESHARD /"
    "1UNSHARD 1F0 1F1 3UNSHARD 3F0 3B0 3F1 3B1 3RESHARD 1B0 1B1 1RESHARD"
)


def table(text):
    """Of "0F0 0B0 / 1F0 1B0", which need not be right; what is last reduces."""
    rows = []
    for line in text.split("/"):
        words = [re.fullmatch(r"(\d)([A-Z]+)(\d*)", word) for word in line.split()]
        rows.append([Action(word[2], int(word[1]), int(word[3] or -1)) for word in words])
    return table_of(rows)


class Simulated:
    """Ranks that run as `chosen` says, (ranks that can) -> rank, until all are through or none can."""

    def __init__(self, table, chosen=min):
        self.rows = [deque(row) for row in table.ranks]
        self.owner = {action.stage: rank for rank, row in enumerate(table.ranks) for action in row}
        self.queues = defaultdict(deque)  # link -> messages that nobody has used
        self.waiting = defaultdict(list)  # link -> how many there were after each send
        self.here = set()  # what is on the rank that needs it
        self.ran = defaultdict(list)  # (stage, kind) -> micro-batches
        self.activations, self.most = ([0] * len(table.ranks) for _ in range(2))
        while able := [rank for rank, row in enumerate(self.rows) if row and self._able(rank)]:
            self._run(chosen(able))
        self.legal = not any(self.rows) and self._complete(table)

    def _able(self, rank):
        kind, stage, i, _ = self.rows[rank][0]
        before = self._neighbour(kind, stage)
        if kind == "F":
            return before is None or self._has(rank, "F", before, i)
        if kind in ("B", "I"):
            return ("F", stage, i) in self.here and (before is None or self._has(rank, "B", before, i))
        return kind != "W" or ("B", stage, i) in self.here

    def _neighbour(self, kind, stage):
        """The stage whose work it needs."""
        other = stage - 1 if kind == "F" else stage + 1
        return other if other in self.owner else None

    def _has(self, rank, kind, stage, i):
        sender = self.owner[stage]
        if sender == rank:
            return (kind, stage, i) in self.here
        queue = self.queues[sender, rank, kind]
        return bool(queue) and queue[0] == (stage, i)

    def _run(self, rank):
        kind, stage, i, _ = action = self.rows[rank].popleft()
        if kind in ("UNSHARD", "RESHARD"):
            self.ran[stage, "memory"].append(kind)
            self.ran[stage, "senseless"].append(action.reduces or i != -1)
            return
        self.ran[stage, "memory"].append("compute")
        self.ran[stage, "reduces"] += [action.reduces] if kind in "BW" else []
        self.ran[stage, "senseless"].append(action.reduces and kind not in "BW")
        for part in {"B": "IW"}.get(kind, kind):
            self.ran[stage, part].append(i)
        if kind != "W":
            before, after = self._neighbour(kind, stage), self._neighbour("B" if kind == "F" else "F", stage)
            sort = "F" if kind == "F" else "B"
            if before is not None and self.owner[before] != rank:
                self.queues[self.owner[before], rank, sort].popleft()
            self.here.add((sort, stage, i))
            if after is not None and self.owner[after] != rank:
                link = Link(rank, self.owner[after], sort)
                self.queues[link].append((stage, i))
                self.waiting[link].append(len(self.queues[link]))
        self.activations[rank] += {"F": 1, "I": 0}.get(kind, -1)
        self.most[rank] = max(self.most[rank], self.activations[rank])

    def _complete(self, table):
        homes = {(action.stage, rank) for rank, row in enumerate(table.ranks) for action in row}
        placed = sorted(stage for stage, _ in homes) == [*range(table.stages)] and all(table.ranks)
        return placed and all(
            self._right(stage, [*range(table.micro_batches)]) for stage in range(table.stages)
        )

    def _right(self, stage, each):
        memory = "".join(
            {"UNSHARD": "(", "RESHARD": ")"}.get(kind, ".") for kind in self.ran[stage, "memory"]
        )
        reduces = self.ran[stage, "reduces"]
        return (
            all(self.ran[stage, part] == each for part in "FIW")
            and reduces == [False] * (len(reduces) - 1) + [True]
            and not any(self.ran[stage, "senseless"])
            and re.fullmatch(r"\.*|(\(\.*\))+", memory) is not None
        )


def mutants(whole):
    """Tables that differ in one thing: actions swapped, one left out, doubled, changed or moved elsewhere."""
    for rank, row in enumerate(whole.ranks):

        def with_row(*actions, rank=rank):
            return replace(whole, ranks=(*whole.ranks[:rank], actions, *whole.ranks[rank + 1 :]))

        for i, action in enumerate(row):
            yield with_row(*row[:i], *row[i + 1 :])
            for j in range(i + 1, len(row)):
                yield with_row(*row[:i], row[j], *row[i + 1 : j], action, *row[j + 1 :])
                yield with_row(*row[:i], *row[i + 1 : j + 1], action, *row[j + 1 :])
                yield with_row(*row[:j], action, *row[j:])
            changed = [action._replace(reduces=not action.reduces)]
            changed += [action._replace(kind=kind) for kind in "FBIW"]
            changed += [action._replace(stage=stage) for stage in range(-1, whole.stages + 1)]
            changed += [action._replace(micro_batch=m) for m in range(-1, whole.micro_batches + 1)]
            for other in {*changed} - {action}:
                yield with_row(*row[:i], other, *row[i + 1 :])
            for other in {*range(len(whole.ranks))} - {rank}:
                for j in range(len(whole.ranks[other]) + 1):
                    ranks = [*with_row(*row[:i], *row[i + 1 :]).ranks]
                    ranks[other] = (*ranks[other][:j], action, *ranks[other][j:])
                    yield replace(whole, ranks=tuple(ranks))


def passes(whole):
    try:
        whole.check()
    except ValueError as refused:
        assert re.match(r"rank \d|stage \d|the table does not end: rank \d", str(refused)), refused
        assert "\n" not in str(refused)
        return False
    return True


CASES = {name: schedule(name, 2, 4 if name == "DualPipeV" else 3) for name in SCHEDULES}
CASES |= {
    "Interleaved1F1B, v = 2": schedule("Interleaved1F1B", 2, 2, 2),
    "InterleavedZeroBubble, v = 2": schedule("InterleavedZeroBubble", 2, 2, 2),
    "ZB-H1, p = 3": schedule("ZB-H1", 3, 3),
    "gathered": table(GATHERED),
}


@pytest.mark.parametrize("name", CASES)
def test_every_change_of_a_table_is_refused_or_runs_all_the_same(name):
    legal = Counter(changed == CASES[name] or _as_simulated(changed) for changed in mutants(CASES[name]))
    assert legal[False] > 300 and legal[True] > 0
    assert _as_simulated(CASES[name])


def _as_simulated(changed):
    legal = Simulated(changed).legal
    assert passes(changed) == legal, changed
    return legal


@pytest.mark.parametrize("name", CASES)
def test_what_is_held_is_what_ranks_hold_at_worst(name):
    """Messages: those that are under way if the receiver runs only where no other rank can."""
    whole = CASES[name]
    facts = whole.check()
    for link, kept in facts.kept.items():
        last = Simulated(whole, lambda able, last=link.receiver: min(able, key=lambda rank: rank == last))
        assert tuple(last.waiting[link]) == kept and facts.slots[link] == max(kept)
    chance = random.Random(name)
    for _ in range(20):
        run = Simulated(whole, chance.choice)
        assert run.legal and tuple(run.most) == facts.activations
        assert run.waiting.keys() == facts.kept.keys()
        for link, kept in facts.kept.items():
            assert all(count <= most for count, most in zip(run.waiting[link], kept, strict=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0 0B0 / 1F0 1X0", "rank 1, action 1, 1X0: unknown kind 'X'; known: F, B, I, W, UNSHARD, "),
        ("0UNSHARD 0RESHARD", "the table must have at least 1 rank and 1 micro-batch, got 1 and 0"),
        ("0F0 0B0 / 2F0 2B0", "stage 1 is on no rank"),
        ("0F0 0B0 1F0 / 1B0", "rank 1, action 0, 1B0: stage 1 is on rank 0 already"),
        ("0F0 0B0 /", "rank 1 has no actions"),
        ("0F0 0UNSHARD1 0B0", "rank 0, action 1, 0UNSHARD1: UNSHARD takes a stage and no mic"),
        ("0F 0B0", "rank 0, action 0, 0F: micro-batch must be 0 to 0, got -1"),
        ("0F0 0B0 0F2 0F1", "rank 0, action 2, 0F2: F of stage 0 is next for micro-batch 1; each r"),
        ("0F0 0F1 0B0 0I1", "rank 0: its row ends without W of stage 0 for micro-batch 1 (B is I and W)"),
        ("0F0 0B0 0W0", "rank 0, action 2, 0W0: W of stage 0 is next for micro-batch 1; each runs once"),
        ("0F0 0UNSHARD 0B0 0RESHARD", "rank 0, action 0, 0F0: stage 0 is not gathered"),
        ("0UNSHARD 0F0 0B0 0UNSHARD", "rank 0, action 3, 0UNSHARD: stage 0 is gathered already"),
        ("0UNSHARD 0F0 0B0", "rank 0, action 0, 0UNSHARD: no RESHARD follows"),
        (
            "0F0 0F1 2F1 2F0 2B0 2B1 0B0 0B1 / 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
            "rank 0, action 2, 2F1: F of stage 2 is next for micro-batch 0; each runs once, in ascending",
        ),
        (
            "0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1 / 1F0 1F1 3F0 3F1 3B0 1B0 3B1 1B1",
            "rank 1, action 1, 1F1: it uses 0F1 of rank 0, which sends 2F0 first (action 1); a link keeps",
        ),
        ("0B0 0F0", "the table does not end: rank 0, action 0, 0B0, waits for rank 0, action 1, 0F0"),
        (
            "0F0 0B0 0F1 0B1 / 1F0 1F1 1B0 1B1",
            "the table does not end: rank 0, action 1, 0B0, waits for rank 1, action 2, 1B0; "
            "rank 1, action 1, 1F1, waits for rank 0, action 2, 0F1",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_line(text, words):
    with pytest.raises(ValueError) as refused:
        table(text).check()
    assert str(refused.value).startswith(words) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "number", "does"), [("B", 0, "reduces"), ("B", 1, "does not reduce"), ("F", 0, "reduces")]
)
def test_the_last_backward_of_a_stage_reduces_and_no_other(kind, number, does):
    row = schedule("GPipe", 1, 2).ranks[0]
    changed = [a._replace(reduces=not a.reduces) if a[:3] == (kind, 0, number) else a for a in row]
    with pytest.raises(ValueError, match=rf"rank 0, action \d, 0{kind}{number}: it {does}; the last B or W "):
        Table((tuple(changed),), 1, 2).check()


def test_no_ranks_are_no_table_nor_is_what_is_no_text(tmp_path):
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"binary\.csv is not a schedule table: .*can't decode"):
        Table.load(tmp_path / "binary.csv")
    (tmp_path / "steps.csv").touch()
    with pytest.raises(ValueError, match="at least 1 rank and 1 micro-batch, got 0 and 0"):
        Table.load(tmp_path / "steps.csv").check()


def test_a_table_says_where_stages_are():
    loop, fold = schedule("Interleaved1F1B", 3, 6, 2), schedule("ZBVZeroBubble", 3, 6)
    assert [loop.stages_of(rank) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [fold.stages_of(rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert [fold.rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    with pytest.raises(ValueError, match="stage 6 is on no rank; stages are 0 to 5"):
        fold.rank_of(6)


def test_replay_of_unequal_stages():
    """Rank 1 has twice the work: it is busy from its first action on, rank 0 waits for it."""
    replay = schedule("1F1B", 2, 2).replay([1, 2], backward=[2, 4], transfer=Fraction(1, 2))
    half = Fraction(1, 2)
    assert replay.start == (
        (0, 1, 7 + half + half, 13 + half + half),
        (1 + half, 3 + half, 7 + half, 9 + half),
    )
    assert replay.end[0][-1] == replay.makespan == 16 and replay.idle == (10, 4)
    assert replay.bubble == 4
    assert type(schedule("1F1B", 2, 2).replay().makespan) is int


def test_a_link_moves_a_message_after_the_other():
    replay = schedule("GPipe", 2, 3).replay(transfer=5)
    assert replay.start[1][:3] == (6, 11, 16)


def test_what_is_late_waits_for_nothing_but_its_own():
    """W takes what time there is; I alone is on the way from stage to stage."""
    first, last = schedule("ZB-H1", 2, 2).replay(1, inputs=1, weights=10).start
    assert first == (0, 1, 3, 4, 14, 15)
    assert last == (1, 2, 3, 4, 5, 15)


@pytest.mark.parametrize("costs", [{"forward": [1, 1, 1]}, {"weights": -1}, {"inputs": [1, -1]}])
def test_costs_are_one_per_stage(costs):
    with pytest.raises(
        ValueError, match="replay: a cost must be one number of at least 0, or 2 of them, one per stage; got "
    ):
        schedule("1F1B", 2, 2).replay(**costs)


def test_a_table_that_lacks_an_action_is_not_replayed():
    with pytest.raises(ValueError, match="rank 0, action 1, 0B0: no rank makes 1B0, which it needs"):
        table("0F0 0B0 / 1F0").replay()


@pytest.mark.parametrize("name", CASES)
def test_a_file_holds_a_table(name, tmp_path):
    CASES[name].save(tmp_path / "steps.csv")
    assert Table.load(tmp_path / "steps.csv") == CASES[name]
    assert (tmp_path / "steps.csv").read_text() == str(CASES[name])


def test_files_in_the_notation_of_pytorch(tmp_path):
    """With waits, sends, pairs that run at once, and lines that are empty."""
    path = tmp_path / "steps.csv"
    path.write_text(
        "0F0,0SEND_F0, 0F1,,,(0B0;0F2)OVERLAP_F_B,0B1,0B2,0REDUCE_GRAD\r\n\r\n1RECV_F0,1UNSHARD,1F0\n"
    )
    assert str(Table.load(path)) == "0F0,0F1,0B0,0F2,0B1,0B2\n1UNSHARD,1F0\n"
    assert [action.reduces for action in Table.load(path).ranks[0]] == [False] * 5 + [True]


@pytest.mark.parametrize(
    "cell", ["0X1", "F0", "0F", "0UNSHARD1", "0F1x", "(0F0;0B0)TOGETHER", "-1F0", "1" * 7 + "F0"]
)
def test_files_with_what_is_no_action_are_refused(cell, tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text(f"0F0,0B0\n1F0,,{cell}\n")
    with pytest.raises(ValueError, match="line 2, cell 3: '.*' is not an action such as 0F1 or 0UNSHARD"):
        Table.load(path)


def test_pictures():
    assert schedule("1F1B", 2, 3).picture() == (
        "rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---\nrank 1  .  F0 B0--- F1 B1--- F2 B2--- .  ."
    )
    first, last = table(GATHERED).picture(2, 2).splitlines()
    assert first == "rank 0  0F0---- 0F1---- 2F0---- 2F1---- .   .   2B0---- .   .   2I1 2W1 0B0---- 0B1----"
    assert "SHARD" not in last
