"""Communicators keep one contract on every backend; the mesh and the world say who communicates."""

import importlib.util
import os
import re
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from shardrt import _environment, device
from shardrt.comm import (
    CollectiveCounter,
    CollectiveDelay,
    PeerFailed,
    create,
    init_device_mesh,
    mpi_world,
    thread,
    world,
)
from shardrt.comm.objects import differing_ranks
from shardrt.comm.single import SingleCommunicator
from shardrt.device import cuda
from tests import lab
from tests.mpi.contract import Contract, digest
from tests.ranks import mpirun, python, run_ranks

INLINE = device.get("cpu").current_stream


class TestSingle(Contract):
    def run(self, body):
        body(SingleCommunicator())


class TestThreads(Contract):
    """Five: a tree of three levels, in which a rank is left over twice."""

    def run(self, body):
        run_ranks(5, lambda: body(create("thread")))


@pytest.mark.mpi
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_backends_of_mpi_keep_the_contract_with_the_bits_of_threads_and_train(size):
    done = mpirun(size, ["-m", "tests.mpi"])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    digests = set(re.findall(r"digest (\d+) ([0-9a-f]{64})", done.stdout))
    expected = run_ranks(size, lambda: digest(create()))
    assert digests == {(str(rank), bits) for rank, bits in enumerate(expected)}


@pytest.mark.mpi
def test_sums_of_eight_ranks_have_the_same_bits_on_any_nodes():
    done = mpirun(8, ["-m", "tests.mpi", "test_nodes.py"])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


# Ranks as threads


def test_a_failing_rank_wakes_the_others_and_is_named():
    woken = []

    def body():
        comm = create()
        if comm.rank == 2:
            time.sleep(0.05)  # let the others get out of create()
            raise KeyError("lost")
        with pytest.raises(PeerFailed, match="rank 2 failed: KeyError"):
            if comm.rank == 0:
                comm.recv(np.zeros(1), peer=1, stream=INLINE)
            else:
                comm.barrier(stream=INLINE)
        woken.append(comm.rank)

    before = set(threading.enumerate())
    with pytest.raises(KeyError, match="lost") as caught:
        run_ranks(4, body)
    assert caught.value.__notes__ == ["on rank 2 of 4 (thread world)"]
    assert sorted(woken) == [0, 1, 3]
    assert not set(threading.enumerate()) - before


def test_a_failure_in_a_rank_wakes_streams_of_the_others():
    def body():
        comm, stream = create(), device.get("cpu").new_stream("gather")
        if comm.rank == 1:
            raise RuntimeError("first")
        comm.all_gather(np.zeros(4), stream=stream)
        stream.synchronize()

    with pytest.raises(RuntimeError, match="first"):
        run_ranks(2, body)


def test_who_waits_for_a_message_that_nobody_sends_is_told_whose(monkeypatch):
    """A rank may have caught its error, and be at something else."""
    monkeypatch.setattr(thread, "_PATIENCE", 0.1)

    def body():
        comm = create()
        if comm.rank == 1:
            comm.recv(np.empty(1), peer=0, stream=INLINE)

    with pytest.raises(PeerFailed, match=r"a message from rank 0 did not come in 0 s"):
        run_ranks(2, body)


def test_results_come_by_rank_and_the_world_ends_with_the_run():
    assert run_ranks(3, lambda factor: world.current().rank * factor, 10) == [0, 10, 20]
    assert world.current().kind == "single"


# Arguments


def of_kind(kind, *, output=None, buffer=None):
    output = np.zeros(2, np.float32) if output is None else output
    buffer = np.zeros(2, np.uint16) if buffer is None else buffer
    ALONE.reduce_scatter(output, buffer, kind=kind, stream=INLINE)


def by_counts(received, sent):
    ALONE.all_to_all(np.zeros(2), np.zeros(2), received=received, sent=sent, stream=INLINE)


def scattered(output, buffer, **how):
    ALONE.reduce_scatter(output, buffer, stream=INLINE, **how)


