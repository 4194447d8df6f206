"""bench.pipeline: what is idle and what is computed, beside the replay of the table; how it refuses."""

import json
from dataclasses import replace

import numpy as np
import pytest

from bench import pipeline
from bench.peers.launch import ONE_THREAD
from shardrt.device.timeline import Span
from shardrt.parallel.schedules import schedule
from tests.bench.nonsense import assert_refused
from tests.bench.test_compare import LLAMA, with_words
from tests.ranks import mpirun

JOB = replace(LLAMA, layers=2)
WORDS = [*JOB.arguments(), "--micro-batches", "4", "--steps", "1", "--warmup", "1", "--json"]


def test_waits_are_not_computed():
    spans = [
        Span("compute", "wait", 1.5, 2.0),
        Span("compute", "F0 of stage 1", 1.0, 3.0),
        Span("compute", "W11 of stage 0", 3.0, 3.5),
        Span("compute", "wait", 4.0, 4.5),  # for what was sent, behind all actions
        Span("F 0 to 1", "wait", 1.0, 2.0),
    ]
    assert list(pipeline.actions(spans)) == [(1, "F", 1.5, 3.0), (0, "W", 0.5, 3.5)]


@pytest.fixture(scope="module")
def told():
    """By pipeline, of one step on two ranks."""
    done = mpirun(2, ["-m", "bench.pipeline", *WORDS], **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return {each["pipeline"].partition(",")[0]: each for each in json.loads(line)["pipelines"]}


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_what_is_idle_and_what_is_computed_are_the_step(told, name):
    entry = told[name]
    for idle, computed in zip(entry["idle_ms"], entry["computed_ms"], strict=True):
        assert idle + computed == pytest.approx(entry["table_ms"], abs=0.01) and min(idle, computed) > 0
    assert entry["table_ms"] < entry["step_ms_median"] and sum(entry["pieces"]) == 4
    assert entry["losses"] == told["1F1B"]["losses"]


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_the_replay_is_that_of_what_the_stages_took(told, name):
    for place, kinds in {"alone": "FBIW", "in_step": "FB" if name == "1F1B" else "FIW"}.items():
        times = told[name][place]["actions_ms"]
        assert times.keys() == {f"{stage}{kind}" for stage in (0, 1) for kind in kinds}
        costs = [[times.get(f"{stage}{kind}", 0) for stage in (0, 1)] for kind in "FBIW"]
        replay = schedule(name, 2, 4).replay(*costs)
        assert told[name][place]["table_ms"] == pytest.approx(replay.makespan, abs=0.05)
        assert told[name][place]["idle_ms"] == pytest.approx(replay.idle, abs=0.05)
        with np.errstate(divide="ignore", invalid="ignore"):  # a stage of so few layers may have no idle time
            ratios = np.divide(told[name]["idle_ms"], replay.idle).tolist()
        assert told[name][place]["idle_ratio"] == pytest.approx(ratios, rel=0.05, nan_ok=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--schedules", "2F2B"], "'2F2B' is unknown; known are GPipe, 1F1B, ZB-H1"),
        (["--costs", "taste"], "'taste' is unknown; known are parameters, time"),
        (["--weights", "there"], "begin with the seed's weights"),
        (["--ranks", "2", "--micro-batches", "3"], "can't share the 16 rows"),
    ],
)
def test_nonsense_is_refused_in_one_line(words, said, monkeypatch, capsys):
    assert_refused(with_words(monkeypatch, pipeline.main), words, said, capsys)
