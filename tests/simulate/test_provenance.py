"""simulate/provenance.py: no false alarm on whole training steps, and what is wrong in them is found."""

import re
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

import shardrt
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.device.cpu import CPUDevice
from shardrt.device.cuda import CUDADevice
from shardrt.fsdp import MixedPrecisionPolicy, collectives, fully_shard, no_sync, set_gradient_divide_factor
from shardrt.fsdp.options.quantisation import Quantisation
from shardrt.fsdp.transfer import Transfer
from shardrt.fsdp.whole_gradient import WholeGradient
from shardrt.parallel.schedules import SCHEDULES
from shardrt.simulate.provenance import followed
from shardrt.simulate.script import record, record_of
from tests.races.recorded import Case, recorded

RANKS = 4


class Twice(nn.Module):
    """Uses one layer twice."""

    def __init__(self):
        super().__init__()
        self.first, self.same, self.last = nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 4)

    def forward(self, x):
        return self.last(F.gelu(self.same(F.gelu(self.same(self.first(x))))))


def train(strategy="FULL_SHARD", shape=None, optimizer=optim.AdamW, sync=True, factor=0, **precision):
    mesh = init_device_mesh("auto", shape)
    shardrt.manual_seed(0)
    model = Twice()
    policy = MixedPrecisionPolicy(**precision) if precision else None
    for module in (model.first, model.same, model.last, model):
        fully_shard(module, mesh=mesh, strategy=strategy, mp_policy=policy)
    if factor:
        set_gradient_divide_factor(model.last, factor)
    update = optimizer(model)
    for _ in range(2):
        for number in range(2):
            with nullcontext() if sync or number else no_sync(model):
                F.cross_entropy(model(np.ones((3, 8), np.float32)), np.zeros(3, np.int64)).backward()
        update.step()
        update.zero_grad()


def adamw(model):
    return optim.AdamW(model.parameters(), lr=1e-3)


def muon(model):
    return optim.Muon(optim.muon_groups(model, 0.1), lr=1e-3)


def followed_in(like=CPUDevice, ranks=RANKS, **settings):
    with followed() as follow:
        record_of(partial(train, **{"optimizer": adamw} | settings), ranks, like=like, follow=follow)
    return follow


SETTINGS = {
    "FULL_SHARD": {},
    "no_sync": {"sync": False},
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "SHARD_GRAD_OP": {"strategy": "SHARD_GRAD_OP"},
    "SHARD_OPT": {"strategy": "SHARD_OPT"},
    "HYBRID_SHARD": {"strategy": "HYBRID_SHARD", "shape": (2, 2)},
    "HYBRID_SHARD, no_sync": {"strategy": "HYBRID_SHARD", "shape": (2, 2), "sync": False},
    "bfloat16": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
    "8 bits": {"quantised": Quantisation(8, 8, host_size=1)},
    "4 bits with a secondary copy": {"quantised": Quantisation(4, 8, host_size=2, secondary=True)},
    "Muon": {"optimizer": muon},
}


@pytest.mark.parametrize("like", [CPUDevice, CUDADevice])
@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_right_is_proved(name, like):
    follow = followed_in(like, **SETTINGS[name])
    assert follow.findings == []
    (follower,) = follow.followers
    assert follower.checks.updates >= 6
    assert follower.checks.reads > 0 or name == "NO_SHARD"
    assert {scale for scale, _ in follower.checks.weights.values()} == {1 / RANKS}


@pytest.mark.parametrize("strategy, shape", [("FULL_SHARD", None), ("HYBRID_SHARD", (1024, 16))])
def test_many_ranks_take_as_long_as_few(strategy, shape):
    follow = followed_in(ranks=16384, strategy=strategy, shape=shape)
    assert follow.findings == []
    assert {scale for scale, _ in follow.followers[0].checks.weights.values()} == {1 / 16384}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gives_each_micro_batch_one_weight(name):
    stages = 2 if re.match("Interleaved|ZBV|DualPipe", name) else 1
    words = (
        f"--architecture gpt --model.n-layer {4 * stages} --model.n-embd 8 --model.n-head 1 --text.window 8"
    )
    words += f" --batch-size 16 --parallel.pp 2 --micro-batches 4 --parallel.schedule {name}"
    with followed() as follow:
        record(["train", *words.split()], 4, steps=1, follow=follow)
    assert follow.findings == []
    assert [follower.checks.of_losses for follower in follow.followers] == [{1 / (16 * 8)}] * 2


@pytest.mark.parametrize("names", [("tensor parallel",), ("pipeline",), ("context parallel",)], ids="".join)
def test_axes_next_to_the_data_are_followed(names, tmp_path):
    with followed() as follow:
        recorded(Case(names), tmp_path, follow)
    assert follow.findings == []
    assert sum(follower.checks.updates for follower in follow.followers) > 0


def left_out(patch):
    reduce = collectives.reduce_scatter
    patch.setattr(
        collectives, "reduce_scatter", lambda g, *args: None if g.label == "last" else reduce(g, *args)
    )


def doubled(patch):
    reduce = collectives.reduce_scatter

    def twice(group, slot, full, out, accumulate, streams):
        reduce(group, slot, full, out, accumulate, streams)
        if group.label == "last":
            reduce(group, slot, full, out, True, streams)

    patch.setattr(collectives, "reduce_scatter", twice)


def over_half_of_the_ranks(patch):
    def half(group, slot, full, out, accumulate, streams):
        group.ranks.reduce.reduce_scatter(
            out, full, stream=streams.reduce, scale=1 / RANKS, accumulate=accumulate, tag=group.tag
        )

    patch.setattr(collectives, "reduce_scatter", half)


def to_the_wrong_place(patch):
    fill = Transfer.fill

    def shifted(self, slot, output, streams):
        full, size = slot.array[: self.group.layout.total], self.group.ranks.size
        fill(
            self,
            slot,
            full[slice(*self.group.layout.shard_range((self.group.ranks.rank + 1) % size))],
            streams,
        )

    patch.setattr(Transfer, "fill", shifted)


def not_again(patch):
    issue, seen = Transfer.issue, []

    def once(self, slot, streams):
        seen.append(self.group.label)
        if self.group.label != "last" or seen.count("last") < 3:
            issue(self, slot, streams)
        else:
            streams.gather.record(slot.ready)

    patch.setattr(Transfer, "issue", once)


def without_the_batch_before(patch):
    send = WholeGradient.send
    patch.setattr(WholeGradient, "send", lambda self, slot, out, accumulate: send(self, slot, out, False))


def over_the_first_use(patch):
    patch.setattr(WholeGradient, "target", lambda self, n: (self.written.add(n), (self.view(n), False))[1])


HALVES = {"strategy": "HYBRID_SHARD", "shape": (2, 2)}
MUTATIONS = {  # settings, message, operation
    left_out: ({}, "the gradient of last", "reduce|adamw.step"),
    doubled: ({}, "the gradient of last from backward run 0 of ranks 0, 1, 2, 3 is added twice", "reduce"),
    over_half_of_the_ranks: (HALVES, "is the sum over ranks 0, 1, not over 0, 1, 2, 3", "adamw.step"),
    to_the_wrong_place: ({}, "needs element .* no gather has filled it", "linear.forward"),
    not_again: ({}, "needs element .* of the parameters of last after", "linear"),
    without_the_batch_before: ({}, "from backward run 0 is lost at first.weight .element 0.", "adamw.step"),
    over_the_first_use: ({}, "the gradient of same from backward run 0 is lost at same.weight", "reduce"),
    None: (
        {"factor": 8},
        "the loss at .* has the weight 1/24 in .* last of rank 0, and 1/12",
        "adamw.step",
    ),
}


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_what_is_wrong_is_found_at_its_first_operation(mutate, monkeypatch):
    settings, what, operation = MUTATIONS[mutate]
    if mutate is not None:
        mutate(monkeypatch)
    first, *_ = followed_in(**settings).findings
    assert re.search(what, first.what), first
    assert re.search(operation, first.operation), first
    assert first.site.startswith("shardrt/") and first.rank == 0
