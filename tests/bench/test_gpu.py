"""The benchmarks for a GPU, as far as they can be had without one: their tables, their processes, and every
measurement at a tiny size on the GPU emulator, so that a machine is not lent for a typo.
"""

import ctypes
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import time
from configparser import ConfigParser
from contextlib import nullcontext
from itertools import takewhile

import numpy as np
import pytest

from bench.gpu import __main__ as command
from bench.gpu import (
    caches,
    clock,
    contestant,
    convolution,
    experts,
    first_step,
    host,
    kernels,
    needs,
    products,
    ranks,
    report,
    state,
    suite,
    training,
)
from bench.gpu.job import Job
from bench.gpu.report import Row
from bench.workload import Workload
from tests.ranks import ROOT
from tests.softgpu.available import missing
from tests.softgpu.fixtures import gpu, gpu_kernels, software, without_cudnn

__all__ = ["gpu", "gpu_kernels", "software", "without_cudnn"]

TINY = Job(layers=1, dim=8, heads=2, seq=4, batch=2, vocab=29, compiled="", device="cpu")


# -- what is pure


def test_flops_are_those_of_llm_c():
    """6 N + 6 L C T: of GPT-2 at 1,024 tokens 6 * 124e6 + 6 * 12 * 768 * 1024."""
    flops = Job().flops_per_token(124_475_904)
    assert flops == 6 * 124_475_904 + 56_623_104
    assert report.of_peak(615e3 * flops) == "49.9 % of the data sheet's peak"


ROWS = [
    Row("first", "fast enough", 3900.0, "GB/s", "device copy", 4300.0, at_least=0.85, goal=0.9, check="fine"),
    Row("first", "too slow", 0.5, "GB/s", "device copy", 4300.0, at_least=0.85),
    Row("first", "short", 102.0, "ms", "peer", 100.0, at_most=1.03),
    Row("first", "too long", 104.0, "ms", "peer", 100.0, at_most=1.03),
    Row("first", "alone", 104.0, "ms", at_most=1.03),
    Row("second", "broken", error="Traceback\n  more\nCUDAError: gone"),
]


def test_a_table_shows_figure_ceiling_and_aim_in_one_line():
    lines = report.table(ROWS).splitlines()
    assert len({line.find("device copy") for line in lines[2:4]}) == 1
    for text in ("3,900", "GB/s", "device copy", "4,300", "90.7 %", ">= 85 (goal 90) met", "fine"):
        assert text in lines[2]
    assert "MISSED" in lines[3] and "<= 103 met" in lines[4] and "<= 103 MISSED" in lines[5]
    assert "met" not in lines[6] and "MISSED" not in lines[6]
    assert lines[7] == "-- second"
    assert "failed" in lines[8] and lines[8].endswith("CUDAError: gone")
    assert report.summary(ROWS) == "2 of 4 aims met, 1 failed, 0 not run, 6 rows"
    assert [(row.as_json()["ratio"], row.as_json()["met"]) for row in ROWS[3:]] == [
        *((1.04, False), (None, None), (None, None))
    ]


@pytest.mark.parametrize("how", [{"error": "not run: it"}, {"check": "not run: it"}])
def test_a_row_that_was_not_run_says_so_in_full_and_has_not_failed(how):
    reason = "numpy, cupy, ml_dtypes missing (pip install numpy cupy-cuda13x ml_dtypes)" * 2
    row = Row("tests", "tests", **{key: text.replace("it", reason) for key, text in how.items()})
    line = report.table([row]).splitlines()[-1]
    assert line.split()[:3] == ["tests", "not", "run"] and line.endswith(f"  {reason}")
    assert report.summary([row]) == "0 of 0 aims met, 0 failed, 1 not run, 1 rows"
    assert not state.Measured(rows=[row], done=True).good, "the next call tries it again"


def test_a_figure_of_wrong_work_counts_as_failed():
    checks = ("differ by 1e-01 WRONG", "parameters DIFFER", "differ by 1e-07")
    assert [Row("s", "n", 1.0, check=check).bad for check in checks] == [True, True, False]


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
    found = state.read(run.file)
    assert [row.name for row in found.rows] == ["device copy", "broken"]
    assert found.rows[1].error == "ValueError: no"
    assert found.ceilings == {"copy": 4300.0} and not found.done
    assert state.read(tmp_path / "nothing") == state.Measured()


def test_what_is_missing_is_named_with_what_it_costs(monkeypatch):
    monkeypatch.setattr(needs, "_cuda", lambda: 12)
    found = needs.Found(("cupy", "numba", "torch", "cudnn"), gpus=1, troubles=("NCCL not found",))
    assert found.lines() == [
        "cupy is missing: nothing can run (pip install cupy-cuda12x)",
        "numba is missing: neither the tests, nor a step on the CPU, nor kernels one by one can run "
        "(pip install numba)",
        "torch is missing: no figures of PyTorch next to ours, and no test against its bfloat16 "
        "(pip install torch)",
        "cudnn is missing: attention and convolution run in kernels of our own, "
        "which are several times slower (pip install 'nvidia-cudnn-frontend<1.29' nvidia-cudnn-cu12)",
        "all missing packages at once: pip install cupy-cuda12x numba torch 'nvidia-cudnn-frontend<1.29' "
        "nvidia-cudnn-cu12",
        "NCCL not found",
    ]
    assert found.lacks("step") == "not run: cupy, numba missing (pip install cupy-cuda12x numba)"
    assert needs.Found(("numba",), gpus=1).lacks("launches") == ""
    assert needs.Found(("pytest",), gpus=1).lacks("tests") == "not run: pytest missing (pip install pytest)"
    assert needs.Found((), gpus=0).lines() == ["no GPU: the driver, libcuda.so.1, is missing or sees none"]