ALONE = SingleCommunicator()
BITS = np.zeros(2, np.uint16)
test_a_wrong_argument_is_refused_in_the_caller = lab.refusals(
    (lambda: ALONE.all_gather(np.zeros(4), stream=None), TypeError, "stream must be"),
    (lambda: ALONE.all_gather([1.0], stream=INLINE), TypeError, "buffer must be an array, got list"),
    (lambda: ALONE.all_gather(np.zeros((2, 2)), stream=INLINE), r"1-D.*\(2, 2\)"),
    (lambda: ALONE.all_gather(np.zeros(8)[::2], stream=INLINE), "contiguous"),
    (lambda: ALONE.broadcast(np.zeros(2, "f2"), root=0, stream=INLINE), TypeError, "float16; supported"),
    (lambda: ALONE.broadcast(np.zeros(2), root=3, stream=INLINE), "root must be .* 0 to 0, got 3"),
    (lambda: ALONE.all_reduce(np.zeros(2), op="mean", stream=INLINE), "op is 'mean'"),
    (lambda: ALONE.all_reduce(BITS, stream=INLINE), TypeError, "uint16 holds 16-bit floats"),
    (
        lambda: ALONE.send(np.zeros(2), peer=0, stream=INLINE),
        "peer must be another rank than this one, got 0",
    ),
    (
        lambda: scattered(np.zeros(4, np.float32), np.zeros(4)),
        TypeError,
        "output is float32, buffer is float64",
    ),
    (lambda: scattered(np.zeros(3), np.zeros(4)), "output has 3 elements, so buffer needs 3; it has 4"),
    (
        lambda: scattered(np.zeros(2, int), np.zeros(2, int), scale=0.5),
        TypeError,
        "can only be summed with scale 1",
    ),
    (lambda: scattered(BITS.copy(), BITS), TypeError, "uint16 holds 16-bit floats.*kind='bfloat16'"),
    (lambda: of_kind("float8"), "kind is 'float8'; known are bfloat16, float16"),
    (
        lambda: of_kind("float16", buffer=np.zeros(2, np.float32)),
        TypeError,
        "buffer must be uint16 with kind='float16', got float32",
    ),
    (
        lambda: of_kind("bfloat16", output=np.zeros(2, np.uint16)),
        TypeError,
        "output must be float32 with kind='bfloat16', got uint16",
    ),
    (
        lambda: of_kind("bfloat16", output=np.zeros(3, np.float32)),
        "output has 3 elements, so buffer needs 3; it has 2",
    ),
    (lambda: by_counts(None, [2]), "pass both received and sent, or neither"),
    (lambda: by_counts([2], [1]), r"sent is \(1,\): .*each of the 1 ranks.* the 2 elements of buffer"),
    (lambda: by_counts([3], [2]), r"received is \(3,\): .*add up to the 2 elements of output"),
    (lambda: by_counts([2], [1, 1]), r"sent is \(1, 1\): it must be a count for each of the 1"),
    (lambda: by_counts([2], [-1, 3]), r"sent is \(-1, 3\)"),
    (lambda: by_counts([2], [2.0]), TypeError, "'float' object cannot be interpreted as an integer"),
    (lambda: ALONE.barrier(stream=INLINE, tag=3), TypeError, "tag must be a string, got 3"),
)


def test_a_buffer_that_does_not_divide_is_refused_by_all():
    def body():
        with pytest.raises(ValueError, match="7 elements, not a multiple of the 2 ranks"):
            create().all_gather(np.zeros(7), stream=INLINE)

    run_ranks(2, body)


def test_output_may_lie_in_buffer_only_as_the_own_slice():
    def body():
        comm = create()
        buffer = np.ones(4)
        with pytest.raises(ValueError, match="overlaps buffer other than"):
            comm.reduce_scatter(buffer[1:3], buffer, stream=INLINE)
        with pytest.raises(ValueError, match="overlaps buffer"):
            comm.all_to_all(buffer, buffer, stream=INLINE)
        with pytest.raises(ValueError, match="overlaps buffer"):
            comm.all_to_all(buffer[1:3], buffer[:2], received=[1, 1], sent=[1, 1], stream=INLINE)
        bits = np.zeros(8, np.uint16)
        with pytest.raises(ValueError, match="overlaps buffer; give it memory of its own"):
            comm.reduce_scatter(bits.view(np.float32), bits, kind="bfloat16", stream=INLINE)

    run_ranks(2, body)


# Interceptors


