"""How benchmarks end: files that can't be written, numbers out of range, Ctrl-C, a closed pipe."""

import signal
import subprocess
import sys

import numpy as np
import pytest

from bench.collectives.__main__ import main as collectives
from bench.harness.benchmark import main
from bench.harness.values import values
from bench.offload.__main__ import main as offload
from bench.overlap import Overlap
from bench.p2p.__main__ import PointToPoint
from tests.bench.nonsense import assert_refused
from tests.ranks import ROOT, clean_environment, mpirun

ONCE = ["all_reduce", "-b", "64", "-e", "64", "-n", "1", "--rounds", "1"]
OUTPUTS = {"--output": "there", "-J": "there.json", "--picture": "there.svg"}


def p2p(words):
    return main(PointToPoint(), words)


def overlap(words):
    return main(Overlap(), words)


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("flag, name", OUTPUTS.items())
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    flag, name, threads, tmp_path, capsys
):
    words = [*ONCE, "-t", threads, flag]
    missing = tmp_path / "nowhere" / name
    message = "--picture: must be" if flag == "--picture" else f"{flag}: {missing} can't be written"
    assert_refused(collectives, [*words, str(missing)], message, capsys)
    (tmp_path / name).mkdir()
    if flag != "-J":  # whose file then gets another name
        assert_refused(collectives, [*words, str(tmp_path / name)], "Is a directory", capsys)
    assert list(tmp_path.iterdir()) == [tmp_path / name]


def test_files_have_different_names_and_none_is_left_behind(tmp_path, capsys):
    same = str(tmp_path / "one.json")
    message = "--output, -J: must be files of different names"
    assert_refused(collectives, [*ONCE, "--output", same, "-J", same], message, capsys)
    assert_refused(collectives, [*ONCE, "-b", "1", "--output", same, "-n", "0"], "-n: must be", capsys)
    assert list(tmp_path.iterdir()) == []
    paths = [str(tmp_path / name) for name in ("Ü x.json", "ß y.json", "é z.svg")]
    assert collectives([*ONCE, "--output", paths[0], "-J", paths[1], "--picture", paths[2]]) == 0
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_that_fails_after_all_is_one_line_and_exit_code_1(capsys):
    with pytest.raises(SystemExit) as ended:
        collectives([*ONCE, "--output", "/dev/full"])
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "No space left on device" in line


@pytest.mark.mpi
def test_of_several_ranks_one_says_that_a_file_cannot_be_written(tmp_path):
    done = mpirun(2, ["-m", "bench.collectives", *ONCE, "--output", str(tmp_path / "no" / "x")])
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("error: --output: ") == 1 and "Traceback" not in done.stderr


HUGE = {
    "digits": (collectives, ["-b", "9" * 400], "must be at most"),
    "superscript": (collectives, ["-e", "²"], "must be a size such as"),
    "root": (collectives, ["broadcast", "-r", "²"], "-r: must be a rank"),
    "no communicator": (collectives, ["-k", ""], "-k/--communicators: must be one or more"),
    "threads": (collectives, ["-t", "99999"], "-t, -g: must make at most 128 ranks"),
    "calls": (collectives, ["-n", "9" * 20], "calls are more than 10000000 in all"),
    "sizes": (collectives, ["-i", "1"], "-i: must make at most 100000 sizes"),
    "no memory for threads": (collectives, ["-t", "2", "-b", "999G", "-e", "999G"], "for which there is"),
    "window": (p2p, ["-t", "2", "-W", "9" * 12], "-e, -W: this run needs"),
    "side": (overlap, ["-t", "2", "--side", "9" * 7], "--side: this run needs"),
    "overlap": (overlap, ["-t", "2", "-e", "999G"], "-e: this run needs"),
    "copies": (offload, ["copies", "--megabytes", "9" * 7, "--blocks", "1M"], "--megabytes: this run needs"),
    "parameters": (offload, ["optimizer", "--parameters", "9" * 12], "--parameters: this run needs"),
    "no layer": (offload, ["optimizer", "--parameters", "1"], "--parameters: must be at least 4"),
    "rounds": (offload, ["disk", "--rounds", "9" * 12], "--rounds: must be at most"),
    "cells": (offload, ["bandwidth", "-b", "9" * 11], "-b: this run needs"),
    "test": (offload, ["bandwidth", "-t", "²"], "-t: unknown '²'"),
    "range": (offload, ["storage", "-i", "512:999G:512"], "more than 100000 sizes"),
    "seconds": (offload, ["storage", "-T", "1e300"], "-T: must be seconds, from 0 to 1000000"),
}


@pytest.mark.parametrize("run, words, message", HUGE.values(), ids=HUGE)
def test_numbers_out_of_range_are_one_line_and_exit_code_2(run, words, message, capsys):
    assert_refused(run, words, message, capsys)


ENVIRONMENT = (
    ("NCCL_TESTS_SPLIT", "OR 4294967295", "numbers of groups must be at most 2147483647"),
    ("NCCL_TESTS_ALLTOALLV_MATRIX_SCALE", "1e308", "MATRIX_SCALE: must be a number from 0 to 1e+12"),
    ("NCCL_TESTS_ALLTOALLV_MATRIX_FILE", "/dev/zero", "MATRIX_FILE /dev/zero: is no regular file"),
)


@pytest.mark.parametrize("name, value, message", ENVIRONMENT)
def test_nonsense_in_the_environment_is_refused(name, value, message, monkeypatch, tmp_path, capsys):
    matrix = tmp_path / "matrix"
    matrix.write_text("16 16\n16 16\n")
    monkeypatch.setenv("NCCL_TESTS_ALLTOALLV_MATRIX_FILE", str(matrix))
    monkeypatch.setenv(name, value)
    assert_refused(collectives, ["alltoallv", "-t", "2"], message, capsys)


def test_sizes_that_are_no_multiple_of_each_type(capsys):
    words = "-t 3 -b 1 -e 3 -i 1 -d all -n 1 --rounds 1 -w 0".split()
    assert collectives(words) == 0


def test_there_are_values_for_any_round():
    indices = np.arange(100, dtype=np.uint64)
    rounds = [values(1, indices, number, "int32") for number in (4095, 4096, 10**9)]
    assert not np.array_equal(*rounds[:2]) and not np.array_equal(*rounds[1:])


FOREVER = (
    ["collectives", "-t", "2", "all_reduce", "-e", "1K", "-N", "0"],
    ["offload", "bandwidth", "-b", "1", "-i", "1000000000"],
)


@pytest.mark.parametrize("words", FOREVER, ids=["threads", "alone"])
def test_ctrl_c_is_silent(words):
    with started(words) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + signal.SIGINT, "")


@pytest.mark.parametrize("words", [FOREVER[0], ["offload", "storage", "-s", "64K", "-i", "4K", "-T", "0.5"]])
def test_a_closed_pipe_is_silent(words):
    with started(words) as process:
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(timeout=60)
    assert (process.returncode, errors) == (128 + signal.SIGPIPE, "")


def started(words):
    """A benchmark in a process of its own, in which Ctrl-C is Python's."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from shardrt.tools.bench import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *words]
    return subprocess.Popen(command, cwd=ROOT, env=clean_environment(), **pipes)