@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_without_bfloat16_is_named_and_no_section_runs(driver_played, monkeypatch, capability, runs):
    monkeypatch.setattr(Driver, "capability", capability)
    for name, given in {"libraries": list, "there": lambda name: True, "_cuda": lambda: 12}.items():
        monkeypatch.setattr(needs, name, given)
    found = needs.find()
    message = "the GPU has compute capability 7.5, and bfloat16 needs 8.0: all sections are skipped"
    assert found.lines() == ([] if runs else [message])
    assert {found.lacks(name) for name in command.SECTIONS} == {"" if runs else f"not run: {message}"}


def test_the_frontend_of_cudnn_is_one_that_shardrt_takes():
    bound = re.search(r"nvidia-cudnn-frontend.*(<[\d.]+)", (ROOT / "setup.cfg").read_text())[1]
    assert f"'nvidia-cudnn-frontend{bound}'" in needs._WHEELS["cudnn"]


def test_the_extra_for_cuda_brings_libraries_that_cupy_does_not():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    brought = config["options.extras_require"]["cuda"]
    wheels = {re.match(r"[\w-]+", line)[0] for line in brought.split("\n") if line}
    assert wheels >= {"nvidia-nccl-cu13", "nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime"}


@pytest.mark.parametrize(
    ("names", "needed"),
    [
        (("ceilings", "launches"), needs.BENCHMARKS),
        (("convolution", "experts", "kernels", "products"), needs.STEP),
    ],
    ids=["without Numba", "with Numba"],
)
def test_a_section_imports_no_package_that_it_is_not_said_to_need(names, needed):
    """In an order of imports of its own: NumPy before shardrt, for example."""
    assert all(needs.SECTIONS.get(name, needs.BENCHMARKS) == needed for name in names)
    optional = {"numba", "threadpoolctl", *needs.TESTS, *needs.WITHOUT} - {*needed}
    modules = ", ".join(command.SECTIONS[name][0] for name in names)
    program = f"import sys\nsys.modules.update(dict.fromkeys({optional}))\nimport {modules}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_make_keeps_packages_that_pythonpath_brings(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "path=$PYTHONPATH"\n')
    python.chmod(0o755)
    run = ["make", "gpu", f"GPU_PYTHON={python}"]
    message = [
        subprocess.run(run, capture_output=True, text=True, cwd=ROOT, env=os.environ | more).stdout
        for more in ({"PYTHONPATH": "/site"}, {"PYTHONPATH": ""})
    ]
    assert "path=.:/site\n" in message[0] and "path=.\n" in message[1]


@pytest.mark.parametrize(
    ("wheel", "driver", "pip"),
    [
        ("cupy-cuda12x", 13, "nvidia-cublas-cu12 nvidia-nccl-cu12"),
        ("", 14, "nvidia-cublas nvidia-nccl-cu13"),
    ],
)
def test_wheels_are_for_the_cuda_of_cupy_or_else_of_the_driver(monkeypatch, wheel, driver, pip):
    monkeypatch.setattr(needs, "_version", lambda package: "14.2.0" if package == wheel else "")
    monkeypatch.setattr(needs, "_driver_cuda", lambda: driver)
    lost = "import no_such_module", "all", "nvidia-cublas-cu12 nvidia-nccl-cu12"
    asked = {"there": ("import os", "", "x"), "lost": lost}
    monkeypatch.setattr(needs, "_LIBRARIES", asked)
    assert needs.libraries() == [f"lost not found: all (pip install {pip})"]


def test_libraries_are_looked_for_by_what_loads_them():
    """needs.py names functions of others."""
    pytest.importorskip("cupy_backends")
    from shardrt.kernels.cuda import _compile, _cupy

    words = " ".join(words for words, *_ in needs._LIBRARIES.values())
    assert f"_compile.{_compile._headers.__name__}()" in words
    assert f"_cupy.{_cupy._library.__name__}()" in words
    assert not [line for line in needs.libraries() if "headers" in line]


class Driver:
    """libcuda.so.1 of a machine."""

    capability = 9, 0

    def cuInit(self, flags):
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = 8
        return 0

    def cuDriverGetVersion(self, version):
        version._obj.value = 12080
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self.capability[(75, 76).index(attribute)]
        return 0

    def cuDeviceGetPCIBusId(self, text, size, device):
        assert device == 0
        text.value = b"0000:1B:00.0"
        return 0