@pytest.mark.parametrize("size", [1, 4])
def test_counted_bytes_are_the_formulas(size):
    def body():
        comm = create()
        counted = CollectiveCounter(comm)
        full, part = np.zeros(size * 10, np.float32), np.zeros(10, np.float32)
        comm.all_gather(full, stream=INLINE)
        comm.reduce_scatter(part, full, stream=INLINE)
        comm.reduce_scatter(part, full, stream=INLINE)
        comm.all_reduce(full, stream=INLINE)
        comm.barrier(stream=INLINE)
        return counted.calls, counted.bytes

    for calls, sent in run_ranks(size, body):
        assert calls == {"all_gather": 1, "reduce_scatter": 2, "all_reduce": 1, "barrier": 1}
        slices = (size - 1) * 10 * 4
        expected = {"all_gather": slices, "reduce_scatter": 2 * slices, "all_reduce": 2 * slices}
        assert +sent == {name: count for name, count in expected.items() if count}


def test_counted_bytes_of_counts_per_peer_are_what_comes_from_others():
    def body():
        comm = create()
        counted = CollectiveCounter(comm)
        received = [2 * s + comm.rank for s in range(3)]
        sent = [2 * comm.rank + r for r in range(3)]
        comm.all_to_all(
            np.zeros(sum(received)), np.zeros(sum(sent)), received=received, sent=sent, stream=INLINE
        )
        return counted.calls, counted.bytes["all_to_all"]

    counted = [sum(2 * s + r for s in range(3) if s != r) for r in range(3)]
    assert run_ranks(3, body) == [({"all_to_all": 1}, 8 * count) for count in counted]


class TestIntercepted(Contract):
    """What sees calls changes none, on two threads."""

    def run(self, body):
        def intercepted():
            comm = create()
            CollectiveDelay(comm, 0.0)
            CollectiveCounter(comm)
            body(comm)

        run_ranks(2, intercepted)


def test_ranks_agree_or_are_told_who_differs():
    def body():
        comm = create()
        return differing_ranks(comm, {"a": 1.5}), differing_ranks(comm, ["x"] * (1 + (comm.rank == 2)))

    assert run_ranks(4, body) == [([], [2])] * 4
    assert differing_ranks(SingleCommunicator(), 1) == []


# Mesh


MESHES = """
from shardrt.comm import init_device_mesh
for number in range(700):
    mesh = init_device_mesh("cpu", communicator="mpi" if number % 10 else "auto")
    for role in ("gather", "reduce", "control"):
        mesh.communicator(role).barrier(stream=mesh.device.current_stream)
"""


@pytest.mark.mpi
def test_meshes_are_made_and_dropped_without_end():
    """Of the 2,048 communicators that MPICH has room for, each takes four."""
    done = mpirun(2, ["-c", MESHES])
    assert (done.returncode, done.stderr) == (0, "")


def test_a_mesh_of_one_axis_is_the_world():
    def body():
        mesh = init_device_mesh()
        comm = mesh.communicator("gather")
        assert comm is mesh.communicator("gather", 0)
        assert comm is not mesh.communicator("reduce")
        return mesh.rank, mesh.size, mesh.shape, (comm.rank, comm.size)

    assert run_ranks(3, body) == [(rank, 3, (3,), (rank, 3)) for rank in range(3)]


FOR_GPUS = "needs a GPU, but the device is 'cpu'"
SHAPED = r"shape \(2, 2\) needs 4 ranks, but 1 rank is running.*mpirun -n 4"
test_what_cannot_be_says_why = lab.refusals(
    (lambda: init_device_mesh("cpu", (2, 2)), SHAPED),
    (lambda: init_device_mesh("cpu", (1,), ("a", "b")), "one name for each axis"),
    (lambda: init_device_mesh("cpu", (1, 1), ("a", "a")), "one name for each axis"),
    (lambda: init_device_mesh("abacus"), "'abacus'"),
    (lambda: init_device_mesh("cpu").communicator("gather", "p"), "'p' is not an axis"),
    (lambda: init_device_mesh("cpu", reduction="ring"), "'ring' is unknown; known are nccl, tree"),
    (lambda: init_device_mesh("cpu", communicator="staged"), f"'staged' {FOR_GPUS}"),
    (lambda: init_device_mesh("cpu", communicator="nccl"), f"'nccl' {FOR_GPUS}"),
    (lambda: init_device_mesh("cpu", communicator="ipc"), f"'ipc' {FOR_GPUS}"),
    (lambda: create("telepathy"), "'telepathy' is unknown; known are auto"),
    (lambda: create("thread"), "'thread' can't be used in"),
)


def test_cuda_without_cupy_is_one_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r"device 'cuda' needs CuPy .*pip install 'shardrt\[cuda\]'"):
        init_device_mesh("cuda")


