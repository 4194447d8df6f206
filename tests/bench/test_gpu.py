"""The benchmarks for a GPU, as far as they can be had without one: their tables, their processes, and every
measurement at a tiny size on the stand-ins for CuPy and the GPU, so that a machine is not lent for a typo.
"""

import importlib
import inspect
import json
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest

from bench.gpu import __main__ as command
from bench.gpu import (
    ceilings,
    clock,
    contestant,
    convolution,
    host,
    kernels,
    needs,
    products,
    report,
    state,
    training,
)
from bench.gpu.job import Job
from bench.gpu.report import Row
from tests.cuda import fake_cupy
from tests.cuda.conftest import fake_cuda
from tests.ranks import ROOT

__all__ = ["fake_cuda"]

TINY = Job(layers=1, dim=8, heads=2, seq=4, batch=2, vocab=29, compiled="", device="cpu")


# -- what is pure


def test_flops_are_those_of_llm_c():
    """6 N + 6 L C T: of GPT-2 at 1,024 tokens 6 * 124e6 + 6 * 12 * 768 * 1024."""
    assert report.flops_per_token(124_475_904, 12, 768, 1024) == 6 * 124_475_904 + 56_623_104
    assert 615e3 * report.flops_per_token(124_475_904, 12, 768, 1024) / 989.4e12 == pytest.approx(
        0.5, abs=5e-3
    )


@pytest.mark.parametrize(
    ("row", "ratio", "met"),
    [
        (Row("s", "n", 90, "GB/s", theirs=100, at_least=0.85), 0.9, True),
        (Row("s", "n", 80, "GB/s", theirs=100, at_least=0.85), 0.8, False),
        (Row("s", "n", 104, "ms", theirs=100, at_most=1.03), 1.04, False),
        (Row("s", "n", 104, "ms", theirs=100), 1.04, None),
        (Row("s", "n", 104, "ms", at_most=1.03), None, None),
        (Row("s", "n", error="gone"), None, None),
    ],
)
def test_a_row_judges_itself(row, ratio, met):
    assert (row.ratio, row.met) == (ratio, met)
    assert row.as_json()["ratio"] == ratio


ROWS = [
    Row("first", "fast enough", 3900.0, "GB/s", "device copy", 4300.0, at_least=0.85, goal=0.9, check="fine"),
    Row("first", "too slow", 0.5, "GB/s", "device copy", 4300.0, at_least=0.85),
    Row("second", "broken", error="Traceback\n  more\nCUDAError: gone"),
]


