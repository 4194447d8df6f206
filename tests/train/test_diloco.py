"""A training run whose hosts train apart: its outer steps, its checkpoints, and what it refuses."""

from dataclasses import replace

import pytest

from models import train
from shardrt.faults.flight import read_all
from shardrt.train import config as settings
from shardrt.train import job, outer
from shardrt.train.errors import DATA, USAGE
from tests.lab import jobs
from tests.lab.jobs import STEPS, arguments, curves, launch, records

APART = settings.DiLoCoConfig(
    hosts=2,
    sync_every=6,
    fragments=2,
    fragment_sync_delay=1,
    fragment_update_alpha=0.25,
    should_quantize=True,
)


def test_a_resumed_run_goes_on_from_the_newest_checkpoint_that_all_hosts_have(folder, lagging=1):
    often = settings.CheckpointConfig(every=2)  # an exchange is under way after step 8
    launch(4, "whole", diloco=APART, checkpoint=often)
    launch(4, "cut", diloco=APART, checkpoint=often)
    for host in range(2):
        for path in (folder / "runs" / "cut" / "checkpoints" / f"host-{host}").iterdir():
            if int(path.name.removeprefix("step-")) > (8 if host == lagging else 10):
                path.rename(path.parent / f".tmp-{path.name}-00000000")
    launch(4, "cut", diloco=APART, checkpoint=often, resume="auto")
    assert curves(folder, "cut") == curves(folder, "whole")
    assert [record["step"] for record in records(folder, "cut", "step")] == list(range(1, STEPS + 1))


def test_a_checkpoint_of_one_host_begins_a_run_on_more(folder):
    launch(2, "two", diloco=settings.DiLoCoConfig(hosts=2, sync_every=3))
    from_two = {"resume": "runs/two/checkpoints/host-0/step-00000009"}
    launch(4, "four", diloco=settings.DiLoCoConfig(hosts=4, sync_every=3), **from_two)
    assert [record["step"] for record in records(folder, "four", "step")] == [10, 11, 12]


def test_a_checkpoint_without_outer_state_is_refused(folder):
    launch(2, "together")
    apart = settings.DiLoCoConfig(hosts=2, sync_every=3)
    with pytest.raises(SystemExit) as stop:
        launch(2, "apart", diloco=apart, resume="runs/together/checkpoints/step-00000009")
    assert stop.value.code == DATA


def test_a_norm_that_is_not_finite_on_one_host_is_skipped_by_that_host(folder, monkeypatch):
    clip = settings.OptimizerConfig(on_nonfinite=settings.Nonfinite.skip)
    monkeypatch.setattr(job.loop.nn.utils, "clip_grad_norm_", Spoilt(job.loop.nn.utils.clip_grad_norm_))
    launch(2, "skips", diloco=settings.DiLoCoConfig(hosts=2, sync_every=3), optimizer=clip)
    flights, _ = read_all(folder / "runs" / "skips" / "flight")
    assert all("outer" in {record.phase for record in flight.records} for flight in flights)
    norms = [record["norm"] for record in records(folder, "skips", "step")]
    assert [norm is None for norm in norms] == [step == 4 for step in range(STEPS)]


class Spoilt:
    """Clipping that finds no finite norm on the last host in its fifth step."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args):
        found = self.function(*args)
        self.calls += 1  # of both ranks, which meet in each step
        return float("nan") if self.calls == 10 else found


def test_the_watchdog_gives_outer_steps_their_own_limit():
    limits = settings.WatchdogConfig(outer=900).limits
    assert limits.of("outer", steps=10, median=0.1) == 900 > limits.of("optimizer", steps=10, median=0.1)


def test_messages_behind_an_exchange_under_way_have_its_limit():
    apart = settings.DiLoCoConfig(hosts=2, sync_every=6, fragment_sync_delay=2)
    limit = {
        chosen: outer.limits_of(replace(jobs.CONFIG, diloco=chosen)).step
        for chosen in (apart, replace(apart, fragment_sync_delay=0), replace(apart, hub="there:1"))
    }
    assert list(limit.values()) == [600, 30, 30]


REFUSED = {
    "diloco.hosts must divide the 1 ranks, got 3": ("3", "--diloco.sync-every", "3"),
    "diloco.sync_every must divide the 3 steps, got 2": ("2", "--diloco.sync-every", "2"),
    "diloco.hosts above 1 trains hosts apart: leave parallel.tp at 1": ("2", "--parallel.tp", "2"),
    "sync_every must be a positive multiple of the 2 fragments, got 3": (
        *("2", "--diloco.sync-every", "3", "--diloco.fragments", "2"),
    ),
    "diloco.hub is for diloco.hosts above 1": ("1", "--diloco.hub", "here:1"),
    "diloco.host must be below diloco.hosts, 2, got 2": ("2", "--diloco.host", "2"),
    "precision.param at float32 or bfloat16": ("2", "--precision.param", "float16"),
    "memory.offload_* off": ("2", "--memory.offload-optimizer", "true"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses_in_one_line(folder, capfd, message):
    words = arguments("--name", "none", "--diloco.hosts", *REFUSED[message])
    assert message in jobs.refused(capfd, USAGE, train.main, words)


def test_units_of_several_blocks_are_whole_in_a_fragment():
    recipe = replace(
        jobs.CONFIG,
        diloco=settings.DiLoCoConfig(hosts=2, sync_every=6, fragments=2),
        fsdp=settings.FSDPConfig(blocks=2),
    )
    assert outer.fragments_of(recipe, [*"abcdefgh"]) == [[*"abef"], [*"cdgh"]]


def test_refuses_more_fragments_than_units():
    recipe = replace(
        jobs.CONFIG,
        diloco=settings.DiLoCoConfig(hosts=2, sync_every=3, fragments=3),
        fsdp=settings.FSDPConfig(blocks=2),
    )
    with pytest.raises(ValueError, match=r"diloco.fragments must be at most the 2 units of blocks, got 3"):
        outer.fragments_of(recipe, [object()] * 4)