def test_cuda_without_a_gpu_is_one_clear_error():
    """In a process of its own: in this one tests may have put the GPU emulator below CuPy."""
    if importlib.util.find_spec("cupy") is None or cuda.count():
        pytest.skip("no CuPy, or a GPU")
    program = "from shardrt.comm import init_device_mesh; init_device_mesh('cuda')"
    done = python("-c", program)
    said = r"RuntimeError: device 'cuda' needs a GPU, and finds none .*; use 'cpu'"
    assert done.returncode == 1 and re.match(said, done.stderr.splitlines()[-1])


# World


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ("", None),
        ("PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", (1, 4, 1, 2)),
        ("PMI_RANK=1 PMI_SIZE=4", (1, 4, 0, 4)),
        (
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 "
            "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            (3, 4, 1, 2),
        ),
        (
            "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=4(x2)",
            (5, 8, 1, 4),
        ),
        (  # hosts with unequal numbers of ranks
            "SLURM_PROCID=9 SLURM_STEP_NUM_TASKS=11 SLURM_LOCALID=1 SLURM_NODEID=2 "
            "SLURM_STEP_TASKS_PER_NODE=4(x2),3",
            (9, 11, 1, 3),
        ),
        (  # srun --mpi=pmi2
            "PMI_RANK=5 PMI_SIZE=8 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=4(x2)",
            (5, 8, 1, 4),
        ),
        ("SLURM_PROCID=0 SLURM_NTASKS=8", None),  # a batch script, not a task of srun
    ],
)
def test_a_launcher_is_known_by_its_environment(environment, expected):
    launch = mpi_world.launch(dict(word.split("=") for word in environment.split()))
    found = launch and (launch.rank, launch.size, launch.local_rank, launch.local_size)
    assert found == expected


@pytest.mark.parametrize(
    ("own", "launcher", "ranks", "threads"),
    [
        (64, 64, 4, 16),
        (4, 4, 4, 1),  # four cores of a large machine, not bound to one each
        (1, 64, 4, 1),  # bound to a core
        (16, 64, 4, 16),  # bound to a quarter
        (32, 64, 4, 16),  # bound by twos
        (2, 2, 8, 1),
    ],
)
def test_ranks_share_the_cores_that_their_launcher_has(monkeypatch, own, launcher, ranks, threads):
    cores = {0: range(own), os.getppid(): range(launcher)}
    monkeypatch.setattr(os, "sched_getaffinity", cores.get)
    monkeypatch.setattr(_environment, "_quota", lambda: 1000)
    monkeypatch.setenv("MPI_LOCALNRANKS", str(ranks))
    assert _environment.threads_per_rank() == threads


def test_tasks_of_srun_share_the_cores_of_a_launcher_that_is_not_theirs_to_look_at(monkeypatch):
    cores = {0: range(4), os.getppid(): range(64)}  # --cpus-per-task=4
    monkeypatch.setattr(os, "sched_getaffinity", cores.get)
    monkeypatch.setattr(_environment, "_quota", lambda: 1000)
    for name in _environment._LOCAL_SIZE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "8(x2),2")
    monkeypatch.setenv("SLURM_NODEID", "1")

    def refused(path):
        raise PermissionError(13, "slurmstepd is root's", str(path))

    monkeypatch.setattr(Path, "read_bytes", refused)
    assert _environment.threads_per_rank() == 4
    cores[0] = range(64)  # not bound
    assert _environment.threads_per_rank() == 8
    monkeypatch.setenv("SLURM_NODEID", "2")
    assert _environment.threads_per_rank() == 32


def test_a_plain_script_needs_no_mpi():
    code = "import sys; from shardrt.comm import init_device_mesh as m; m(); print('mpi4py' in sys.modules)"
    assert python("-c", code).stdout.split() == ["False"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE=2 says 2 ranks.*mpirun -n 2"),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
            "OMPI_COMM_WORLD_SIZE=2, but MPI here sees 1 rank.*use the mpirun next to this python",
        ),
    ],
)
def test_told_of_ranks_that_are_not_there_is_one_clear_error(variables, message):
    pytest.importorskip("mpi4py")
    done = python("-c", "from shardrt.comm import init_device_mesh; init_device_mesh()", **variables)
    assert done.returncode == 1
    assert re.search(message, done.stderr.splitlines()[-1])