def test_a_table_shows_figure_ceiling_and_aim_in_one_line():
    lines = report.table(ROWS).splitlines()
    assert len({line.find("device copy") for line in lines[2:4]}) == 1
    for text in ("3,900", "GB/s", "device copy", "4,300", "90.7 %", ">= 85 (goal 90) met", "fine"):
        assert text in lines[2]
    assert "SHORT" in lines[3]
    assert lines[4] == "-- second"
    assert "failed" in lines[5] and lines[5].endswith("CUDAError: gone")
    assert report.summary(ROWS) == "1 of 2 aims met, 1 failed, 3 rows"


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert report.draw(ROWS, "a GPU", tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").read_bytes()[:4] == b"\x89PNG"


def test_rows_survive_the_process_that_wrote_them(tmp_path):
    run = state.Run("section", tmp_path / "rows")
    run.ceiling("copy", "device copy", 4300.0, "GB/s")
    with run.guarded("broken"):
        raise ValueError("no")
    with run.file.open("a") as file:
        file.write('{"section": "cut o')
    rows, found = state.read(run.file)
    assert [row.name for row in rows] == ["device copy", "broken"]
    assert rows[1].error == "ValueError: no"
    assert found == {"copy": 4300.0}
    assert state.read(tmp_path / "nothing") == ([], {})


def test_what_is_missing_is_named_with_what_it_costs():
    found = needs.Found(("numba", "torch"), gpu=True)
    assert found.benchmarks and not found.tests
    assert found.lines() == [
        "numba is missing: the tests can't run",
        "torch is missing: no figures of PyTorch beside ours, and no test against its bfloat16",
    ]
    assert not needs.Found((), gpu=False).benchmarks
    assert not needs.Found(("cupy",), gpu=True).benchmarks


def test_the_twelve_products():
    flops = sum(3 * 2 * inputs * outputs for inputs, outputs in products.layers(768).values())
    assert flops == 3 * 2 * 12 * 768**2  # for each token


# -- processes


def test_sections_that_fail_hang_or_say_nothing_become_rows(monkeypatch, tmp_path, capsys):
    program = (
        "import json, sys, time; name, rows = sys.argv[2], sys.argv[4]\n"
        "row = {'section': name, 'name': 'a', 'figure': 2.0, 'unit': 'GB/s'}\n"
        "open(rows, 'w').write(json.dumps(row) + '\\n') if name != 'launches' else None\n"
        "sys.exit('CUDA fell') if name == 'kernels' else None\n"
        "time.sleep(60) if name == 'products' else None"
    )
    popen = subprocess.Popen

    def fake(words, **more):
        return popen([sys.executable, "-c", program, *words[3:]], **more)

    monkeypatch.setattr(command.subprocess, "Popen", fake)
    monkeypatch.setattr(needs, "machine", lambda: {"name": "a GPU"})
    limits = {name: (*entry[:2], 3.0) for name, entry in command.SECTIONS.items()}
    monkeypatch.setattr(command, "SECTIONS", limits)
    monkeypatch.setattr(command, "LEAST", 0.0)
    options = command.arguments().parse_args(["--out", str(tmp_path)])
    assert command.run(["ceilings", "kernels", "products", "launches"], options) == 1
    result = json.loads((tmp_path / "gpu.json").read_text())
    told = [(row["section"], row["figure"], row["error"]) for row in result["rows"]]
    assert told == [
        ("ceilings", 2.0, ""),
        ("kernels", 2.0, ""),
        ("kernels", None, "exit code 1: CUDA fell"),
        ("products", 2.0, ""),
        ("products", None, "ended after 3 s: "),
        ("launches", None, "measured nothing"),
    ]
    assert result["machine"] == {"name": "a GPU"} and result["date"]
    assert "CUDA fell" in (tmp_path / "gpu.txt").read_text() and "CUDA fell" in capsys.readouterr().out


def test_a_section_for_which_no_time_is_left_says_so(tmp_path):
    ((row,), _) = command.section("kernels", {}, False, limit=1.0)
    assert "--budget" in row.error


@pytest.mark.parametrize("name", command.SECTIONS)
def test_every_section_is_a_function_of_a_run(name):
    module, function, seconds = command.SECTIONS[name]
    work = getattr(importlib.import_module(module), function)
    inspect.signature(work).bind(None, **command._EXTRA.get(name, {}))
    assert seconds > 0


def test_a_child_measures_its_section(played, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(host, "CALLS", 2)
    words = ["--section", "launches", "--rows", str(played.file), "--ceilings", '{"copy": 1.0}']
    command.child(command.arguments().parse_args(words))
    rows, _ = state.read(played.file)
    assert len(rows) == 4 and {row.section for row in rows} == {"launches"}


STUB = """
import json, sys
from bench.gpu.contestant import serve
class Stub:
    def __init__(self, settings): self.settings = settings; print("noise")
    def about(self): return {"parameters": 5}
    def steps(self, count):
        print("more noise")
        self.settings["left"] -= 1
        if not self.settings["left"]: raise RuntimeError("out of breath")
        return {"seconds": self.settings["seconds"], "loss": 1.0}
    def digest(self): return {"digest": "abc"}
serve(Stub)
"""


def test_a_race_goes_on_when_one_falls(monkeypatch, tmp_path):
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    entrants = {
        "good": ("stub", {"seconds": 0.5, "left": 9}),
        "bad": ("stub", {"seconds": 0.1, "left": 3}),
        "absent": ("no_such_module", {}),
    }
    courses = contestant.race(entrants, warmup=1, rounds=3, steps=2, last=("digest",))
    assert courses["good"].seconds == [0.5] * 3 and courses["good"].median == 0.5
    assert courses["good"].about["parameters"] == 5 and courses["good"].about["digest"] == "abc"
    assert courses["bad"].seconds == [0.1]
    assert courses["bad"].error == "bad: ended with exit code 1: RuntimeError: out of breath"
    assert "no_such_module" in courses["absent"].error


def test_without_a_gpu_there_is_one_clear_line():
    if needs.find().gpu:
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, "-m", "bench.gpu"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "no GPU" in done.stdout and not done.stderr


# -- the measurements, on the stand-ins


@pytest.fixture
def played(fake_cuda, monkeypatch, tmp_path):
    """A run whose GPU is played."""
    monkeypatch.setattr(fake_cupy.Device, "synchronize", lambda self: None, raising=False)
    monkeypatch.setattr(fake_cupy.Runtime, "memGetInfo", lambda self: (5, 10), raising=False)
    monkeypatch.setattr(type(fake_cuda), "warm_up", lambda self: None)
    monkeypatch.setattr(clock.Clock.__init__, "__defaults__", (16,))
    for timed in (clock.Clock.seconds, clock.Clock.by_turns):
        monkeypatch.setattr(timed, "__kwdefaults__", {"calls": 2, "rounds": 1})
    return state.Run("section", tmp_path / "rows", quick=True, ceilings={"copy": 1.0, "matmul": 2.0})


@pytest.fixture
def torch_played(monkeypatch):
    """PyTorch of the CPU, on the memory of the stand-in's arrays."""
    torch = pytest.importorskip("torch")

    def of(self, array):
        inside = array._host
        if inside.dtype.name == "bfloat16":
            return torch.from_numpy(inside.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(inside)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(clock.Torch, "of", of)
    monkeypatch.setattr(clock.Torch, "stream", lambda self: nullcontext())
    return torch


def fine(run):
    """The rows, none of which failed."""
    assert not [row.error for row in run.rows if row.error]
    assert all(row.figure > 0 for row in run.rows)
    return {row.name: row for row in run.rows}


def test_ceilings(played):
    played.ceilings.clear()
    ceilings.measure(played, copied=64, linked=64, side=8)
    assert {"copy", "matmul", "host to device", "device to host", "both"} <= played.ceilings.keys()
    fine(played)


def test_every_kernel_is_called_as_it_wants_to_be(played):
    sizes = kernels.Sizes(tokens=8, width=16, heads=2, time=4, classified=4, vocab=40, elements=64)
    kernels.measure(played, sizes)
    rows = fine(played)
    assert len(rows) == 34
    assert all(row.theirs == 1.0 for row in rows.values())
    # the stand-in's clock says a millisecond for two calls
    assert rows["layer_norm forward"].figure == pytest.approx(2 * 8 * 16 * 2 / 5e-4 / 1e9)


@pytest.mark.torch
def test_products_and_attention_beside_torch(played, torch_played):
    products.measure(played, products.Sizes(batch=1, time=8, width=16, heads=2, vocab=24))
    rows = fine(played)
    assert len(rows) == 12 + 1 + 1 + 3 + 2
    assert [row.name for row in rows.values() if "WRONG" in row.check] == []
    assert all(row.beside == "torch" for row in rows.values())


def test_products_without_torch(played, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    products.measure(played, products.Sizes(batch=1, time=8, width=16, heads=2, vocab=24))
    assert all(row.theirs == 2.0 for row in fine(played).values())


@pytest.mark.torch
def test_convolution_beside_torch(played, torch_played):
    convolution.measure(played, {"small": (2, 4, 6, 3, 2, 1, 2, 7)})
    rows = fine(played)
    assert len(rows) == 3
    assert all(row.beside == "torch" and row.check.startswith("differ by") for row in rows.values())
    assert not [row for row in rows.values() if "WRONG" in row.check]
    assert played.rows[0].figure == pytest.approx(2 * (2 * 6 * 4 * 4) * (2 * 3 * 3) / 5e-4 / 1e12)


def test_launches(played, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    host.measure(played, calls=2)
    assert len(fine(played)) == 4


class Here:
    """A contestant without a process."""

    def __init__(self, name, module, settings):
        self.trainer = importlib.import_module(module).Trainer(settings)

    def start(self):
        return self.trainer.about()

    def ask(self, do, **values):
        return getattr(self.trainer, do)(**values)

    def close(self):
        pass


@pytest.fixture
def race_here(monkeypatch):
    """A race of few steps in this process."""
    short = {"warmup": 1, "rounds": 1, "steps": 1}
    monkeypatch.setattr(training, "race", lambda entrants, **how: contestant.race(entrants, **how | short))
    monkeypatch.setattr(contestant, "Contestant", Here)
    left = iter(range(10**9, 0, -1000))  # ever less memory
    monkeypatch.setattr(fake_cupy.Runtime, "memGetInfo", lambda self: (next(left), 10**9), raising=False)


@pytest.mark.torch
def test_training_beside_torch_from_the_same_weights(played, race_here):
    pytest.importorskip("torch")
    training.beside_torch(played, job=TINY)
    rows = {row.name: row for row in played.rows}
    assert not [row.error for row in played.rows if row.error]
    step = rows["training step, 8 tokens"]
    assert step.ratio > 0 and step.beside == "torch, NOT COMPILED, default attention"
    assert "WRONG" not in step.check and step.check.startswith("losses differ by")
    same = rows["the same step"]
    assert same.ratio > 0 and same.beside == "FSDP2, NOT COMPILED, default attention"
    assert "WRONG" not in same.check and same.check.startswith("losses differ by")
    assert rows["shardrt: 6N + 6LCT"].theirs == 2.0  # the last of two: beside the measured product


@pytest.mark.slow
def test_sharding_and_offload(played, race_here):
    training.sharded(played, TINY)
    training.offloaded(played, Job(**TINY.settings(micro_batches=2)))
    assert not [row.error for row in played.rows if row.error]
    names = [row.name for row in played.rows]
    assert names[:2] == ["FULL_SHARD, float32", "FULL_SHARD, bfloat16"]
    assert all("WRONG" not in row.check for row in played.rows)
    assert "parameters have the same bits" in played.rows[2].check
