"""A model whose states are 8 times what a rank may hold: it trains, and without sharding it does not."""

import errno
import re
import resource

import numpy as np
import pytest

from shardrt import device
from shardrt.device import host
from tests.ranks import mpirun, python


def run(ranks, *arguments):
    return mpirun(ranks, ["-m", "models.beyond_memory", "--steps", "2", *arguments])


def numbers(pattern, text):
    found = re.search(pattern, text)
    assert found, text
    return [float(number) for number in found.groups()]


@pytest.mark.slow
@pytest.mark.mpi
def test_states_of_eight_times_the_limit_train_to_the_bits_of_a_run_without_a_limit(tmp_path):
    limited = run(2, "--directory", str(tmp_path))
    assert limited.returncode == 0, limited.stderr
    states, budget = numbers(r"optimizer state ([\d.]+) MB; a rank may hold ([\d.]+) MB", limited.stdout)
    assert states >= 8 * budget - 0.5
    counted, limit = numbers(r"([\d.]+) MB count against the limit of ([\d.]+) MB", limited.stdout)
    assert counted <= limit == budget
    (resident,) = numbers(r"([\d.]+) MB resident at most", limited.stdout)
    # Pages of files are not limited, and how many are under way at once is up to the timing: in all 1.08 to
    # 1.31 of the budget. 2.9 where what is gathered stays, 3.8 where what is updated does.
    assert resident < 1.5 * budget
    first, last = numbers(r"loss fell from ([\d.]+) to ([\d.]+)", limited.stdout)
    assert last < first - 0.5
    assert list(tmp_path.iterdir()) == []

    unlimited = run(2, "--in-memory")
    assert unlimited.returncode == 0, unlimited.stderr
    counted, limit = numbers(r"([\d.]+) MB count against the limit of ([\d.]+) MB", unlimited.stdout)
    assert counted > 2 * limit  # so the limit would have stopped it
    pattern = r"step .*|parameters: .*"
    assert re.findall(pattern, unlimited.stdout) == re.findall(pattern, limited.stdout)


@pytest.mark.mpi
def test_without_sharding_the_same_run_ends_with_a_message_and_an_error_code(tmp_path):
    done = run(2, "--unsharded", "--directory", str(tmp_path))
    assert done.returncode == 1
    assert "step " not in done.stdout
    assert re.search(r"^out of memory: 31\.8 MB per rank do not suffice: ", done.stderr, re.M), done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_arrays_of_ops_count_against_the_limit_and_too_many_are_a_memory_error():
    program = """if True:
        import resource
        import numpy as np
        from shardrt import device
        here = device.get("cpu")
        held = [here.empty(1 << 22, np.float32)]
        text = open("/proc/self/status").read()
        now = 1024 * int(text.partition("VmData:")[2].split()[0])
        resource.setrlimit(resource.RLIMIT_DATA, (now + (40 << 20), resource.RLIM_INFINITY))
        try:
            for _ in range(9):
                held.append(here.empty(1 << 22, np.float32))
        except MemoryError as error:
            print(len(held), error)
    """
    done = python("-c", program)
    assert done.stdout.startswith("3 no memory for an array of 16777216 bytes"), done.stdout + done.stderr


def test_a_full_disk_is_an_error_at_setup_that_names_the_directory(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match=f"directory {tmp_path} has no room for 4194304 bytes") as caught:
            host.buffer(device.get("cpu"), 1 << 20, np.float32, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []
