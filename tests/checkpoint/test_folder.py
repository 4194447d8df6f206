"""What else may lie in a folder of checkpoints, and file systems that can't do all that others can."""

import errno
import os
import stat

import pytest

from shardrt.__main__ import main
from shardrt.checkpoint import Store, verify
from shardrt.checkpoint.disk import Disk
from shardrt.checkpoint.manifest import _checksum
from shardrt.comm import thread
from shardrt.faults.lock import lock
from tests.checkpoint.disks import Watched
from tests.checkpoint.test_checkpoints import damage, made, names, resume, two_saved
from tests.checkpoint.test_damage import body, write


@pytest.fixture
def root(tmp_path):
    """A folder with checkpoints 1 and 2."""
    thread.run(2, two_saved, tmp_path / "c")
    return tmp_path / "c"


def steps_found(root):
    return [step for _, step, _ in thread.run(2, resume, root, until=0)]


def test_what_is_not_ours_is_passed_over_by_name(root, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("kept")
    strange = [
        ".tmp-step-00000003-0123abcd",
        ".trash-step-00000001",
        ".replaced-step-00000009",
        "step-00000007",
    ]
    (root / strange[0]).symlink_to(tmp_path / "kept")
    (root / strange[1]).write_text("a file")
    (root / strange[2]).symlink_to("nowhere")
    (root / strange[3]).symlink_to(tmp_path / "kept")
    others = ["notes.txt", ".tmp-mine", ".replaced-mine", "junk", "step-1"]
    for name in others:
        (root / name).mkdir()
    with pytest.warns(UserWarning, match="passed over in the folder of checkpoints") as warned:
        assert steps_found(root) == [2, 2]
    report = "\n".join(str(warning.message) for warning in warned)
    assert all(name in report for name in strange) and not any(name in report for name in others)
    assert names(root) == sorted([*strange, *others, "step-00000001", "step-00000002"])
    assert (tmp_path / "kept" / "file").read_text() == "kept"


class Stuck(Disk):
    """Can't remove what is half written."""

    def remove(self, path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))


def test_a_leftover_that_cannot_be_removed_is_no_reason_not_to_start(root):
    (root / ".tmp-step-00000003-0123abcd").mkdir()
    with pytest.warns(UserWarning, match=r"Permission denied.*\.tmp-step-00000003-0123abcd"):
        results = thread.run(2, resume, root, until=0, disk=Stuck())
    assert [step for _, step, _ in results] == [2, 2]


def test_something_else_with_the_name_of_a_checkpoint_is_not_replaced(root):
    (root / "step-00000003").write_text("mine")

    def save():
        *_, checkpoints = made(root)
        with pytest.raises(
            RuntimeError, match=r"A file or folder that is no checkpoint has this name.*step-00000003"
        ):
            checkpoints.save(3)
        checkpoints.save(4)

    thread.run(2, save)
    assert (root / "step-00000003").read_text() == "mine" and "step-00000004" in names(root)


def test_a_manifest_of_a_later_format_is_passed_over_by_its_number(root):
    content = body(root / "step-00000002") | {"format": 3, "pieces": "in another file"}
    write(root / "step-00000002" / "manifest.json", content)
    with pytest.warns(
        UserWarning,
        match="step-00000002/manifest.json: format '3' is unknown; this version of shardrt reads 1",
    ):
        assert steps_found(root) == [1, 1]
    assert _checksum(content)  # right, as that version sees it


def saved_after_a_damaged_one(root):
    *_, checkpoints = made(root, keep_last=1)
    step, _ = checkpoints.restore()
    checkpoints.save(step + 1)
    return step


def test_what_could_not_be_restored_does_not_push_out_what_comes_after_the_one_that_was(root):
    (root / "step-00000002").rename(root / "step-00000005")
    damage(root / "step-00000005" / "rank-00000.safetensors")
    with pytest.warns(UserWarning, match="skipped a checkpoint"):
        assert thread.run(2, saved_after_a_damaged_one, root) == [1, 1]
    assert names(root) == ["step-00000002", "step-00000005"]
    verify(root / "step-00000002")


def test_one_old_checkpoint_that_cannot_be_removed_keeps_no_other(root):
    class Partly(Disk):
        def rename(self, old, new):
            if old.name == "step-00000001":
                raise PermissionError(errno.EACCES, "Permission denied", str(old))
            super().rename(old, new)

    (root / "step-00000003").mkdir()
    with pytest.raises(PermissionError, match="step-00000001"):
        Store(root, Partly()).prune(1)
    assert names(root) == ["step-00000001", "step-00000003"]


def refuses_directories(monkeypatch, number):
    sync = os.fsync

    def fsync(file):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(number, os.strerror(number))
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_syncs_no_directories_is_used_with_a_warning(tmp_path, monkeypatch, number):
    refuses_directories(monkeypatch, number)
    with pytest.warns(UserWarning, match="the file system can't sync directories"):
        thread.run(2, two_saved, tmp_path / "c")
    assert names(tmp_path / "c") == ["step-00000001", "step-00000002"]


def test_a_directory_that_could_not_be_synced_for_another_reason_is_an_error(tmp_path, monkeypatch):
    refuses_directories(monkeypatch, errno.EIO)
    with pytest.raises(RuntimeError, match="step 1 was not saved"):
        thread.run(2, two_saved, tmp_path / "c")


def test_short_reads_are_no_damage(root, monkeypatch):
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, offset: pread(file, min(count, 1000), offset))
    verify(root / "step-00000002")
    assert steps_found(root) == [2, 2]


def test_an_error_of_the_disk_names_the_file(tmp_path):
    class Broken(Disk):
        def write(self, file, data):
            raise OSError(errno.EIO, "Input/output error")

    def save():
        made(tmp_path / "c", disk=Broken())[2].save(1)

    with pytest.raises(
        RuntimeError, match=r"rank 1: OSError: .*Input/output error: .*rank-00001.safetensors"
    ):
        thread.run(2, save)


class Pruned(Watched):
    """Has `shardrt ckpt prune` run before and after each operation."""

    def around(self, _, operation, args):
        prune(self.run)
        result = operation(*args)
        prune(self.run)
        return result


def prune(run):
    assert main(["ckpt", "prune", str(run), "--keep", "1"]) == 0


@pytest.mark.parametrize("in_a_run", [False, True])
@pytest.mark.filterwarnings("error")
def test_prune_beside_a_job_removes_nothing_that_it_is_writing(root, in_a_run):
    disk = Pruned()
    disk.run = root.parent
    root = root.rename(root.parent / "checkpoints")

    def save():
        *_, checkpoints = made(root, disk=disk, keep_last=1)
        for step in (3, 4, 4):  # again: the one that is there makes way
            checkpoints.save(step)

    held = lock(root.parent) if in_a_run else None
    (root / ".tmp-step-00000009-0123abcd").mkdir()  # of a job on another host, for all that prune knows
    thread.run(2, save)
    assert names(root) == [".tmp-step-00000009-0123abcd", "step-00000004"]
    verify(root / "step-00000004")
    if in_a_run:
        os.close(held)
        prune(root.parent)  # the job has ended: what it left half written goes
        assert names(root) == ["step-00000004"]


def test_prune_does_not_count_what_a_save_in_a_bucket_has_begun(root, capsys):
    (root / "step-00000003").mkdir()
    assert main(["ckpt", "prune", str(root), "--keep", "1"]) == 0
    assert capsys.readouterr().out == "removed steps 1\n"
    assert names(root) == ["step-00000002", "step-00000003"]
