"""A training run whose hosts train apart: its outer steps, its checkpoints, and what it refuses."""

import pytest

from models import train
from shardrt.comm import thread
from shardrt.train import config as settings
from shardrt.train import job
from shardrt.train.errors import DATA, USAGE, one_line
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


@pytest.mark.parametrize("lagging", [0, 1])
def test_a_resumed_run_goes_on_from_the_newest_checkpoint_that_all_hosts_have(folder, lagging):
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


def test_a_checkpoint_without_outer_state_is_refused_in_one_line(folder, capfd):
    launch(2, "together")
    apart = {"diloco": settings.DiLoCoConfig(hosts=2, sync_every=3), "name": "apart"}
    apart["resume"] = "runs/together/checkpoints/step-00000009"
    line = jobs.refused(capfd, DATA, lambda: launch(2, **apart))
    assert "saved with another optimizer: it has no 'outer_" in line


def test_a_norm_that_is_not_finite_on_one_host_is_skipped_by_that_host(folder, monkeypatch):
    clip = settings.OptimizerConfig(on_nonfinite=settings.Nonfinite.skip)
    monkeypatch.setattr(job.loop.nn.utils, "clip_grad_norm_", Spoilt(job.loop.nn.utils.clip_grad_norm_))
    launch(2, "skips", diloco=settings.DiLoCoConfig(hosts=2, sync_every=3), optimizer=clip)
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


REFUSED = {
    "diloco.hosts must divide the 2 ranks, got 3": ("3", "--diloco.sync-every", "3"),
    "diloco.sync_every must divide the 3 steps, got 2": ("2", "--diloco.sync-every", "2"),
    "diloco.hosts above 1 trains hosts apart: leave parallel.tp at 1": ("2", "--parallel.tp", "2"),
    "sync_every must be a positive multiple of the 2 fragments, got 3": (
        *("2", "--diloco.sync-every", "3", "--diloco.fragments", "2"),
    ),
    "diloco.fragments: strided_fragments: count must be from 1 to the 2 blocks, got 3": (
        *("2", "--diloco.sync-every", "3", "--diloco.fragments", "3"),
    ),
    "precision.param at float32 or bfloat16": ("2", "--precision.param", "float16"),
    "memory.offload_* off": ("2", "--memory.offload-optimizer", "true"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses_in_one_line(folder, capfd, message):
    def run():
        with one_line(USAGE):
            recipe = train.parse(arguments("--name", "none", "--diloco.hosts", *REFUSED[message]))
        thread.run(2, job.launch, recipe)

    assert message in jobs.refused(capfd, USAGE, run)