@pytest.fixture
def driver_played(monkeypatch):
    needs._driver.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(needs.ctypes, "CDLL", lambda name: Driver())
        yield
    needs._driver.cache_clear()


def test_nvidia_smi_is_asked_of_the_gpu_that_is_used(driver_played, monkeypatch, tmp_path):
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/sh\necho "$*" > "$0.asked"; echo 40, 1980, 0, 0x0, 0\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert needs.health().startswith("40 C, 1980 MHz")
    assert (tmp_path / "nvidia-smi.asked").read_text().split()[-1] == "--id=0000:1B:00.0"
    assert needs.gpus() == 8


def test_headers_that_are_not_found_are_named_before_anything_runs(driver_played, monkeypatch, tmp_path):
    pytest.importorskip("cuda.pathfinder")
    (tmp_path / "sitecustomize.py").write_text(
        "import cuda.pathfinder\ncuda.pathfinder.find_nvidia_header_directory = lambda name: None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    message = [line for line in needs.find().lines() if "headers" in line]
    assert (
        len(message) == 1
        and "CUDA's headers not found: no kernel can be compiled (pip install " in message[0]
    )


def test_a_driver_too_old_for_cupy_is_named(driver_played, monkeypatch):
    monkeypatch.setattr(needs, "_version", lambda package: "14.2.0" if package == "cupy-cuda13x" else "")
    monkeypatch.setattr(needs, "libraries", list)
    monkeypatch.setattr(needs, "there", lambda name: True)
    assert needs.find().lines() == [
        "the driver is for CUDA 12, CuPy for CUDA 13: nothing can run (pip install cupy-cuda12x)"
    ]


@pytest.mark.parametrize(("given", "one"), [(None, "0"), ("5, 3", "5"), ("GPU-8932,GPU-1", "GPU-8932")])
def test_one_gpu_is_the_first_of_those_that_the_user_allows(monkeypatch, given, one):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert needs.one_gpu() == {"CUDA_VISIBLE_DEVICES": one}


def test_the_tests_of_a_gpu_are_collected_with_no_package_that_they_can_do_without():
    if missing():
        pytest.skip(missing())
    left_out = ["hypothesis", "rich", "mpi4py", "safetensors", "matplotlib", "psutil", "xxhash", "tomli_w"]
    words = ["-q", "-p", "tests.softgpu.plugin", "-p", "no:cacheprovider", "--collect-only", "tests/gpu"]
    program = (
        f"import sys\nsys.modules.update(dict.fromkeys({left_out}))\n"
        f"import pytest\nsys.exit(pytest.main({words}))"
    )
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # pytest alone, of all its plugins
    how = {"capture_output": True, "text": True, "cwd": ROOT, "env": environment}
    done = subprocess.run([sys.executable, "-c", program], **how)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def test_communicators_are_tested_on_a_machine_of_one_gpu():
    if missing():
        pytest.skip(missing())
    # What says "staged" passes in tests/cuda; what says nothing might call NCCL between threads.
    chosen = ["-k", "TestStaged and (test_groups_of_ranks or not ([staged or -staged))"]
    words = ["-q", "-p", "tests.softgpu.plugin", "-p", "no:cacheprovider", "-m", "gpu", *chosen]
    command_line = [sys.executable, "-m", "pytest", "-n", "0", *words, "tests/gpu/test_communicators.py"]
    environment = os.environ | {"SOFTGPU_DEVICES": "1"}
    done = subprocess.run(command_line, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert "1 passed" in done.stdout


def test_the_folder_of_results_is_one_of_the_caller(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert command.arguments().parse_args([]).out == tmp_path / "runs/gpu"
    assert command.arguments().parse_args(["--out", "here"]).out == tmp_path / "here"


# -- processes


PROGRAM = """
import json, os, sys, time
name, rows = sys.argv[2], sys.argv[4]
def note(values): open(rows, "a").write(json.dumps(values) + "\\n")
gpus = os.environ["CUDA_VISIBLE_DEVICES"]
if name != "launches": note({"section": name, "name": "a", "figure": float(FIGURE), "check": gpus})
if name == "ceilings": note({"ceiling": "copy", "value": float(FIGURE)})
if name == "kernels" and FIGURE == 2: sys.exit("CUDA fell")
if name == "products" and FIGURE == 2: time.sleep(60)
note({"done": True})
"""


@pytest.fixture
def sections_played(monkeypatch):
    """Sections without a GPU, which write the figure that the function is given."""
    popen, started = subprocess.Popen, []

    def play(figure):
        def fake(words, **more):
            if words[1:3] != ["-m", "bench.gpu"]:
                return popen(words, **more)
            started.append(words[4])
            return popen([sys.executable, "-c", f"FIGURE = {figure}{PROGRAM}", *words[3:]], **more)

        monkeypatch.setattr(command.subprocess, "Popen", fake)
        started.clear()
        return started

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    monkeypatch.setattr(needs, "machine", lambda: {"name": "a GPU"})
    limits = {name: (*entry[:2], 3.0) for name, entry in command.SECTIONS.items()}
    monkeypatch.setattr(command, "SECTIONS", limits)
    monkeypatch.setattr(command, "LEAST", 0.0)
    return play


CHOSEN = ["ceilings", "kernels", "products", "launches"]


def message(folder):
    rows = json.loads((folder / "gpu.json").read_text())["rows"]
    return [(row["section"], row["figure"], row["error"]) for row in rows]


def test_sections_that_fail_hang_or_say_nothing_become_rows(sections_played, tmp_path, capsys):
    sections_played(2)
    options = command.arguments().parse_args(["--out", str(tmp_path)])
    assert command.run(CHOSEN, options) == 1
    assert message(tmp_path) == [
        ("ceilings", 2.0, ""),
        ("products", 2.0, ""),
        ("products", None, "ended after 3 s"),
        ("kernels", 2.0, ""),
        ("kernels", None, "exit code 1: CUDA fell"),
        ("launches", None, "measured nothing"),
    ]
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["machine"] == {"name": "a GPU"} and result["date"] and result["ceilings"] == {"copy": 2.0}
    out = capsys.readouterr().out
    assert "CUDA fell" in (tmp_path / "gpu.txt").read_text() and "CUDA fell" in out
    assert out.splitlines()[-2:] == [
        "bench.gpu: not finished: kernels, products, launches (the next call goes on with them)",
        f"bench.gpu: all sections' tables are in {tmp_path / 'gpu.txt'}",
    ]


def test_sections_see_one_gpu_but_for_that_of_ranks(sections_played, tmp_path):
    sections_played(1)
    for name, gpus in {"ceilings": "5", "kernels": "5", "ranks": "5,3"}.items():
        command.run([name], command.arguments().parse_args(["--out", str(tmp_path)]))
        rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
        seen = {row["section"]: row["check"] for row in rows}
        assert seen[name] == gpus


def test_what_a_section_lacks_is_its_row_and_the_others_run(sections_played, tmp_path, monkeypatch, capsys):
    started = sections_played(1)
    monkeypatch.setattr(needs, "find", lambda: needs.Found(("numba", "pytest"), gpus=1))
    words = ["--out", str(tmp_path), *(f"--only={name}" for name in ("step", "tests", "launches", "kernels"))]
    monkeypatch.setattr(sys, "argv", ["bench.gpu", *words])
    with pytest.raises(SystemExit, match="1"):
        command.main()
    assert started == ["ceilings", "launches"]
    assert [row for row in message(tmp_path) if row[0] in ("step", "kernels", "tests")] == [
        ("step", None, "not run: numba missing (pip install numba)"),
        ("tests", None, "not run: pytest, numba missing (pip install pytest numba)"),
        ("kernels", None, "not run: numba missing (pip install numba)"),
    ]
    assert "numba is missing" in capsys.readouterr().out


def test_the_next_call_goes_on_and_what_failed_comes_last(sections_played, tmp_path):
    started = sections_played(2)
    options = command.arguments().parse_args(["--out", str(tmp_path)])
    command.run(["ceilings", "kernels"], options)
    assert started == ["ceilings", "kernels"]
    started = sections_played(3)
    assert command.run(["kernels", "offload", "convolution"], options) == 0
    assert started == ["offload", "convolution", "kernels"]
    assert message(tmp_path) == [
        ("ceilings", 2.0, ""),  # as the first call has found it
        *((name, 3.0, "") for name in ("kernels", "offload", "convolution")),
    ]
    assert command.run(["kernels"], options) == 0 and len(started) == 3, "measured twice"


def test_what_is_cut_off_earlier_than_before_takes_no_row_away(sections_played, tmp_path):
    options = command.arguments().parse_args(["--out", str(tmp_path)])
    sections_played(2)
    command.run(["ceilings", "products"], options)  # a row, then it hangs
    before = message(tmp_path)
    command.SECTIONS["products"] = (*command.SECTIONS["products"][:2], 0.01)
    command.run(["products"], options)
    assert [row[1] for row in message(tmp_path)] == [row[1] for row in before] == [2.0, 2.0, None]


def test_ceilings_come_first_also_when_they_were_cut_off(tmp_path):
    files = {name: tmp_path / name for name in command.SECTIONS}
    for name in ("ceilings", "kernels"):
        files[name].touch()
    assert command.order(["ceilings", "kernels", "products"], files) == ["ceilings", "products", "kernels"]


def test_only_what_is_chosen_is_measured_anew(sections_played, tmp_path):
    options = command.arguments().parse_args(["--out", str(tmp_path)])
    sections_played(3)
    command.run(["ceilings", "kernels", "offload"], options)
    options.anew = True
    sections_played(4)
    command.run(["kernels"], options)
    assert message(tmp_path) == [("ceilings", 3.0, ""), ("kernels", 4.0, ""), ("offload", 3.0, "")]


def test_ranks_run_again_when_more_gpus_are_to_be_seen(sections_played, tmp_path, monkeypatch):
    options = command.arguments().parse_args(["--out", str(tmp_path)])
    started = sections_played(3)
    for gpus in "118":
        monkeypatch.setattr(needs, "machine", lambda gpus=gpus: {"name": "a GPU", "GPUs": gpus})
        command.run(["ranks", "kernels"], options)
    assert started == ["ranks", "kernels", "ranks"]


@pytest.mark.parametrize("changed", ["code", "torch", "GPU", "--anew"])
def test_what_was_measured_of_something_else_is_forgotten(sections_played, tmp_path, monkeypatch, changed):
    options = command.arguments().parse_args(["--out", str(tmp_path)])
    sections_played(3)
    command.run(["ceilings", "kernels"], options)
    if changed == "code":
        monkeypatch.setattr(command, "sources", lambda root: "other")
        kept = command.arguments().parse_args(["--out", str(tmp_path), "--keep"])
        assert command.run(["kernels"], kept) == 0 and message(tmp_path)[1] == ("kernels", 3.0, "")
    if changed in ("GPU", "torch"):
        new = {"GPU": {"name": "another"}, "torch": {"name": "a GPU", "torch": "2.13.0"}}[changed]
        monkeypatch.setattr(needs, "machine", lambda: new)
    options.anew = changed == "--anew"
    sections_played(4)
    command.run(["ceilings", "kernels"], options)
    assert message(tmp_path) == [("ceilings", 4.0, ""), ("kernels", 4.0, "")]


def test_a_section_for_which_no_time_is_left_says_so(tmp_path):
    file = tmp_path / "kernels.jsonl"
    assert "next call" in command.section("kernels", file, {}, {}, False, limit=1.0)
    assert not file.exists()


TESTS = """
import os, time, pytest
pytestmark = pytest.mark.gpu
def test_fine(): print("ran fine")
def test_wrong(): assert os.path.exists(os.environ["MENDED"])
def test_slow():
    if not os.path.exists(os.environ["MENDED"]):
        open("REACHED", "w").close()
        time.sleep(60)
def test_never_reached(): pass
"""
BROKEN = """
import pytest
pytestmark = pytest.mark.gpu
@pytest.fixture
def falls():
    yield
    assert 0
def test_that_is_not_cleared_away(falls): pass
"""


def test_the_tests_go_on_where_they_were_ended_and_failures_keep_their_names(tmp_path, monkeypatch, capfd):
    (tmp_path / "test_some.py").write_text(TESTS.replace("REACHED", str(tmp_path / "reached")))
    monkeypatch.setenv("MENDED", str(tmp_path / "mended"))

    class Ended(subprocess.Popen):
        """Its time is over when it has come to the slow test."""

        def wait(self, timeout=None):
            assert timeout in (12.0, None)
            while timeout and self.poll() is None:
                if (tmp_path / "reached").exists():
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.01)
            return super().wait(timeout)

    run = state.Run("tests", tmp_path / "rows", seconds=12.0 + suite.GRACE)
    options = ("-p", "no:cacheprovider", "-p", "no:randomly", f"--rootdir={tmp_path}", "-c", os.devnull)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Ended)
        suite.measure(run, str(tmp_path), *options)
    monkeypatch.setattr(suite, "GRACE", 0.0)
    shown = capfd.readouterr().out
    assert run.rows[0].figure == 1 and "1 failed: " in run.rows[0].error
    assert "test_wrong" in run.rows[0].error and "FAILED" in shown and "test_wrong" in shown
    (tmp_path / "mended").touch()
    kept = [{"passed": name} for name in state.read(run.file).passed]
    run = state.Run("tests", tmp_path / "again", seconds=60.0)
    for values in kept:
        state.note(run.file, values)
    suite.measure(run, str(tmp_path), *options)
    assert (run.rows[0].figure, run.rows[0].error) == (4, "")
    assert "3 passed, 1 deselected" in capfd.readouterr().out
    suite.measure(run, str(tmp_path), *options)
    assert (run.rows[1].figure, run.rows[1].error) == (4, ""), "all had passed before"
    (tmp_path / "test_broken.py").write_text(BROKEN)
    suite.measure(run, str(tmp_path), *options)
    assert run.rows[2].figure == 4 and "test_that_is_not_cleared_away" in run.rows[2].error


def test_a_file_that_can_not_be_imported_is_named_and_the_others_run(tmp_path, monkeypatch):
    (tmp_path / "test_absent.py").write_text("import no_such_module")
    (tmp_path / "test_some.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\ndef test_fine(): pass\n"
    )
    run = state.Run("tests", tmp_path / "rows", seconds=60.0 + suite.GRACE)
    suite.measure(run, str(tmp_path), "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-c", os.devnull)
    assert (run.rows[0].figure, run.rows[0].error) == (1, "1 passed; 1 failed: test_absent.py")


def test_the_first_step_is_compared(tmp_path, monkeypatch):
    """The CPU plays the GPU; and one whose gradients are wrong is told."""
    step = first_step.step
    monkeypatch.setattr(first_step, "step", lambda name, *more: step("cpu", *more))
    tiny = Workload(layers=1, dim=8, heads=2, seq=4, batch=2, vocab=29)
    run = state.Run("step", tmp_path / "rows")
    first_step.measure(run, tiny)
    assert [row.ratio for row in run.rows] == [1.0, 1.0]
    assert all(row.check == "loss and parameters differ by 0e+00" for row in run.rows)

    def wrong(name, *more):
        loss, weights = step("cpu", *more)
        return loss * (1.1 if name == "cuda" else 1), weights

    monkeypatch.setattr(first_step, "step", wrong)
    first_step.measure(run, tiny)
    assert all(row.check.endswith("by 1e-01 WRONG") for row in run.rows[2:])


def test_every_section_is_a_function_of_a_run():
    for name, (module, function, _) in command.SECTIONS.items():
        work = getattr(importlib.import_module(module), function)
        inspect.signature(work).bind(None, **command._EXTRA.get(name, {}))


def test_a_child_measures_its_section(played, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(host, "CALLS", 2)
    words = ["--section", "launches", "--rows", str(played.file), "--ceilings", '{"copy": 1.0}']
    command.child(command.arguments().parse_args(words))
    found = state.read(played.file)
    assert len(fine(found)) == 4 and {row.section for row in found.rows} == {"launches"} and found.done


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
        return {"seconds": self.settings["seconds"], "loss": 1.0, **self.settings.get("memory", {})}
    def digest(self): return {"digest": "abc"}
serve(Stub)
"""


def test_a_race_goes_on_when_one_falls(monkeypatch, tmp_path):
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    entrants = {
        "good": ("stub", {"seconds": 0.5, "left": 9}),
        "bad": ("stub", {"seconds": 0.1, "left": 4}),
        "absent": ("no_such_module", {}),
    }
    message = []
    courses = contestant.race(
        entrants,
        warmup=1,
        rounds=3,
        steps=2,
        last=("digest",),
        entered=lambda name, course: message.append((name, course.alone["seconds"], course.seconds[:])),
    )
    assert message == [("good", 0.5, []), ("bad", 0.1, [])]
    assert courses["good"].seconds == [0.5] * 3 and courses["good"].median == 0.5
    assert courses["good"].about["parameters"] == 5 and courses["good"].about["digest"] == "abc"
    assert courses["bad"].seconds == [0.1]
    assert courses["bad"].error == "bad: ended with exit code 1: RuntimeError: out of breath"
    assert "no_such_module" in courses["absent"].error


@pytest.mark.parametrize(("free", "heats"), [(26, [0, 0, 0]), (24, [0, 1, 2])])
def test_contestants_that_the_gpu_has_no_room_for_run_one_after_the_other(monkeypatch, tmp_path, free, heats):
    """Another 20 GB and a quarter must be free beside the one that has taken as many."""
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    settings = {"seconds": 0.5, "left": 9, "memory": {"taken": 20, "free": free}}
    courses = contestant.race(dict.fromkeys("abc", ("stub", settings)), warmup=1, rounds=2, steps=1)
    assert list(courses) == ["a", "b", "c"]
    assert all(course.seconds == [0.5] * 2 and not course.error for course in courses.values())
    assert [course.heat for course in courses.values()] == heats


def test_without_a_gpu_there_is_one_clear_line():
    if needs.gpus():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, "-m", "bench.gpu"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "no GPU" in done.stdout and not done.stderr


# -- the measurements, on the GPU emulator


@pytest.fixture
def played(software, gpu, monkeypatch, tmp_path):
    """A run whose GPU is played. Each call is done at once, for PyTorch is in no stream of this GPU."""
    software.choose("at once")
    monkeypatch.setattr(type(gpu), "warm_up", lambda self: None)
    monkeypatch.setattr(clock.Clock.__init__, "__defaults__", (16,))
    for timed in (clock.Clock.seconds, clock.Clock.by_turns):
        monkeypatch.setattr(timed, "__kwdefaults__", {"calls": 2, "rounds": 1})
    return state.Run("section", tmp_path / "rows", quick=True, ceilings={"copy": 1.0, "matmul": 2.0})


@pytest.fixture
def torch_played(monkeypatch):
    """PyTorch of the CPU, on the memory of CuPy's arrays."""
    torch = pytest.importorskip("torch")

    def of(self, array):
        nbytes = sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True))
        memory = (ctypes.c_ubyte * (nbytes + array.itemsize)).from_address(array.data.ptr)
        inside = np.ndarray(array.shape, array.dtype, memory, 0, array.strides)
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


