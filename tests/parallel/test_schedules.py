"""The schedules: their tables are PyTorch's, and cost and hold what formulas say."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest

from shardrt.parallel.schedules import SCHEDULES, schedule
from shardrt.parallel.table import Table, TableStats
from tests import lab

LOOPS = ("Interleaved1F1B", "InterleavedZeroBubble")
RANKS = (2, 3, 4, 5, 8)


def made(name, ranks, micro_batches, stages):
    """(p, m, v, table) of all for which there is one."""
    for p in ranks:
        for m in micro_batches(p):
            for v in stages:
                try:
                    yield p, m, v, schedule(name, p, m, v)
                except ValueError:
                    pass


class Made(NamedTuple):
    p: int
    m: int
    v: int
    table: Table
    facts: TableStats


@pytest.fixture(scope="module", params=SCHEDULES)
def tables(request):
    """(name, some from 2 to 4 p micro-batches, with 2 to 4 stages per rank where there may be as many)."""
    name = request.param
    stages = range(2, 5) if name in LOOPS else [1, 2]
    found = made(name, RANKS, lambda p: (2 * p, 2 * p + 1, 3 * p, 4 * p - 2, 4 * p), stages)
    return name, [Made(p, m, v, table, table.check()) for p, m, v, table in found]


def bubble(name, p, f, i, w):
    """Of a step that ends with an update of all ranks; f, i, w: times of a stage, a v-th of a rank's."""
    return {
        "GPipe": (p - 1) * (f + i + w),
        "1F1B": (p - 1) * (f + i + w),
        "Interleaved1F1B": (p - 1) * (f + i + w),
        "ZB-H1": (p - 1) * max(f, f + i - w),
        "InterleavedZeroBubble": (p - 1) * max(f, f + i - w),
        "ZBVZeroBubble": (p - 1) * f,  # at f = i = w
        "DualPipeV": (p - 1) * f,  # at f = i = w, and where pairs run one after the other
    }[name]


def test_every_rank_is_idle_as_long_as_the_formula_says(tables):
    name, several = tables
    alike = name in ("ZBVZeroBubble", "DualPipeV")
    for p, m, v, table, _ in several:
        for costs in [(1, 1, 1)] if alike else [(1, 1, 1), (2, 5, 1), (3, 2, 4)]:
            replay = table.replay(costs[0], inputs=costs[1], weights=costs[2])
            assert {*replay.idle} == {replay.bubble} == {bubble(name, p, *costs)}, (p, m, v, costs)
            assert replay.makespan == m * v * sum(costs) + replay.bubble
    assert {each.p for each in several} == {*RANKS}


def held(name, p, m, v, r):
    """(activations, late weight gradients) of rank r, in those of one stage."""
    n = m // (m // p)  # micro-batches of a round: p where m is a multiple of p
    return {
        "GPipe": (m, 0),
        "1F1B": (p - r, 0),
        "Interleaved1F1B": ((v - 1) * n + 2 * (p - r) - 1, 0),
        "ZB-H1": (p, r + 1),
        "InterleavedZeroBubble": ((v - 1) * n + p, r + 1),
        "ZBVZeroBubble": (2 * p, 2 * r + 1),
        "DualPipeV": (2 * p + 1, r + 1),
    }[name]


def test_ranks_hold_what_the_formula_says(tables):
    name, several = tables
    for p, m, v, _, facts in several:
        expected = [held(name, p, m, v, r) for r in range(p)]
        assert [*zip(facts.activations, facts.late, strict=True)] == expected, (p, m, v)


@pytest.mark.parametrize("name", SCHEDULES)
def test_tables_of_few_micro_batches_run_too(name):
    """One rank, one micro-batch, fewer than ranks: where there is a table, it passes the check."""
    found = [table for *_, table in made(name, range(1, 6), lambda p: range(1, 2 * p), (1, 2, 3))]
    for table in found:
        table.check()
    assert found or name == "DualPipeV"


def refusals(*rows):
    """(arguments of schedule, words)."""
    made = [(lambda asked=asked: schedule(*asked), words) for asked, words in rows]
    return lab.refusals(*made, ranks=1, everywhere=True, literal=True)


test_what_can_not_be_made_is_refused_in_a_line = refusals(
    (("2F2B", 2, 4), "unknown schedule '2F2B'; known: GPipe, 1F1B, "),
    (("GPipe", 0, 4), "GPipe: the number of ranks must be at least 1, got 0"),
    (("1F1B", 2, 0), "1F1B: the number of micro-batches must be at least 1, got 0"),
    (
        ("Interleaved1F1B", 2, 4, 0),
        "Interleaved1F1B: the number of stages per rank must be at least 1, got 0",
    ),
    (("1F1B", 2, 4, 2), "1F1B: stages per rank must be 1, got 2"),
    (("ZB-H1", 2, 4, 2), "ZB-H1: stages per rank must be 1, got 2"),
    (("ZBVZeroBubble", 2, 4, 1), "ZBVZeroBubble: stages per rank must be 2, got 1"),
    (
        ("DualPipeV", 4, 7),
        "DualPipeV: micro-batches must be at least 8, the number of stages, got 7",
    ),
    (
        ("Interleaved1F1B", 3, 7, 2),
        "micro-batches must divide into 2 equal rounds on 3 ranks, as multiples of 3 do; got 7",
    ),
)


