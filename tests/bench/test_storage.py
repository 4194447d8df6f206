"""bench.offload storage: each block once, each byte checked, figures that fit each other, refusals."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest

from bench.offload import io, storage
from bench.offload.__main__ import main
from bench.offload.io import File, Pattern, Slot, Worker
from tests.bench.nonsense import assert_refused
from tests.ranks import ROOT, clean_environment, mpirun
from tests.softgpu.available import missing
from tests.softgpu.fixtures import software, without_cudnn

__all__ = ["software", "without_cudnn"]

KIB, GIB = 1 << 10, 1 << 30
BLOCK, BLOCKS = 4 * KIB, 16  # a block that each O_DIRECT takes
SMALL = ["-s", "64K", "-i", "4K"]
TYPES = ["READ", "WRITE", "RANDREAD", "RANDWRITE"]


def lines_of(folder, capsys, *more, code=0):
    """The lines of a run on small files."""
    assert main(["storage", "-D", str(folder), *SMALL, *more, "--json"]) == code
    assert list(folder.iterdir()) == []
    return json.loads(capsys.readouterr().out)["lines"]


@pytest.fixture
def requests(monkeypatch):
    """(what, file, offset) of all requests, in the order in which they were made."""
    seen = []
    for what in ("read", "write"):
        right = getattr(Slot, what)

        def request(slot, fd, offset, what=what, right=right):
            seen.append((what, fd, offset))
            return right(slot, fd, offset)

        monkeypatch.setattr(Slot, what, request)
    return seen


@pytest.mark.parametrize("buffered", "01")
def test_figures_fit_each_other(buffered, tmp_path, capsys):
    more = ["-w", "2", "--queue-depth", "2", "-O", buffered]
    lines = lines_of(tmp_path, capsys, *more)
    assert [line["IoType"] for line in lines] == TYPES
    for line in lines:
        assert line["wrong"] == 0 and line["Threads"] == 2
        assert line["ops"] == 2 * BLOCKS and line["moved_KiB"] == line["DataSetSize_KiB"] == 128
        nbytes = line["read_bytes"] + line["written_bytes"]
        assert nbytes == 2 * BLOCKS * BLOCK
        assert line["Throughput_GiB_s"] * line["total_time_s"] == pytest.approx(nbytes / GIB)
        assert line["iops"] * line["total_time_s"] == pytest.approx(line["ops"])
        assert 0 < line["p50_us"] <= line["p99_us"] <= line["max_us"] <= 1e6 * line["total_time_s"]
        # Four requests are in flight at most, each for its latency.
        assert line["Avg_Latency_us"] * line["ops"] <= 4e6 * line["total_time_s"]
    assert buffered == "0" or all(line["open"] == "buffered" for line in lines)


@pytest.mark.parametrize("place", [["-D"], ["-f"]])
@pytest.mark.parametrize("kind", range(4))
def test_each_pattern_makes_one_request_for_each_block(kind, place, requests, tmp_path, capsys):
    path = tmp_path if place == ["-D"] else tmp_path / "new"
    options = [*place, str(path), *SMALL, "-I", str(kind), "-w", "2", "--queue-depth", "3"]
    assert main(["storage", *options]) == 0
    files = 2 if place == ["-D"] else 1
    count = files * BLOCKS
    written, timed, verified = (requests[n * count : (n + 1) * count] for n in range(3))
    what = "read" if kind in (0, 2) else "write"
    assert {each[0] for each in written} == {"write"} and {each[0] for each in verified} == {"read"}
    assert {each[0] for each in timed} == {what}
    offsets = {offset for _, _, offset in timed}
    assert offsets == {BLOCK * block for block in range(BLOCKS)}
    assert set(Counter(each[1:] for each in timed).values()) == {1} and len(timed) == count
    assert len(requests) == 3 * count


def test_sequential_is_in_order_and_random_is_another_order_for_another_seed(requests, tmp_path, capsys):
    orders = {}
    for kind, seed in (("0", "1"), ("2", "1"), ("2", "1"), ("2", "2")):
        requests.clear()
        lines_of(tmp_path, capsys, "-I", kind, "-k", seed)
        order = [offset // BLOCK for _, _, offset in requests[BLOCKS : 2 * BLOCKS]]
        assert orders.setdefault((kind, seed), order) == order  # a seed repeats its order
    assert orders["0", "1"] == list(range(BLOCKS))
    assert len({tuple(order) for order in orders.values()}) == 3


@pytest.mark.parametrize("percent, reads", [(0, 0), (70, 11), (50, 8), (100, 16)])
@pytest.mark.parametrize("kind, name", [("1", "RW"), ("3", "RANDRW")])
def test_mixed_requests_have_their_share_of_reads(percent, reads, kind, name, tmp_path, capsys):
    (line,) = lines_of(tmp_path, capsys, "-M", str(percent), "-I", kind)
    assert line["reads_percent"] == percent
    assert line["read_bytes"] == reads * BLOCK and line["written_bytes"] == (BLOCKS - reads) * BLOCK
    only = {0: "WRITE", 100: "READ"}.get(percent, "RW")
    assert line["IoType"] == name.replace("RW", only)


def test_the_places_of_reads_are_not_those_of_a_pattern():
    reading = Pattern(False, 50).reading(1000, np.random.default_rng(0))
    assert reading.sum() == 500 and 300 < np.count_nonzero(reading[1:] != reading[:-1]) < 700


FLIPS = {"a stamp": 3 * 512 + 2, "between stamps": 700, "the last byte": BLOCKS * BLOCK - 1}


@pytest.mark.parametrize("kind", "01")
@pytest.mark.parametrize("place", FLIPS.values(), ids=FLIPS)
def test_a_byte_that_flips_on_the_disk_is_found(place, kind, monkeypatch, tmp_path, capsys):
    """After the file is laid out, before it is read; or after it was written while time was taken."""
    right, runs = io.run, []

    def run(workers, *args, **kwargs):
        found = right(workers, *args, **kwargs)
        runs.append(found)
        if len(runs) == 1 + int(kind):
            with open(f"/proc/self/fd/{workers[0].file.fd}", "r+b") as file:
                file.seek(place)
                (byte,) = file.read(1)
                file.seek(place)
                file.write(bytes([byte ^ 1]))
                file.flush()
                os.fsync(file.fileno())
        return found

    monkeypatch.setattr(storage, "run", run)
    (line,) = lines_of(tmp_path, capsys, "-I", kind, code=1)
    assert line["wrong"] >= 1 and line["ops"] is None
    assert line["Throughput_GiB_s"] is None and line["Avg_Latency_us"] is None


def test_a_write_that_does_not_happen_is_found(monkeypatch, tmp_path, capsys):
    right, made = Slot.write, []

    def write(slot, fd, offset):
        made.append(offset)
        return slot.nbytes if len(made) > BLOCKS and offset == BLOCK else right(slot, fd, offset)

    monkeypatch.setattr(Slot, "write", write)
    (line,) = lines_of(tmp_path, capsys, "-I", "3", code=1)
    assert line["wrong"] == 1  # the block has the values of the round before


def test_a_write_to_another_place_is_found(monkeypatch, tmp_path, capsys):
    right = Slot.write
    monkeypatch.setattr(
        Slot, "write", lambda slot, fd, offset: right(slot, fd, 0 if offset == BLOCK else offset)
    )
    (line,) = lines_of(tmp_path, capsys, "-I", "1", code=1)
    assert line["wrong"] == 2  # the block that was overwritten and the block that was not


def test_a_timed_read_of_another_place_is_found_without_the_second_pass(monkeypatch, tmp_path, capsys):
    right = Slot.read
    monkeypatch.setattr(
        Slot, "read", lambda slot, fd, offset: right(slot, fd, 0 if offset == BLOCK else offset)
    )
    (line,) = lines_of(tmp_path, capsys, "-I", "2", "--no-verify", code=1)
    assert line["wrong"] == 1


def test_a_block_of_another_place_or_file_is_wrong(tmp_path):
    file = File(tmp_path / "one", 2 * BLOCK, False, 5)
    workers = [Worker(file, first, 1, BLOCK, [Slot(BLOCK, 5)]) for first in (0, BLOCK)]
    io.run(workers, Pattern(False, 0))
    assert [worker.wrong_blocks() for worker in workers] == [0, 0]
    of_another_file = Worker(file, 0, 1, BLOCK, [Slot(BLOCK, 6)])
    of_another_file.rounds[:] = 1
    assert of_another_file.wrong_blocks() == 1
    of_another_round = Worker(file, 0, 1, BLOCK, [Slot(BLOCK, 5)])
    of_another_round.rounds[:] = 2
    assert of_another_round.wrong_blocks() == 1
    first, second = (os.pread(file.fd, BLOCK, offset) for offset in (0, BLOCK))
    os.pwrite(file.fd, second + first, 0)
    assert [worker.wrong_blocks() for worker in workers] == [1, 1]
    file.close()


def test_a_duration_makes_more_passes_and_checks_them(tmp_path, capsys):
    lines = lines_of(tmp_path, capsys, "-T", "0.3", "--queue-depth", "2", "-w", "2", "-M", "50", "-I", "0,2")
    for line in lines:
        assert line["wrong"] == 0 and line["ops"] > 2 * BLOCKS and line["total_time_s"] >= 0.25
        assert line["read_bytes"] + line["written_bytes"] == line["ops"] * BLOCK


def test_several_sizes_and_a_range(tmp_path, capsys):
    lines = lines_of(tmp_path, capsys, "-I", "1,0", "-i", "4K,16K")
    assert [(line["IoType"], line["IOSize_KiB"]) for line in lines] == [
        ("WRITE", 4),
        ("READ", 4),
        ("WRITE", 16),
        ("READ", 16),
    ]
    lines = lines_of(tmp_path, capsys, "-I", "0", "-i", "4K:12K:4K", "-s", "96K")
    assert [line["IOSize_KiB"] for line in lines] == [4, 8, 12]


def test_a_file_system_without_o_direct_is_buffered_and_its_reads_come_from_the_disk(
    monkeypatch, tmp_path, capsys
):
    events, opened, forget, sync = [], os.open, os.posix_fadvise, os.fdatasync

    def refuse(path, flags, *mode, **more):
        if flags & os.O_DIRECT:
            os.close(opened(path, flags & ~os.O_DIRECT, *mode))  # Linux makes the file, then refuses it
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: events.append(args[1:]) or forget(*args))
    monkeypatch.setattr(os, "fdatasync", lambda fd: events.append("sync") or sync(fd))
    lines = lines_of(tmp_path, capsys, "-I", "0,1")
    assert [line["open"] for line in lines] == ["buffered"] * 2
    assert (0, 0, os.POSIX_FADV_DONTNEED) in events and "sync" in events
    events.clear()
    (line,) = lines_of(tmp_path, capsys, "-I", "2", "-T", "0.3")
    passes = line["ops"] / BLOCKS
    dropped = events.count((0, 0, os.POSIX_FADV_DONTNEED))
    assert passes > 2 and dropped >= passes


def test_the_time_of_buffered_writes_has_their_way_to_the_disk(monkeypatch, tmp_path):
    file = File(tmp_path / "one", BLOCKS * BLOCK, False, 0)
    worker = Worker(file, 0, BLOCKS, BLOCK, [Slot(BLOCK, 0)])
    monkeypatch.setattr(File, "write_out", lambda self: time.sleep(0.2))
    assert io.run([worker], Pattern(False, 0)).seconds >= 0.2
    file.close()


def pieces_of(least, monkeypatch):
    """O_DIRECT that takes multiples of `least` bytes alone."""
    right = os.preadv

    def preadv(fd, buffers, offset):
        if len(buffers[0]) % least or offset % least:
            raise OSError(errno.EINVAL, "Invalid argument")
        return right(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)


def test_a_size_that_o_direct_does_not_take_is_refused(monkeypatch, tmp_path, capsys):
    file = File(tmp_path / "probe", BLOCK, True, 0)
    if not file.direct:
        pytest.skip("no O_DIRECT here")
    pieces_of(4096, monkeypatch)
    message = "-i: must be a multiple of 4096 bytes, which O_DIRECT takes here, got 512"
    assert_refused(main, ["storage", "-D", str(tmp_path), "-s", "64K", "-i", "512"], message, capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("huge", [False, True])
def test_buffers_begin_at_a_page(huge):
    slot = Slot(BLOCK, 0, huge)
    page = 1 << 21 if huge else 4096
    assert slot.out.ctypes.data % page == slot.into.ctypes.data % page == 0
    assert slot.out.nbytes == slot.into.nbytes == BLOCK


def test_a_request_that_fails_ends_the_run_in_one_line(monkeypatch, tmp_path, capsys):
    right, made = Slot.read, []

    def read(slot, fd, offset):
        made.append(offset)
        if len(made) == 3:
            raise OSError(errno.EIO, "Input/output error")
        return right(slot, fd, offset)

    monkeypatch.setattr(Slot, "read", read)
    with pytest.raises(SystemExit) as ended:
        main(["storage", "-D", str(tmp_path), *SMALL, "-I", "0", "-w", "2", "-T", "5"])
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "Input/output error" in line


def test_a_short_read_is_an_error(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(Slot, "read", lambda slot, fd, offset: 512)
    with pytest.raises(SystemExit) as ended:
        main(["storage", "-D", str(tmp_path), *SMALL, "-I", "0"])
    assert ended.value.code == 1
    assert "512 of 4096 bytes were read at 0" in capsys.readouterr().err


@pytest.mark.mpi
def test_ranks_have_files_of_their_own_and_one_line(tmp_path):
    options = ["-f", str(tmp_path / "new"), *SMALL, "-I", "0,3", "-w", "2", "--json"]
    done = mpirun(2, ["-m", "bench.offload", "storage", *options])
    assert done.returncode == 0, done.stderr
    (found,) = done.stdout.splitlines()
    for line in json.loads(found)["lines"]:
        assert (line["ranks"], line["Threads"], line["wrong"]) == (2, 4, 0)
        assert line["ops"] == 2 * BLOCKS and line["DataSetSize_KiB"] == 128
        assert line["slowest_rank_GiB_s"] * line["total_time_s"] == pytest.approx(BLOCKS * BLOCK / GIB)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.mpi
def test_of_several_ranks_one_refuses(tmp_path):
    done = mpirun(2, ["-m", "bench.offload", "storage", "-D", str(tmp_path), "-i", "700"])
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[0] == "error: -i: must be a multiple of 512 bytes, got 700"
    assert done.stderr.count("error: -i") == 1


def test_ctrl_c_leaves_no_file(tmp_path):
    options = ["-D", str(tmp_path), "-s", "64K", "-i", "4K", "-w", "2", "--queue-depth", "2", "-T", "60"]
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from bench.offload.__main__ import main; sys.exit(main(['storage', *sys.argv[1:]]))"
    command = [sys.executable, "-c", code, *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=clean_environment(), **pipes) as process:
        while (line := process.stdout.readline()) and not line.startswith("# IoType"):
            pass
        threads = f"/proc/{process.pid}/task"
        while process.poll() is None and len(os.listdir(threads)) < 5:  # until requests are made
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_blocks_go_to_a_gpu_and_come_from_there(software, tmp_path, capsys):
    lines = lines_of(tmp_path, capsys, "-x", "2", "-w", "2", "-d", "1")
    assert [(line["IoType"], line["XferType"], line["wrong"]) for line in lines] == [
        (name, "CPU_GPU", 0) for name in TYPES
    ]


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_block_that_does_not_get_to_the_gpu_is_found(software, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(io.GPUSlot, "read", Slot.read)
    (line,) = lines_of(tmp_path, capsys, "-x", "2", "-I", "0", code=1)
    assert line["wrong"] == BLOCKS


NONSENSE = {
    "no multiple": (["-s", "1M", "-i", "3M"], "-s: 1048576 bytes are no multiple of -i, 3145728 bytes"),
    "no sector": (["-i", "700"], "-i: must be a multiple of 512 bytes, got 700"),
    "no size": (["-i", "many"], "must be a size such as 4096, 4K, 16M or 1G, got 'many'"),
    "half a range": (["-i", "4K:8K"], "a range has three parts, least:most:step, got '4K:8K'"),
    "empty range": (["-i", "8K:4K:4K"], "least:most:step has no size in '8K:4K:4K'"),
    "no worker": (["-w", "0"], "-w: must be at least 1, got 0"),
    "no depth": (["--queue-depth", "0"], "--queue-depth: must be at least 1, got 0"),
    "deep": (["-s", "2M", "--queue-depth", "3"], "--queue-depth: 3 requests in flight need as many blocks"),
    "type": (["-I", "4"], "-I: must be of 0, 1, 2, 3, got '4'"),
    "share": (["-M", "101"], "-M: must be a percentage of 0 to 100, got 101"),
    "time": (["-T", "nan"], "-T: must be seconds, from 0 to 1000000, got nan"),
    "seed": (["-k", "-1"], "-k: must be at least 0, got -1"),
    "node": (["-n", "99"], "-n: no NUMA node 99; known: 0"),
    "cuFile": (["-x", "0"], "-x: 0 is not taken: it needs cuFile"),
    "no path": (["-x", "8"], "-x: must be 1 or 2, got 8"),
    "no GPU": (["-x", "2"], "-x: 2 copies to and from a GPU, and there is none here"),
    "GPU of none": (["-d", "0"], "-d: names a GPU, and only -x 2 uses one, got 0"),
    "batches": (["-B", "4"], "-B: not taken here: there are no batches"),
    "unaligned": (["-U"], "-U: not taken here: offsets are multiples of the I/O size"),
    "no directory": (["-D", "/nowhere"], "-D: /nowhere is no directory"),
    "no folder": (["-f", "/nowhere/file"], "-f: /nowhere is no directory"),
    "a file that is there": (["-f", __file__, "-s", "4M"], f"-f: {__file__} exists; name a new file"),
    "both": (["-f", "x", "-D", "."], "-f, -D: give a file or a directory, not both"),
    "no room": (["-s", str(1 << 60)], f"bytes free, and this run needs {1 << 60}"),
    "unknown": (["--iodepth", "3"], "unrecognized arguments: --iodepth 3"),
}


@pytest.mark.parametrize("words, message", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_one_line_and_exit_code_2(words, message, capsys):
    assert_refused(main, ["storage", *words], message, capsys)


def test_a_directory_that_is_not_writable_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may write anywhere
    message = f"-D: {tmp_path} is not writable"
    assert_refused(main, ["storage", "-D", str(tmp_path), *SMALL], message, capsys)