def test_caches_are_warm_before_the_first_step(played, monkeypatch):
    warmed, tiny = [], Workload(layers=1, dim=8, heads=2, seq=4, batch=2, vocab=29)
    for name in ("cpu", "cuda"):
        kind = type(clock.devices.get(name))
        monkeypatch.setattr(kind, "warm_up", lambda self, name=name: warmed.append(name))
    how = {"ceilings": {"copied": 64, "linked": 64, "side": 8}, "caches": {"workload": tiny}}
    played.ceilings.clear()
    for name in takewhile(lambda name: name != "step", command.SECTIONS):
        module, function, _ = command.SECTIONS[name]
        played.rows.clear()
        getattr(importlib.import_module(module), function)(played, **how[name])
    assert warmed == ["cuda", "cpu"] and len(fine(played)) == 4
    assert {"copy", "matmul", "host to device", "device to host", "both at once"} <= played.ceilings.keys()


def test_without_numba_its_kernels_are_not_compiled(played, monkeypatch):
    monkeypatch.setattr(needs, "there", lambda name: name != "numba")
    monkeypatch.setattr(caches, "_steps", lambda workload: None)
    caches.measure(played)
    assert [row.check for row in played.rows if row.not_run] == ["not run: numba missing (pip install numba)"]
    assert not [row.error for row in played.rows if row.error]


