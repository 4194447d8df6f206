"""Checkpoints on hosts that share no folder: each keeps the files of its ranks, and gets what it lacks."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from models import train
from shardrt.checkpoint import verify
from shardrt.comm import thread
from shardrt.train.job import launch
from shardrt.train.metrics import read_metrics
from tests.failures.matrix import prepare
from tests.hosts.hosts import Hosts, unavailable
from tests.hosts.test_failures import Job
from tests.ranks import mpirun

STEPS = 8
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.hosts,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a run, whole, of 4 ranks in one folder."""
    made = prepare(tmp_path_factory.mktemp("hosts"))
    recipe = train.load(made / "tiny.toml")
    recipe = replace(recipe, steps=STEPS, report=replace(recipe.report, log_interval=1))
    before = os.getcwd()
    os.chdir(made)
    try:
        thread.run(4, launch, replace(recipe, name="whole"))
    finally:
        os.chdir(before)
    return made


def losses(runs: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(runs / "metrics.jsonl") if row["kind"] == "step"}


def test_hosts_with_folders_of_their_own_go_on_to_the_bit_and_parts_are_gathered(folder):
    places = [folder / "host0", folder / "host1"]
    for place in places:
        place.mkdir()
    more = ["--resume", "auto", "--checkpoint.folder", "hosts"]
    with Hosts(shared=[folder]) as made, made.launching():
        for host, place in enumerate(places):
            made.run(host, ["mount", "--bind", str(place), str(folder / "runs")])
        for steps in (STEPS // 2, STEPS):
            job = Job(folder, "apart", "--steps", str(steps), *more)
            assert job.ended(200) == 0, job.out + job.err
        here = [
            sorted(path.name for path in (place / "apart/checkpoints" / f"step-{STEPS:08d}").glob("rank-*"))
            for place in places
        ]
        assert here == [[f"rank-{rank:05d}.safetensors" for rank in ranks] for ranks in ((0, 1), (2, 3))]
        assert losses(places[0] / "apart") == losses(folder / "runs" / "whole")
        gathered = mpirun(4, ["-m", "shardrt", "ckpt", "gather", str(folder / "runs" / "apart")])
        assert gathered.returncode == 0, gathered.stderr
        assert gathered.stdout.count("  whole\n") == 1
    verify(places[0] / "apart/checkpoints" / f"step-{STEPS:08d}")


def test_a_host_that_lacks_its_part_gets_it_from_the_other(folder):
    places = [folder / "own0", folder / "own1"]
    for place in places:
        place.mkdir()
    more = ["--resume", "auto", "--checkpoint.folder", "hosts"]
    with Hosts(shared=[folder]) as made, made.launching():
        for host, place in enumerate(places):
            made.run(host, ["mount", "--bind", str(place), str(folder / "runs")])
        job = Job(folder, "moved", "--steps", str(STEPS // 2), *more)
        assert job.ended(200) == 0, job.out + job.err
        for host in (0, 1):  # as if ranks were placed the other way round
            step = f"moved/checkpoints/step-{STEPS // 2:08d}"
            for rank in (2 * host, 2 * host + 1):
                os.rename(places[host] / step / f"rank-{rank:05d}.safetensors", folder / f"{rank}")
        for host in (0, 1):
            for rank in (2 * host, 2 * host + 1):
                os.rename(folder / f"{rank}", places[1 - host] / step / f"rank-{rank:05d}.safetensors")
        job = Job(folder, "moved", "--steps", str(STEPS), *more)
        assert job.ended(200) == 0, job.out + job.err
        assert f"resumed from step {STEPS // 2}" in job.out
        assert losses(places[0] / "moved") == losses(folder / "runs" / "whole")
