"""Saving and restoring a training run: parameters, optimizer, step, and values of the program.

    save      pieces -> a file per rank, hashed on the way -> manifest, last -> one rename
    restore   manifest -> for each piece of this rank the saved ranges that overlap it, in verified blocks

docs/howto/checkpoints.md has the guarantees for failures in between.
"""

import json
import secrets
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardrt import device
from shardrt.checkpoint import apart, rankfile
from shardrt.checkpoint.disk import Disk
from shardrt.checkpoint.fit import (
    begins,
    check_fits,
    check_kinds,
    dropped_errors,
    named_arrays,
    transfer,
    transfers,
)
from shardrt.checkpoint.manifest import (
    Manifest,
    SavedFile,
    SavedParameter,
    SavedPiece,
    as_read,
)
from shardrt.checkpoint.objects import ObjectStore
from shardrt.checkpoint.pieces import PARAMETER, Piece, counted, pieces_of, set_steps
from shardrt.checkpoint.snapshot import Snapshot
from shardrt.checkpoint.store import Store
from shardrt.comm import DeviceMesh, objects
from shardrt.device.cpu import ThreadStream
from shardrt.nn.module import Module
from shardrt.nn.parameter_placement import whole_shape
from shardrt.nn.placement import along_pipeline
from shardrt.nn.ranks import is_stage_leader, ranks_of
from shardrt.optim.optimizer import Optimizer
from shardrt.optim.slices import Slice
from shardrt.untrusted import printable