def test_every_kernel_is_called_as_it_wants_to_be(played):
    sizes = kernels.Sizes(tokens=8, width=16, heads=2, time=4, classified=4, vocab=40, elements=64)
    kernels.measure(played, sizes)
    rows = fine(played)
    assert len(rows) == 34
    assert all(row.theirs == 1.0 for row in rows.values())
    # the clock there says a millisecond for two calls
    nbytes = 2 * 8 * 16 * 2 + 2 * 16 * 2 + 2 * 8 * 4  # x and y, weight and bias, mean and rstd
    assert rows["layer_norm forward"].figure == pytest.approx(nbytes / 5e-4 / 1e9)


@pytest.mark.torch
def test_products_and_attention_beside_torch(played, torch_played):
    products.measure(played, products.Sizes(batch=1, time=8, width=16, heads=2, vocab=24))
    rows = fine(played)
    assert len(rows) == 12 + 1 + 1 + 3 + 2
    assert [row.name for row in rows.values() if "WRONG" in row.check] == []
    assert all(row.beside == "torch" for row in rows.values())
    products.row(played, "without PyTorch", 6e12, 1.0, 0.0)
    assert played.rows[-1].ratio == 3.0, "beside the product that was measured"


@pytest.mark.torch
def test_convolution_beside_torch(played, torch_played):
    convolution.measure(played, {"small": (2, 4, 6, 3, 2, 1, 2, 7)})
    rows = fine(played)
    assert len(rows) == 3
    assert all(row.beside == "torch" and row.check.startswith("differ by") for row in rows.values())
    assert not [row for row in rows.values() if "WRONG" in row.check]
    assert played.rows[0].figure == pytest.approx(2 * (2 * 6 * 4 * 4) * (2 * 3 * 3) / 5e-4 / 1e12)


