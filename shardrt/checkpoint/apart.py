"""A checkpoint distributed over hosts with separate folders: the keeper of a folder, and file transfers.

Every folder has the whole manifest, and the files of the ranks that see it. Other files that a rank needs
are copied to its folder, block by verified block, before anything is restored.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from shardrt import device
from shardrt.checkpoint import rankfile
from shardrt.checkpoint.disk import Disk, write_file
from shardrt.checkpoint.manifest import BLOCK, Damaged, Manifest, SavedFile
from shardrt.checkpoint.store import MANIFEST, Store, is_here, read_manifest
from shardrt.comm import objects
from shardrt.comm.protocol import Communicator

_BRINGING = ".part-"  # prefix of the names of incomplete files


def attempt(control: Communicator, function: Callable, *args: Any) -> tuple[list[str], Any]:
    """(errors of all ranks, result of `function` here). All ranks have run `function` when it returns."""
    result = error = None
    try:
        result = function(*args)
    except (ValueError, OSError) as failed:
        error = failed
    return objects.failures(control, error), result


def keeper(control: Communicator, root: Path, tag: str) -> tuple[list[str], int]:
    """(errors, the first of the ranks that see the same folder). Collective."""
    mark = root / f".seen-{tag}-{control.rank}"
    errors, _ = attempt(control, mark.touch)
    seen = [int(path.name.rpartition("-")[2]) for path in root.glob(f".seen-{tag}-*")]
    control.all_gather_bytes(b"")  # until all have looked
    with suppress(OSError):
        mark.unlink()
    return errors, min(seen, default=control.rank)


def bring(
    control: Communicator,
    store: Store,
    path: Path,
    keeper: int,
    wanted: Callable[[Manifest], Sequence[int]],
) -> list[str]:
    """Copy checkpoint files that ranks need and their folders lack; returns errors.

    Collective.

    Args:
        path: the checkpoint on this rank.
        wanted: the numbers of the files that this rank reads.
    """
    errors, data = attempt(control, _manifest_here, path)
    if errors:
        return errors
    everyone = control.all_gather_bytes(data)
    found = [each for each in everyone if each]
    if not found:
        return [f"rank {control.rank}: FileNotFoundError: no host has a checkpoint {path}"]
    if any(each != found[0] for each in found):
        return [f"rank {control.rank}: Damaged: {path.name}: hosts have parts of different checkpoints"]
    manifest = Manifest.parse(found[0], path / MANIFEST)
    errors, own = attempt(control, lambda: list(wanted(manifest)))
    if errors:
        return errors
    here = [number for number, file in enumerate(manifest.files) if is_here(path, file)]
    known = objects.all_gather_object(control, [keeper, sorted(set(own) - set(here)), bool(own), here])
    lacking = {
        number: sorted({place for place, lacks, *_ in known if number in lacks})
        for number in range(len(manifest.files))
    }
    lacking = {number: places for number, places in lacking.items() if places}
    owners = {number: [rank for rank, (*_, has) in enumerate(known) if number in has] for number in lacking}
    nowhere = [manifest.files[number].name for number in lacking if not owners[number]]
    if nowhere:
        return [f"rank {control.rank}: FileNotFoundError: {path.name}: no host has {', '.join(nowhere[:6])}"]
    given = [number for number in lacking if owners[number][0] == control.rank]
    errors, _ = attempt(control, _verify, path, manifest, given)
    if errors:
        return errors
    error = None
    for number, places in lacking.items():
        try:
            _move(control, store.disk, path, manifest.files[number], owners[number][0], places)
        except (ValueError, OSError) as failed:
            error = error or failed
    errors = objects.failures(control, error)
    if errors:
        return errors
    lacks = not data and keeper == control.rank and [keeper, True] in [[each[0], each[2]] for each in known]
    return attempt(control, _write, store.disk, path / MANIFEST, found[0] if lacks else b"")[0]


def copy(disk: Disk, path: Path, source: Path, manifest: Manifest) -> int:
    """Copy missing files to `path` from another folder; returns their number.

    Both folders hold files of the checkpoint of this manifest.

    Raises:
        Damaged: if the file is damaged.
        OSError: if the file system fails.
    """
    count = 0
    for file in manifest.files:
        if not is_here(path, file) and is_here(source, file):
            with closing(rankfile.Reader(source, file)) as reader:
                _receive(disk, path, file, reader.block)
            count += 1
    return count


def _manifest_here(path: Path) -> bytes:
    """The manifest file of this folder, checked; b"" if there is none."""
    if not (path / MANIFEST).is_file():
        return b""
    read_manifest(path, part=True)
    return (path / MANIFEST).read_bytes()


def _verify(path: Path, manifest: Manifest, numbers: Sequence[int]) -> None:
    for number in numbers:
        with closing(rankfile.Reader(path, manifest.files[number])) as reader:
            reader.verify()


def _move(
    control: Communicator, disk: Disk, path: Path, file: SavedFile, owner: int, places: Sequence[int]
) -> None:
    """Send a file of `owner` to the ranks `places`, which receive all blocks even if they raise."""
    stream, count = device.current().current_stream, len(file.blocks)
    lengths = [min(BLOCK, file.bytes - number * BLOCK) for number in range(count)]
    if control.rank == owner:
        with closing(rankfile.Reader(path, file)) as reader:
            for number in range(count):
                block = np.frombuffer(reader.block(number), np.uint8)
                for place in places:
                    control.send(block.copy(), peer=place, stream=stream, tag=file.name, direct=True)
    elif control.rank in places:
        left = iter(lengths)

        def next_block(number: int) -> bytes:
            data = np.empty(next(left), np.uint8)
            control.recv(data, peer=owner, stream=stream, tag=file.name, direct=True)
            return data.tobytes()

        try:
            _receive(disk, path, file, next_block)
        finally:
            for length in left:  # so that the sender can go on
                control.recv(
                    np.empty(length, np.uint8), peer=owner, stream=stream, tag=file.name, direct=True
                )


def _receive(disk: Disk, path: Path, file: SavedFile, block: Callable[[int], bytes]) -> None:
    """Write a file from received blocks, and give it its name when all of it is on the disk."""
    from xxhash import xxh3_128_hexdigest

    path.mkdir(parents=True, exist_ok=True)
    begun = path / f"{_BRINGING}{file.name}"
    begun.unlink(missing_ok=True)
    out = disk.create(begun)
    try:
        for number, checksum in enumerate(file.blocks):
            data = block(number)
            if xxh3_128_hexdigest(data) != checksum:
                raise Damaged(
                    f"{path / file.name}: block {number} was damaged on its way between hosts (wrong "
                    "checksum)"
                )
            disk.write(out, memoryview(data))
        disk.sync(out)
    finally:
        disk.close(out)
    os.replace(begun, path / file.name)
    disk.sync_directory(path)


def _write(disk: Disk, path: Path, data: bytes) -> None:
    """Write a file with these bytes; no file for no bytes."""
    if not data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(disk, path, data)
    disk.sync_directory(path.parent)