def test_names_are_those_of_the_classes_of_pytorch_as_well():
    assert schedule("ScheduleInterleaved1F1B", 2, 4, 2) == schedule("interleaved1f1b", 2, 4, 2)
    assert schedule("DualPipeV", 2, 4) == schedule("DualPipeV", 2, 4, 2)


class Steps:
    """PyTorch's schedules, without processes: their stages are stand-ins, the orders their own."""

    def __init__(self, module):
        self.module = module

    def orders(self, name, p, m, v):
        """By rank: (kind, stage, micro-batch). Raises ValueError where PyTorch does."""
        if name in ("GPipe", "1F1B"):
            return [self._stepped(name, p, m, rank) for rank in range(p)]
        order = self.scheduled(name, p, m, v).pipeline_order
        return [[leaf for action in order[rank] for leaf in self._leaves(action)] for rank in range(p)]

    def scheduled(self, name, p, m, v):
        stages = [
            SimpleNamespace(num_stages=p * v, group_size=p, group_rank=0, submod=None) for _ in range(v)
        ]
        known = "InterleavedZeroBubble" if name == "ZB-H1" else name
        return self.module.get_schedule_class(known)(stages, m)

    def _leaves(self, action):
        for leaf in (action.sub_actions or [action]) if action is not None else []:
            yield leaf.computation_type.value, leaf.stage_index, leaf.microbatch_index

    def _stepped(self, name, p, m, rank):
        """What a step calls. (Schedule1F1B.pipeline_order counts the last rank's F from 1 in torch 2.13.)"""
        called = []
        stage = SimpleNamespace(
            num_stages=p,
            stage_index=rank,
            is_last=False,
            forward_one_chunk=lambda i, *_, **__: called.append(("F", rank, i)),
            backward_one_chunk=lambda i, **_: called.append(("B", rank, i)),
            perform_reduce_grad=lambda _: None,
            **{f"get_{way}_{call}_ops": lambda _: [] for way in ("fwd", "bwd") for call in ("recv", "send")},
        )
        self.module.get_schedule_class(name)(stage, m)._step_microbatches()
        return called


@pytest.fixture
def pytorch(monkeypatch):
    pytest.importorskip("torch")
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    monkeypatch.setattr(schedules.PipelineScheduleSingle, "_initialize_stage", lambda *_: None)
    return Steps(schedules)


@pytest.fixture
def orders_alone(pytorch, monkeypatch):
    """Without what comes after the order in PyTorch's constructors, which takes seconds: sends, waits."""
    schedules = pytorch.module
    monkeypatch.setattr(schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms", lambda *_: None)
    zero = schedules.ScheduleInterleavedZeroBubble
    monkeypatch.setattr(zero, "_add_bubbles_to_actions", lambda self, _: self.pipeline_order)
    return pytorch


@pytest.mark.torch
@pytest.mark.parametrize("numbers", [range(2, 17), pytest.param(range(17, 33), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_tables_equal_those_of_pytorch(name, numbers, orders_alone):
    equal = 0
    for p in RANKS:
        for m in numbers:
            for v in (
                [1, 2, 3, 4] if name in LOOPS else [1] if name in ("GPipe", "1F1B", "ZB-H1") else [1, 2, 3]
            ):
                try:
                    theirs = orders_alone.orders(name, p, m, v)
                except ValueError:
                    if name != "1F1B":  # ours takes fewer micro-batches than ranks
                        with pytest.raises(ValueError):
                            schedule(name, p, m, v)
                    continue
                table = schedule(name, p, m, v)
                assert [[action[:3] for action in row] for row in table.ranks] == theirs, (p, m, v)
                equal += 1
    assert equal >= 25


@pytest.mark.torch
@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "DualPipeV"])
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_files_that_pytorch_writes_are_read(name, form, pytorch, tmp_path):
    path = tmp_path / "steps.csv"
    pytorch.scheduled(name, 3, 6, 2)._dump_csv(path, form)
    table, ours = Table.load(path), schedule(name, 3, 6, 2)
    compute = tuple(tuple(action for action in row if action.micro_batch >= 0) for row in table.ranks)
    assert compute == ours.ranks
    assert (compute != table.ranks) == (form == "compute_comms")  # that has UNSHARD and RESHARD
    assert table.check() == ours.check()


@pytest.mark.torch
@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "DualPipeV"])
def test_pytorch_reads_files_of_ours(name, pytorch, tmp_path):
    path = tmp_path / "steps.csv"
    schedule(name, 3, 6, 2).save(path)
    theirs = pytorch.scheduled(name, 3, 6, 2)
    before = pytorch.orders(name, 3, 6, 2)
    theirs._load_csv(path, "compute_only")  # it checks them, and works out sends and receives
    after = [
        [leaf for action in theirs.pipeline_order[r] for leaf in pytorch._leaves(action)] for r in range(3)
    ]
    assert after == before