@pytest.mark.torch
def test_experts_in_one_launch_beside_a_product_for_each(played, torch_played):
    limit = experts.grouped.FEW
    experts.measure(played, {"small": experts.Shape(3, 16, 24)}, (2, 5))
    rows = fine(played)
    assert [row.beside for row in rows.values()] == 2 * [*4 * ["cublasLt, one by one"], "torch grouped_mm"]
    assert not [row for row in rows.values() if "WRONG" in row.check] and experts.grouped.FEW == limit


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
    runtime = pytest.importorskip("cupy").cuda.runtime
    monkeypatch.setattr(runtime, "memGetInfo", lambda: (next(left), 10**9))


@pytest.mark.torch
def test_training_beside_torch_from_the_same_weights(played, race_here):
    pytest.importorskip("torch")
    training.beside_torch(played, job=TINY)
    rows = {row.name: row for row in played.rows}
    assert not [row.error for row in played.rows if row.error]
    step = rows["training step, 8 tokens"]
    assert step.ratio > 0 and step.beside == "torch, NOT COMPILED, default attention"
    assert "WRONG" not in step.check and step.check.startswith("losses differ by")
    first = played.rows[0]
    assert first.name == "shardrt, alone" and first.figure > 0 and "loss" in first.check
    same = rows["the same step"]
    assert same.ratio > 0 and same.beside == "FSDP2, NOT COMPILED, default attention"
    assert "WRONG" not in same.check and same.check.startswith("losses differ by")
    # A CPU's PyTorch says that nothing of the GPU is free: so one more runs when all are gone.
    assert same.check.endswith("; one after the other: no memory for both") and ";" not in step.check
    assert rows["shardrt: model FLOP/s"].theirs == 2.0  # the last of two: beside the measured product


