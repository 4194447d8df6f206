"""Checkpoints on hosts that share no folder: each keeps the files of its ranks, and gets what it lacks."""

import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from models import train
from shardrt.checkpoint import verify
from shardrt.comm import thread
from shardrt.train.job import launch
from tests import lab
from tests.failures.matrix import prepare
from tests.hosts.hosts import Hosts
from tests.hosts.restarts import losses
from tests.hosts.test_failures import Job

STEPS = 8
pytestmark = [pytest.mark.mpi, pytest.mark.hosts]


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


KEPT = "--resume", "auto", "--checkpoint.folder", "hosts"


@contextmanager
def with_places(folder: Path, name: str):
    """Jobs run on two hosts inside, each with a folder of its own, which are given, for runs."""
    places = [folder / f"{name}{host}" for host in range(2)]
    with Hosts(shared=[folder]) as made, made.launching():
        for host, place in enumerate(places):
            place.mkdir()
            made.run(host, ["mount", "--bind", str(place), str(folder / "runs")])
        yield places


def test_hosts_with_folders_of_their_own_go_on_to_the_bit_and_parts_are_gathered(folder):
    with with_places(folder, "host") as places:
        for steps in (STEPS // 2, STEPS):
            job = Job(folder, "apart", "--steps", str(steps), *KEPT)
            assert job.ended(200) == 0, job.out + job.err
        here = [
            sorted(path.name for path in (place / "apart/checkpoints" / f"step-{STEPS:08d}").glob("rank-*"))
            for place in places
        ]
        assert here == [[f"rank-{rank:05d}.safetensors" for rank in ranks] for ranks in ((0, 1), (2, 3))]
        assert losses(folder, places[0] / "apart") == losses(folder, "whole")
        gathered = lab.printed(4, "-m", "shardrt", "ckpt", "gather", str(folder / "runs" / "apart"))
        assert sum(line.endswith("  whole") for line in gathered) == 1
    verify(places[0] / "apart/checkpoints" / f"step-{STEPS:08d}")


def test_a_host_that_lacks_its_part_gets_it_from_the_other(folder):
    with with_places(folder, "own") as places:
        job = Job(folder, "moved", "--steps", str(STEPS // 2), *KEPT)
        assert job.ended(200) == 0, job.out + job.err
        for host in (0, 1):  # as if ranks were placed the other way round
            step = f"moved/checkpoints/step-{STEPS // 2:08d}"
            for rank in (2 * host, 2 * host + 1):
                os.rename(places[host] / step / f"rank-{rank:05d}.safetensors", folder / f"{rank}")
        for host in (0, 1):
            for rank in (2 * host, 2 * host + 1):
                os.rename(folder / f"{rank}", places[1 - host] / step / f"rank-{rank:05d}.safetensors")
        job = Job(folder, "moved", "--steps", str(STEPS), *KEPT)
        assert job.ended(200) == 0, job.out + job.err
        assert f"resumed from step {STEPS // 2}" in job.out
        assert losses(folder, places[0] / "moved") == losses(folder, "whole")