KINDS = ("shared", "hosts", "objects")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or restored; every rank raises it.

    A save that failed leaves training as it was. A restore that failed on a damaged file may have changed
    some parameters: restore another checkpoint before training goes on.
    """


class NonfiniteWeights(CheckpointError):
    """A checkpoint was not saved because weights or optimizer state are nan or infinite."""


class CheckpointManager:
    """The checkpoints of one run, in one folder.

    All calls are collective.

    The first save determines the pieces and the place: the model must be sharded by then.

    Args:
        root: the folder; rank 0's value counts.
        kind: "shared": all ranks see this folder. "hosts": each host has its own folder there, with the files
            of its ranks. "objects": all see it, on a file system without atomic rename.
            docs/howto/checkpoints.md has the guarantees of each kind.
        keep_last: how many of the newest stay.
        keep_every: multiples of that step stay forever (0: none).
    """

    def __init__(
        self,
        root: str | Path,
        model: Module,
        optimizer: Optimizer,
        mesh: DeviceMesh,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        kind: str = "shared",
        disk: Disk | None = None,
    ) -> None:
        if keep_last < 1 or keep_every < 0:
            raise ValueError(
                "CheckpointManager: keep_last must be at least 1 and keep_every at least 0, got "
                f"{keep_last} and {keep_every}"
            )
        if kind not in KINDS:
            raise ValueError(f"CheckpointManager: kind must be one of {', '.join(KINDS)}, got {kind!r}")
        self.store = (ObjectStore if kind == "objects" else Store)(Path(root), disk)
        self._model, self._optimizer, self._mesh = model, optimizer, mesh
        self._control = mesh.communicator("control")
        self._keep = keep_last, keep_every
        self._apart = kind == "hosts"
        self._keeper = 0  # of this rank's folder
        self._count = 0  # saves
        self._place: tuple[Path, str] | None = None  # where all ranks save, and the tag of this run's names
        self._found: list[tuple[Slice, int]] | None = None  # the pieces behind the next two fields
        self._saved: list[Piece] = []  # pieces that this rank saves
        self._counted: dict[str, tuple[Slice, int]] = {}
        self._report = False  # whether rank 0 does not know the numbers of updates that this rank knows
        self._snapshot: Snapshot | None = None
        self._writer: ThreadStream | None = None  # made once: starting a thread blocks
        self._pending: _Save | None = None
        self.last_saved: int | None = None  # the step published last

    # -- saving

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint was started that is not published yet."""
        return self._pending is not None

    def save(self, step: int, extra: dict[str, Any] | None = None, *, best: int | None = None) -> Path:
        """Write checkpoint `step` and wait until it is on the disk; returns its directory.

        It is a NonfiniteWeights, naming rank and parameter, if trained weights or their state are nan or
        infinite.

        Args:
            extra: JSON that `restore` returns.
            best: a step that retention must keep.

        Raises:
            CheckpointError: which names ranks and files, if any rank failed; older checkpoints are unchanged.
            ValueError or TypeError: for an `extra` that JSON can't represent.
        """
        self.wait()
        self._begin(step, extra or {}, best, copy=False)
        return self.wait()

    def start(self, step: int, extra: dict[str, Any] | None = None, *, best: int | None = None) -> None:
        """Copy the contents of checkpoint `step`, and write the copy while training continues.

        The copy needs host memory for this rank's pieces, kept for the next save. Then call `tick` in
        every step, and `wait` at the end: they report failures, also of the copy. Waits for a save that is
        still under way, and raises CheckpointError if that save failed. Otherwise, from the second call on,
        this only copies, and ranks do not wait for each other.
        """
        self.wait()
        self._begin(step, extra or {}, best, copy=True)

    def tick(self) -> Path | None:
        """Let rank 0 publish the started checkpoint, once every rank has written it.

        Never waits for the disk.

        Returns:
            Its directory in the first call after publication.

        Raises:
            CheckpointError: if a rank failed to write; training may continue.
        """
        if self._pending is None:
            return None
        done = self._pending.done  # read before the error, which is set first
        state = np.array([done, self._pending.error is None], np.int64)
        self._control.all_reduce(state, op="min", stream=device.current().current_stream)
        return self._advance(failed=not state[1]) if state[0] else None

    def wait(self) -> Path | None:
        """Wait for a save under way, and publish it; returns its directory, None without a save."""
        path = None
        while self._pending is not None:
            self._pending.wait()
            path = self.tick()
        return path

    def _begin(self, step: int, extra: dict[str, Any], best: int | None, copy: bool) -> None:
        extra = as_read(extra)  # a copy: the program may change its own meanwhile
        if self._place is None:
            self._place = self._agreed_place(step)
        found = [(piece, len(piece.members)) for piece in self._optimizer.slices]
        if found != self._found:  # at the first save, and after the optimizer gained parameters
            self._found, self._snapshot = found, None
            self._counted = counted(self._model, self._optimizer)
            self._check_ranks()
            self._saved = list(pieces_of(self._model, self._optimizer, saving=True))
            in_stages = along_pipeline(self._model.parameters()) is not None
            self._report = in_stages and is_stage_leader(self._model)
        if copy and self._writer is None:
            self._writer = ThreadStream("checkpoint")
        root, tag = self._place
        folder = root / self.store.BEGUN.format(self.store.name(step), tag)
        steps = {name: int(piece.steps[position]) for name, (piece, position) in self._counted.items()}
        self._count += 1
        name = self.store.FILE.format(self._mesh.rank, tag, self._count)
        message = steps if self._report else {}
        writer = self._writer if copy else None
        save = self._pending = _Save(folder, name, step, extra, best, steps, message, writer)
        try:
            pieces = self._copied() if copy else self._saved
        except MemoryError as error:  # reported by the next tick: a collective here would delay training
            save.error, save.done = error, True
        else:
            save.go(lambda: save.write(self.store.disk, pieces, self._mesh.rank))

    def _check_ranks(self) -> None:
        """Raise ValueError if `mesh` lacks ranks that train the model."""
        ranks = ranks_of(self._model)
        if ranks is not None and ranks.size > self._mesh.size:
            raise ValueError(
                f"CheckpointManager: {ranks.size} ranks train the model, the mesh has {self._mesh.size}; "
                "give it the mesh of all of them"
            )

    def _copied(self) -> list[Piece]:
        """Copies of this rank's pieces, valid until the next call. Raises MemoryError."""
        if self._snapshot is None:
            self._snapshot = Snapshot(self._saved)
        self._snapshot.take()
        return self._snapshot.pieces

    def _agreed_place(self, step: int) -> tuple[Path, str]:
        """Rank 0's folder, or this host's, made if missing, and eight random digits."""
        error = None
        if self._mesh.rank == 0 or self._apart:
            try:
                self.store.begin()
            except OSError as failed:
                error = failed
        self._agree(f"step {step} was not saved", error)
        root, tag = objects.broadcast_object(self._control, [str(self.store.root), secrets.token_hex(4)])
        if not self._apart:
            return Path(root), tag
        errors, self._keeper = apart.keeper(self._control, self.store.root, tag)
        if errors:
            raise CheckpointError(f"step {step} was not saved: {'; '.join(errors)}")
        return self.store.root, tag

    def _advance(self, failed: bool) -> Path | None:
        """Advance when every rank has finished: publish first, then end and return the path."""
        save = self._pending
        if failed:
            self._pending = self._place = None
            self._agree(f"step {save.step} was not saved", save.error, save.folder)
        if not save.written:
            save.written = True
            everyone = self._control.all_gather_bytes(save.described)
            if self._apart:
                own = self._manifest(save, everyone).dump() if self._mesh.rank == 0 else b""
                everyone = self._control.all_gather_bytes(own)[:1]
            if self._keeps:  # slow operations run in the background
                save.go(lambda: self._publish(save, everyone))
            return None
        if self._apart and not save.published:  # by all hosts: none removes files that another may still need
            save.published = True
            if self._keeps:
                save.go(lambda: self._prune(save))
            return None
        self._pending = None
        self.last_saved = save.step
        if save.left is not None:  # the new checkpoint exists; an extra old checkpoint does no harm
            warnings.warn(
                printable(f"CheckpointManager: an old checkpoint could not be removed: {save.left}"),
                stacklevel=3,
            )
        return save.folder.parent / self.store.name(save.step)

    @property
    def _keeps(self) -> bool:
        """Whether this rank looks after the folder."""
        return self._mesh.rank == self._keeper

    def _publish(self, save: "_Save", everyone: list[bytes]) -> None:
        """Publish on a keeper, once all files exist. Raises Damaged for a checkpoint that `restore` rejects.

        everyone: the messages of all ranks, or, with separate folders per host, rank 0's manifest.
        """
        if self._apart:
            manifest = Manifest.parse(everyone[0], save.folder)
        else:
            manifest = self._manifest(save, everyone)
        check_fits(self._model, manifest, save.folder)
        check_kinds(self._saved, self._optimizer, manifest, save.folder)
        self.store.publish(save.folder, manifest, part=self._apart)
        if not self._apart:
            self._prune(save)

    def _prune(self, save: "_Save") -> None:
        """Remove checkpoints beyond retention, after the new one is published."""
        try:
            self.store.prune(*self._keep, save.best, newest=save.step)
        except OSError as error:
            save.left = error

    def _manifest(self, save: "_Save", everyone: list[bytes]) -> Manifest:
        described = [json.loads(data) for data in everyone]
        files = tuple(SavedFile(**{**file, "blocks": tuple(file["blocks"])}) for file, *_ in described)
        pieces = tuple(SavedPiece.of(row) for _, rows, _ in described for row in rows)
        steps = {name: count for *_, counts in (*described, (save.steps,)) for name, count in counts.items()}
        parameters = {
            name: SavedParameter(whole_shape(array), rankfile.kind_of(array.dtype))
            for name, array in named_arrays(self._model)
        }
        return Manifest(save.step, files, parameters, pieces, steps, save.extra)

    def _agree(self, what: str, error: BaseException | None, folder: Path | None = None) -> None:
        """Raise CheckpointError on every rank if any has an error; rank 0 removes the unfinished files."""
        errors = objects.failures(self._control, error)
        if not errors:
            return
        nonfinite = any(text.partition(": ")[2].startswith("NotFinite: ") for text in errors)
        if folder is not None and self._keeps:
            try:
                self.store.give_up(folder)
            except OSError:  # the next start removes it
                pass
        kind = NonfiniteWeights if nonfinite else CheckpointError
        raise kind(f"{what}: {'; '.join(errors)}") from error

    # -- restoring

    def restore(
        self, path: str | Path | None = None, *, weights_only: bool = False
    ) -> tuple[int, dict[str, Any]]:
        """Restore the checkpoint in directory `path`, else the newest that verifies; returns (step, extra).

        Each rank reads only the elements it needs, at any world size, strategy and layout. Without a path,
        returns (0, {}) if the folder has none; warns of skipped ones, with the reason. weights_only leaves
        the optimizer unchanged.

        Raises:
            CheckpointError: if `path` is unusable, or all candidates are.
        """
        self._check_ranks()
        if self._apart and self._place is None:
            self._place = self._agreed_place(0)
        errors, candidates = self._attempt(self._candidates, path)
        if errors:
            raise CheckpointError(f"{self.store.root} can't be read: {'; '.join(errors)}")
        if self._apart and path is None:  # checkpoints with files on any host, in its own folder
            names = {
                Path(each).name
                for those in objects.all_gather_object(self._control, candidates)
                for each in those
            }
            candidates = [str(self.store.root / name) for name in sorted(names, reverse=True)]
        refused = []
        for candidate in map(
            Path, candidates if self._apart else objects.broadcast_object(self._control, candidates)
        ):
            errors = self._bring(candidate, weights_only) if self._apart else []
            if not errors:
                errors, manifest = self._attempt(self._checked_manifest, candidate, weights_only)
            if not errors:
                errors, _ = self._attempt(self._load, candidate, manifest, weights_only)
            if not errors:
                for passed in refused if self._mesh.rank == 0 else ():
                    warnings.warn(printable(f"restore: skipped a checkpoint: {passed}"), stacklevel=2)
                if self._mesh.rank == 0 and not weights_only:
                    if message := dropped_errors(self._pieces(weights_only), manifest):
                        warnings.warn(printable(f"restore: {candidate}: {message}"), stacklevel=2)
                return manifest.step, manifest.extra
            refused.append("; ".join(sorted({text.partition(": ")[2] for text in errors})))
        if refused:
            raise CheckpointError(f"no checkpoint could be restored: {'; '.join(refused)}")
        return 0, {}

    def _candidates(self, path: str | Path | None) -> list[str]:
        """The candidates for restoring, newest first, as found by rank 0 after it cleans the folder."""
        if path is not None:
            return [str(path)]
        if not self._keeps:
            return []
        for left in self.store.clean():
            message = printable(f"passed over in the folder of checkpoints: {left}")
            warnings.warn(message, stacklevel=4)
        return [str(folder) for _, folder in self.store.checkpoints()]

    def _attempt(self, function: Callable, *args: Any) -> tuple[list[str], Any]:
        return apart.attempt(self._control, function, *args)

    def _bring(self, path: Path, weights_only: bool) -> list[str]:
        """Copy the files that this host's ranks need to its folder; returns errors."""

        def wanted(manifest: Manifest) -> list[int]:
            self._check(manifest, path, weights_only)
            return list(transfers(self._pieces(weights_only), manifest))

        return apart.bring(self._control, self.store, path, self._keeper, wanted)

    def _checked_manifest(self, folder: Path, weights_only: bool) -> Manifest:
        manifest = self.store.read(folder, part=self._apart)
        self._check(manifest, folder, weights_only)
        return manifest

    def _check(self, manifest: Manifest, folder: Path, weights_only: bool) -> None:
        """Raise OtherRun unless it fits the model and the optimizer."""
        check_fits(self._model, manifest, folder)
        if not weights_only:  # a parameter that is frozen after training keeps its moments
            kept = {piece.parameter for piece in manifest.pieces if piece.kind != PARAMETER}
            self._optimizer.take_in({id(p) for name, p in self._model.named_parameters() if name in kept})
            check_kinds(self._pieces(weights_only), self._optimizer, manifest, folder)

    def _pieces(self, weights_only: bool) -> list[Piece]:
        """The pieces that this rank restores."""
        return list(pieces_of(self._model, None if weights_only else self._optimizer, saving=False))

    def _load(self, folder: Path, manifest: Manifest, weights_only: bool) -> None:
        """Fill this rank's pieces. Raises Damaged or OSError; pieces filled by then stay filled."""
        for piece in self._pieces(weights_only):
            if begins(piece, manifest):
                piece.clear()
        try:
            for number, moves in transfers(self._pieces(weights_only), manifest).items():
                with closing(rankfile.Reader(folder, manifest.files[number])) as reader:
                    for saved, piece, *where in moves:
                        transfer(reader, saved, piece, *where)
        finally:  # what was filled is there, also where more was to come
            for parameter in self._model.parameters():
                parameter.storage.modified()
        if not weights_only:
            set_steps(self._model, self._optimizer, manifest.steps)