def test_training_without_torch_has_our_own_rows(played, race_here, monkeypatch):
    monkeypatch.setattr(needs, "there", lambda name: name != "torch")
    training.beside_torch(played, job=TINY)
    assert not [row.error for row in played.rows if row.error]
    names = [row.name for row in played.rows]
    assert names[:2] == ["torch", "shardrt, alone"] and "shardrt: model FLOP/s" in names
    assert played.rows[0].check == "not run: torch missing (pip install torch)"


def test_our_own_row_alone(played, race_here):
    training.ours_alone(played, TINY)
    rows = fine(played)
    assert list(rows) == ["shardrt, alone"] and "loss" in rows["shardrt, alone"].check


@pytest.mark.slow
def test_sharding_and_offload(played, race_here):
    training.sharded(played, TINY)
    training.offloaded(played, Job(**TINY.settings(micro_batches=2)))
    assert not [row.error for row in played.rows if row.error]
    names = [row.name for row in played.rows]
    assert names[:2] == ["FULL_SHARD, float32", "FULL_SHARD, bfloat16"]
    assert all("WRONG" not in row.check for row in played.rows)
    assert "parameters have the same bits" in played.rows[2].check


# -- ranks with a GPU each


SMALL = Job(layers=1, dim=8, heads=2, seq=16, batch=8, vocab=29)


