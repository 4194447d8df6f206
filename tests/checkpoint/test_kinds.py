"""Checkpoints where hosts have folders of their own, and where there is no rename: ranks are threads."""

import os
import shutil

import pytest

from shardrt.__main__ import main
from shardrt.checkpoint import CheckpointError, verify
from shardrt.checkpoint.disk import Disk
from shardrt.checkpoint.store import MANIFEST
from shardrt.comm import init_device_mesh, thread
from tests import lab
from tests.checkpoint.test_checkpoints import everything, made, train, whole


def on_hosts(root, each=2):
    """This rank's host's folder; so many ranks are on each."""
    return root / f"host{init_device_mesh('auto').rank // each}" / "checkpoints"


def saved(root, steps=(2, 4), kind="hosts", each=2, disk=None, **how):
    """Train to each step and save there; what this rank then holds."""
    place = on_hosts(root, each) if kind == "hosts" else root
    model, optimizer, checkpoints = made(place, disk, kind=kind, **how)
    first = 0
    for step in steps:
        train(model, optimizer, first, step)
        checkpoints.start(step, {"step": step})
        checkpoints.wait()
        first = step
    return everything(model, optimizer)


def restored(root, kind="hosts", each=2, path=None, disk=None):
    model, optimizer, checkpoints = made(on_hosts(root, each) if kind == "hosts" else root, disk, kind=kind)
    step, extra = checkpoints.restore(path)
    return step, extra, everything(model, optimizer)


def files(root):
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def same(before, after):
    lab.assert_equal(whole([held for *_, held in after]), whole(before))


@pytest.fixture
def parts(tmp_path):
    """(the folder of two hosts that saved steps 2 and 4 at 4 ranks, what the ranks held)"""
    return tmp_path, thread.run(4, saved, tmp_path)


def test_each_host_has_the_files_of_its_ranks_and_the_manifest_of_all(parts):
    root, _ = parts
    expected = {
        f"host{host}/checkpoints/step-0000000{step}/{name}"
        for host in (0, 1)
        for step in (2, 4)
        for name in (MANIFEST, *(f"rank-{rank:05d}.safetensors" for rank in (2 * host, 2 * host + 1)))
    }
    assert files(root) == expected
    manifests = {path.read_bytes() for path in root.rglob(f"step-00000004/{MANIFEST}")}
    assert len(manifests) == 1


def test_the_same_ranks_restore_it_without_a_file_of_another_host(parts):
    root, before = parts
    there = files(root)
    after = thread.run(4, restored, root)
    assert {(step, extra["step"]) for step, extra, _ in after} == {(4, 4)}
    same(before, after)
    assert files(root) == there


@pytest.mark.parametrize(("ranks", "each"), [(2, 1), (3, 2), (4, 2)])
def test_what_a_host_lacks_is_brought_to_it(parts, ranks, each):
    root, before = parts
    if ranks == 4:  # as if ranks had changed places
        os.rename(root / "host0", root / "host")
        os.rename(root / "host1", root / "host0")
        os.rename(root / "host", root / "host1")
    same(before, thread.run(ranks, restored, root, each=each))


def test_a_host_that_is_new_gets_what_it_needs(parts):
    root, before = parts
    shutil.copytree(root / "host1" / "checkpoints", root / "host0" / "checkpoints", dirs_exist_ok=True)
    shutil.rmtree(root / "host1")
    same(before, thread.run(4, restored, root))
    assert {
        f"host1/checkpoints/step-00000004/{name}" for name in (MANIFEST, "rank-00002.safetensors")
    } <= files(root)
    same(before, thread.run(4, restored, root))


def test_what_went_with_a_host_is_named(parts):
    root, _ = parts
    shutil.rmtree(root / "host1")
    with pytest.raises(CheckpointError, match=r"no host has rank-00002.safetensors, rank-00003"):
        thread.run(2, restored, root, each=2)


def test_a_checkpoint_that_one_host_has_not_published_is_passed_over(parts):
    root, _ = parts
    shutil.rmtree(root / "host1" / "checkpoints" / "step-00000004")
    with pytest.warns(UserWarning, match="skipped a checkpoint"):
        after = thread.run(4, restored, root)
    assert {step for step, *_ in after} == {2}


def test_parts_of_different_checkpoints_are_not_put_together(tmp_path):
    for name, momentum in (("a", None), ("b", 0.5)):
        thread.run(4, saved, tmp_path / name, (2,), sgd=momentum)
    shutil.rmtree(tmp_path / "a" / "host1")
    os.rename(tmp_path / "b" / "host1", tmp_path / "a" / "host1")
    with pytest.raises(CheckpointError, match="hosts have parts of different checkpoints"):
        thread.run(4, restored, tmp_path / "a")


def test_a_damaged_part_is_found_before_it_is_given_away(parts):
    root, _ = parts
    for step in (2, 4):
        path = root / "host1" / "checkpoints" / f"step-0000000{step}" / "rank-00003.safetensors"
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    with pytest.raises(CheckpointError, match="rank-00003.safetensors: bytes .* damaged"):
        thread.run(2, restored, root, each=1)


