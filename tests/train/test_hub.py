"""Jobs that meet at a hub: a host that is stopped or killed is left out of outer steps, and catches up."""

import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from models import train
from shardrt.comm import thread
from shardrt.parallel import HubLost
from shardrt.train import config as settings
from shardrt.train import job as jobs_of
from shardrt.train import outer
from shardrt.train.errors import DATA
from tests import lab
from tests.lab import jobs
from tests.parallel.test_hub import LONG, serving, until
from tests.ranks import ROOT, clean_environment

EVERY, STEPS = 4, 80


def arguments(host, address):
    words = jobs.arguments("--name", f"host-{host}", "--steps", str(STEPS), "--sample.length", "0")
    words += ["--diloco.hosts", "2", "--diloco.sync-every", str(EVERY), "--diloco.host", str(host)]
    return [*words, "--diloco.hub", address, "--report.eval-interval", str(STEPS), "--checkpoint.every", "8"]


@contextmanager
def started(folder, address, *more):
    """Host 1, as a process of one rank; its output goes to a file."""
    words = [sys.executable, "-m", "shardrt", "train", *arguments(1, address), *more]
    environment = clean_environment() | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with open(folder / "log", "ab") as log:
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Gate:
    """Host 0 makes no outer step after the one that is numbered `last`."""

    def __init__(self, patch):
        self.last, step = 3, outer.step

        def gated(job, done):
            until(lambda: done <= EVERY * self.last)
            step(job, done)

        patch.setattr(outer, "step", gated)


def test_a_host_that_is_stopped_or_killed_catches_up(folder, monkeypatch):
    gate = Gate(monkeypatch)

    def said(words):
        return len(re.findall(words, (folder / "log").read_text()))

    def leave_behind():
        """Host 0 makes three outer steps alone, and stands still."""
        gate.last += 3
        until(lambda: group.closed == gate.last)

    def back(times, last):
        """Host 0 goes on, to outer step `last`, when host 1 has asked for the outer state."""
        until(lambda: group.fetching)
        gate.last = last
        until(lambda: said("caught up: goes on from step") == times)

    with serving() as (address, hub):
        recipe = train.parse(arguments(0, address))
        first = threading.Thread(target=thread.run, args=(1, jobs_of.launch, recipe), daemon=True)
        first.start()
        with started(folder, address) as second:
            until(lambda: said(f"step +{3 * EVERY}/"))
            group = hub._groups[0]
            second.send_signal(signal.SIGSTOP)
            hub.deadline = 0.3
            leave_behind()
            hub.deadline = LONG
            second.send_signal(signal.SIGCONT)
            back(1, last=gate.last + 3)
            second.kill()
            second.wait()
        leave_behind()
        with started(folder, address, "--resume", "auto") as second:
            back(2, last=STEPS // EVERY)
            assert second.wait() == 0
            first.join()
    lab.assert_equal(*(jobs.weights(folder, f"host-{host}") for host in range(2)))


def together(address, names, **changes):
    """Both hosts, as threads of this process."""
    apart = settings.DiLoCoConfig(2, 6, fragment_sync_delay=3, fragment_update_alpha=0.25, hub=address)
    changes["checkpoint"] = settings.CheckpointConfig(every=2, keep_last=9)
    hosts = []
    for host, name in enumerate(names):
        how = {"diloco": replace(apart, host=host), **changes}
        hosts.append(threading.Thread(target=jobs.launch, args=(1, f"{name}-{host}"), kwargs=how))
        hosts[-1].start()
    for each in hosts:
        each.join()


def test_killed_hosts_go_on_to_the_bit_from_the_newest_step_that_all_have(folder):
    with serving() as (address, _):
        together(address, ("whole", "whole"))
        together(address, ("cut", "cut"))
        for host, last in enumerate((10, 4)):  # an exchange is under way after each of these steps
            jobs.remove_after(folder / "runs" / f"cut-{host}", last)
        together(address, ("cut", "cut"), resume="auto")
    for host in range(2):
        assert jobs.curves(folder, f"cut-{host}") == jobs.curves(folder, f"whole-{host}")


def test_without_a_hub_a_job_ends_with_one_line(folder, capfd):
    message = jobs.refused(capfd, DATA, train.main, arguments(0, "127.0.0.1:1"))
    assert "no hub at 127.0.0.1:1: " in message


def test_a_hub_that_is_lost_while_a_checkpoint_waits_for_it_is_one_line(capsys):
    class Lost:
        @property
        def took_part(self):
            raise HubLost("the hub is gone")

    with pytest.raises(SystemExit) as ended:
        outer.saved(SimpleNamespace(outer=Lost()))
    assert ended.value.code == DATA and capsys.readouterr().err == "error: the hub is gone\n"