@pytest.mark.mpi
def test_ranks_with_a_gpu_each_train_and_show_what_carries_their_sums(tmp_path, monkeypatch):
    if missing():
        pytest.skip(missing())
    monkeypatch.setattr(needs, "gpus", lambda: 2)
    for name in (name for name in os.environ if name.endswith("_NUM_THREADS")):
        monkeypatch.delenv(name)  # of this process, which has all cores
    run = state.Run("ranks", tmp_path / "rows", quick=True)
    ranks.measure(run, {"small": SMALL}, 1 << 10, ("-m", "tests.softgpu.run"))
    rows = fine(run)
    assert list(rows) == [
        "small, FULL_SHARD, 1 GPU",
        "small, FULL_SHARD, 2 GPUs",
        "all-gather, 2 GPUs",
        "reduce-scatter, 2 GPUs",
    ]
    one, two, *collectives = rows.values()
    assert two.theirs == pytest.approx(2 * one.figure) and two.beside == "2 times one GPU"
    assert not [row.check for row in rows.values() if row.bad]
    assert all("by NCCLCommunicator" in row.check for row in (two, *collectives))


def test_bandwidths_are_those_of_nccl_tests_and_a_fall_to_staged_is_loud(tmp_path):
    run = state.Run("ranks", tmp_path / "rows")
    one = {"seconds": 1.0, "loss": 5.0, "parameters": 10**9, "taken": 10**9, "collectives": {}}
    one["carriers"] = ["SingleCommunicator"] * 2
    eight = one | {"seconds": 1.25, "carriers": ["NCCLCommunicator"] * 2}
    ranks.add(run, "one", SMALL, 1, one, one)
    ranks.add(run, "fine", SMALL, 8, eight | {"collectives": {"all-gather": (1.0, 8 * 10**9, True)}}, one)
    staged = {"carriers": ["NCCLCommunicator", "StagedCommunicator"]}
    ranks.add(run, "staged", SMALL, 8, eight | staged, one)
    ranks.add(run, "far", SMALL, 8, eight | {"loss": 5.2}, one)
    ranks.add(run, "nan", SMALL, 8, eight | {"loss": float("nan")}, one)
    ranks.add(run, "false", SMALL, 8, eight | {"collectives": {"all-gather": (1.0, 8, False)}}, one)
    rows = {row.name: row for row in run.rows}
    assert rows["fine"].ratio == 0.8
    assert run.rows[2].figure == 7.0 and run.rows[2].check == "8 GB/s by size, by NCCLCommunicator"
    bad = [row.name for row in run.rows if row.bad]
    assert bad == ["staged", "far", "nan", "all-gather, 8 GPUs"]
    assert "by NCCLCommunicator and StagedCommunicator WRONG, not NCCL" in rows["staged"].check


@pytest.mark.parametrize(
    ("gpus", "missing", "why", "bad"),
    [
        (1, "", "this process sees 1 GPU", False),
        (2, "mpi4py", "mpi4py missing (pip install mpi4py mpich)", True),
        (2, "mpirun", "mpirun missing (pip install mpi4py mpich)", True),
    ],
)
def test_ranks_that_nothing_can_start_are_a_row(tmp_path, monkeypatch, gpus, missing, why, bad):
    monkeypatch.setattr(needs, "gpus", lambda: gpus)
    monkeypatch.setattr(needs, "there", lambda name: name != missing)
    monkeypatch.setattr("bench.ranks.shutil.which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    run = state.Run("ranks", tmp_path / "rows")
    ranks.measure(run)
    assert [(row.not_run, row.bad) for row in run.rows] == [(why, bad)]


def test_a_job_that_falls_or_hangs_is_a_row_and_the_next_one_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(needs, "gpus", lambda: 3)
    monkeypatch.setattr(ranks, "LIMIT", 1.0)
    launch = tmp_path / "mpirun"
    launch.write_text(
        "#!/bin/sh\n[ $2 = 1 ] && exec sleep 60\n"
        "echo 'Traceback' >&2; echo 'x.NcclError: no NCCL' >&2; echo 'Abort(1)' >&2; exit 3\n"
    )
    launch.chmod(0o755)
    for name in "bench.ranks.launcher", "bench.gpu.ranks.launcher":
        monkeypatch.setattr(name, lambda: str(launch))
    run = state.Run("ranks", tmp_path / "rows")
    ranks.measure(run, {"small": SMALL})
    assert [row.error for row in run.rows] == [
        "RuntimeError: -m bench.gpu.rank: still running after 1 s",
        "RuntimeError: x.NcclError: no NCCL",
    ]