def test_no_host_removes_a_checkpoint_before_all_have_the_next(tmp_path):
    class Full(Disk):
        def rename(self, old, new):
            if "step-00000004" in new.name and "host1" in str(new):
                raise OSError(28, "No space left on device", str(new))
            super().rename(old, new)

    with pytest.raises(CheckpointError, match="rank 2: .*No space left on device.*host1"):
        thread.run(4, saved, tmp_path, disk=Full(), keep_last=1)
    assert {step for step, *_ in thread.run(4, restored, tmp_path)} == {2}


def test_one_folder_that_all_see_is_kept_by_one_rank(tmp_path):
    before = thread.run(4, saved, tmp_path, each=4)
    same(before, thread.run(2, restored, tmp_path, each=4))
    verify(tmp_path / "host0" / "checkpoints" / "step-00000004")


class Bucket(Disk):
    """A file system that knows no rename, and can't sync directories."""

    def rename(self, old, new):
        raise OSError(38, "Function not implemented", str(old))

    def sync_directory(self, path):
        raise OSError(38, "Function not implemented", str(path))


def test_a_folder_without_renames_has_the_same_checkpoints(tmp_path):
    before = thread.run(4, saved, tmp_path, (2, 3, 4), kind="objects", disk=Bucket(), keep_last=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]
    same(before, thread.run(3, restored, tmp_path, kind="objects", disk=Bucket()))
    verify(tmp_path / "step-00000004")


def test_without_a_manifest_there_is_no_checkpoint_and_the_next_save_tidies_up(tmp_path):
    thread.run(2, saved, tmp_path, (2, 3), kind="objects", disk=Bucket())
    (tmp_path / "step-00000003" / MANIFEST).unlink()
    assert {step for step, *_ in thread.run(2, restored, tmp_path, kind="objects")} == {2}
    thread.run(2, saved, tmp_path, (4,), kind="objects", disk=Bucket())
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000004"]


def test_a_step_is_saved_again_beside_the_files_of_the_first(tmp_path):
    def twice(root):
        model, optimizer, checkpoints = made(root, Bucket(), kind="objects")
        for last in (2, 4):
            train(model, optimizer, last - 2, last)
            checkpoints.save(9)
        return everything(model, optimizer)

    before = thread.run(2, twice, tmp_path)
    assert len(files(tmp_path / "step-00000009")) == 3
    same(before, thread.run(2, restored, tmp_path, kind="objects"))


def test_a_listing_that_lacks_the_newest_hides_it_from_nobody(tmp_path, monkeypatch):
    from pathlib import Path

    thread.run(2, saved, tmp_path, kind="objects", disk=Bucket())
    plain = Path.iterdir

    def late(path):
        return (each for each in plain(path) if each.name != "step-00000004")

    monkeypatch.setattr(Path, "iterdir", late)
    assert {step for step, *_ in thread.run(2, restored, tmp_path, kind="objects")} == {4}


def test_a_file_that_comes_late_is_waited_for(tmp_path):
    import threading

    thread.run(2, saved, tmp_path, (2,), kind="objects", disk=Bucket())
    place = tmp_path / "step-00000002" / "rank-00001-late"
    (path,) = (tmp_path / "step-00000002").glob("rank-00001-*")
    os.rename(path, place)
    later = threading.Timer(0.5, os.rename, (place, path))
    later.start()
    assert {step for step, *_ in thread.run(2, restored, tmp_path, kind="objects")} == {2}
    later.join()


def test_a_kind_that_is_unknown_is_refused(tmp_path):
    with pytest.raises(ValueError, match="kind must be one of shared, hosts, objects, got 'tape'"):
        made(tmp_path, kind="tape")


def test_gather_completes_a_part_with_copies_of_others(parts, capsys):
    root, before = parts
    mine, other = root / "host0", root / "host1"
    assert main(["ckpt", "ls", str(mine)]) == 0
    assert capsys.readouterr().out.count("a part: 2 of 4 files are not here") == 2
    assert main(["ckpt", "verify", str(mine)]) == 65
    assert capsys.readouterr().out.count("a part: 2 of 4 files are not here, the others are whole") == 2
    assert main(["ckpt", "gather", str(mine), str(root / "nowhere")]) == 65
    message = capsys.readouterr()
    assert "rank-00002.safetensors, rank-00003.safetensors are not here" in message.out
    assert "no part of step-00000004" in message.err
    assert main(["ckpt", "gather", str(mine), str(other)]) == 0
    assert "2 files from" in (message := capsys.readouterr().out) and message.endswith("  whole\n")
    verify(mine / "checkpoints" / "step-00000004")
    same(before, thread.run(2, restored, mine / "checkpoints", kind="shared"))


def test_gather_takes_no_damaged_file(parts, capsys):
    root, _ = parts
    path = root / "host1" / "checkpoints" / "step-00000004" / "rank-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert main(["ckpt", "verify", str(root / "host1")]) == 65
    assert (
        "DAMAGED" in (message := capsys.readouterr().out) and "rank-00003.safetensors: bytes 0 to" in message
    )
    assert main(["ckpt", "gather", str(root / "host0"), str(root / "host1")]) == 65
    assert "rank-00003.safetensors: bytes 0 to" in capsys.readouterr().err
    assert not (root / "host0" / "checkpoints" / "step-00000004" / path.name).exists()


def test_gather_alone_says_what_it_needs(parts, capsys):
    assert main(["ckpt", "gather", str(parts[0] / "host0")]) == 65
    assert "name copies of other hosts' folders, or start it by mpirun" in capsys.readouterr().err