@dataclass(eq=False)
class _Save:
    """One save on one rank: what to write, where, and the outcome. All write, then rank 0 publishes."""

    folder: Path
    name: str  # of this rank's file
    step: int
    extra: dict[str, Any]
    best: int | None
    steps: dict[str, int]
    message: dict[str, int]  # the entries of `steps` to send to rank 0
    writer: ThreadStream | None
    written: bool = False  # by all ranks, as all ranks know
    published: bool = False
    done: bool = False
    error: BaseException | None = None
    left: OSError | None = None  # why old checkpoints are still there
    described: bytes = b""  # this rank's file, its contents and `message`, for the manifest

    def go(self, part: Callable[[], None]) -> None:
        """Run a stage of the save: in the writer's thread, or at once if there is none."""
        self.done = False
        if self.writer is None:
            self._do(part)
        else:
            self.writer.submit(self._do, part)

    def wait(self) -> None:
        """Return when the stage is done or has failed."""
        if self.writer is not None:
            self.writer.synchronize()

    def write(self, disk: Disk, pieces: list[Piece], rank: int) -> None:
        """Write this rank's file, in the directory that the first rank to arrive makes."""
        try:
            disk.make_directory(self.folder)
        except FileExistsError:
            pass
        except FileNotFoundError:  # the run's folder was moved or removed since the last save
            self.folder.mkdir(parents=True, exist_ok=True)
        file, saved = rankfile.write(disk, self.folder / self.name, pieces, rank)
        self.described = json.dumps([asdict(file), [piece.row for piece in saved], self.message]).encode()

    def _do(self, part: Callable[[], None]) -> None:
        try:
            part()
        except BaseException as error:  # the rank that waits reports it to all ranks
            self.error = error
        self.done = True
