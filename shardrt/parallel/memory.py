"""A pipeline rank's memory, before the first step: units of its stages, arrays in flight, links.

A dry run computes nothing (fsdp/dry_run.py), so other ranks' messages need only have the right
shapes. The stages first send each other those shapes, in order; then each rank runs its row of the table.
"""

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from shardrt import device, dtypes
from shardrt.comm import objects
from shardrt.fsdp.memory import MemoryPlan, connect, memory_plan, run_dry, whole_of
from shardrt.parallel.carrier import STEP, Arrays, Carrier, key_of
from shardrt.parallel.step import Inputs, Loss, StagedModel, Step, Work
from shardrt.parallel.table import Action, Link

__all__ = ["pipeline_plan"]

Shape = tuple[tuple[int, ...], str]
Message = tuple[tuple[Shape | None, ...], Any]  # and how its arrays lie
Messages = dict[tuple[str, int, Hashable], Message]  # by kind, the stage that sends, and key


def pipeline_plan(
    pipeline: StagedModel,
    loss: Loss,
    batches: Sequence[Any],
    *,
    inputs: Inputs | None = None,
    optimizer_states: float = 2,
) -> MemoryPlan:
    """Bytes that training takes on this rank, as memory_plan says; "links": slots for received messages.

    Its own messages are activations until the table proves that they have been used (TableStats.kept).

    Collective, over the ranks of all stages too. Raises as memory_plan does, and on all ranks of the pipeline
    the error of a stage's first forward.

    Args:
        loss, batches, inputs: those of Pipeline.step.
    """
    if not isinstance(pipeline, StagedModel) or not callable(loss):
        got = f"{type(pipeline).__name__} and {type(loss).__name__}"
        raise TypeError(f"pipeline_plan: expected a Pipeline and a function, got {got}")
    work = pipeline.work("pipeline_plan", loss, batches, inputs)
    pipeline.check_count("pipeline_plan", work)
    for stage in pipeline.stages:
        connect(whole_of("pipeline_plan", stage))
    messages = _messages(pipeline, work)

    def step() -> None:
        _run(pipeline, work, messages)

    plan = memory_plan(pipeline.model, step=step, optimizer_states=optimizer_states)
    on_device, on_host = pipeline.links.plan(_by_link(pipeline, messages))
    more = [{"links": nbytes} if nbytes else {} for nbytes in (on_device, on_host)]
    return MemoryPlan(plan.device | more[0], plan.host | more[1])


def step_alone(pipeline: StagedModel, work: Work) -> None:
    """A step that sends only shapes to other ranks (Device.dry_run). Collective."""
    _run(pipeline, work, _messages(pipeline, work))


def _run(pipeline: StagedModel, work: Work, messages: Messages) -> None:
    carrier = Carrier(_Links(messages), pipeline.table, pipeline.mesh.rank, pipeline.facts.kept)
    with _without_tied_replicas(pipeline):
        Step(pipeline, work, carrier=carrier).run()


@contextmanager
def _without_tied_replicas(pipeline: StagedModel) -> Iterator[None]:
    """Inside a with block, stages have no tied replicas, so they copy no values."""
    before = [(stage, stage.tied_replicas) for stage in pipeline.stages]
    for stage, _ in before:
        stage.tied_replicas = []
    try:
        yield
    finally:
        for stage, tied_replicas in before:
            stage.tied_replicas = tied_replicas


def _messages(pipeline: StagedModel, work: Work) -> Messages:
    """The messages of the stages, for batches of all shapes. Collective."""
    keys: dict[Hashable, int] = {}
    for number, batch in enumerate(work.batches):
        keys.setdefault(key_of(pipeline.model, batch), number)
    control, messages = pipeline.mesh.communicator("control"), {}
    for stage in range(pipeline.table.stages - 1):
        sent, raised = None, None
        if pipeline.table.rank_of(stage) == pipeline.mesh.rank:
            try:
                row = [Action("F", stage, number) for number in keys.values()]
                sent = _sent(pipeline, work, row, messages)
            except (ValueError, OSError) as error:
                raised = error
        with device.use(device.get("cpu")):  # also on a dry-run device
            everyone = objects.all_gather_object(control, [sent, raised and str(raised)])
        sent, wrong = everyone[pipeline.table.rank_of(stage)]
        if raised is not None:
            raise raised
        if wrong is not None:
            raise ValueError(wrong)
        for key, (shapes, form) in zip(keys, sent, strict=True):
            there = tuple(shape and (tuple(shape[0]), shape[1]) for shape in shapes)
            messages["F", stage, key] = there, form
            back = tuple(s if s and dtypes.floating(np.dtype(s[1])) else None for s in there)
            messages["B", stage + 1, key] = back, None
    return messages


def _sent(pipeline: StagedModel, work: Work, row: list[Action], messages: Messages) -> list[Message]:
    """The messages of a stage of this rank in these forwards, without computing them."""
    stage, carrier = pipeline.stage(row[0].stage), _Shapes(messages)
    units = whole_of("pipeline_plan", stage)
    with _without_tied_replicas(pipeline):
        run_dry(stage, units, lambda: Step(pipeline, work, row, carrier).run())
    return carrier.sent


def _by_link(pipeline: StagedModel, messages: Messages) -> dict[Link, list[tuple[Shape | None, ...]]]:
    """The shapes of all messages that go over each link."""
    found: dict[Link, list] = {}
    rank_of = pipeline.table.rank_of
    for (kind, stage, _), (shapes, _) in messages.items():
        source, to = rank_of(stage), rank_of(stage + STEP[kind])
        if source != to:
            found.setdefault(Link(source, to, kind), []).append(shapes)
    return found


def _arrays(shapes: tuple[Shape | None, ...]) -> Arrays:
    """Uninitialised arrays of these shapes, in memory that does not count."""
    return tuple(None if shape is None else np.empty(shape[0], np.dtype(shape[1])) for shape in shapes)


class _Shapes:
    """Replaces a Carrier: brings arrays of the known messages' shapes, and notes the sent messages."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._keys: dict[tuple[str, int, int], Hashable] = {}
        self.sent: list[Message] = []

    def send(
        self, kind: str, stage: int, micro_batch: int, arrays: Arrays, key: Hashable, form: Any = None
    ) -> None:
        shapes = [None if array is None else (array.shape, dtypes.name_of(array.dtype)) for array in arrays]
        self.sent.append((tuple(shapes), form))

    def expect(self, kind: str, stage: int, micro_batch: int, key: Hashable) -> None:
        self._keys[kind, stage, micro_batch] = key

    def receive(self, kind: str, stage: int, micro_batch: int) -> tuple[Arrays, Any]:
        shapes, form = self._messages[kind, stage, self._keys[kind, stage, micro_batch]]
        return _arrays(shapes), form

    def finish(self) -> None:
        """Do nothing: no message is under way."""


class _Links:
    """Replaces Links: sent arrays go nowhere, received arrays have the right shapes."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._expected: dict[tuple[str, int], deque[Message]] = {}
        self._kept: dict[tuple[str, int], deque[Arrays]] = {}

    def send(
        self, kind: str, to: int, arrays: Arrays, *, key: Hashable, tag: str, about: Any, keep: int
    ) -> None:
        """As many messages of the link as Links keeps are kept here."""
        kept = self._kept.setdefault((kind, to), deque())
        while len(kept) >= keep:
            kept.popleft()
        kept.append(arrays)

    def expect(self, kind: str, source: int, *, key: Hashable, tag: str) -> None:
        self._expected.setdefault((kind, source), deque()).append(self._messages[key])

    def receive(self, kind: str, source: int, *, tag: str) -> SimpleNamespace:
        shapes, form = self._expected[kind, source].popleft()
        return SimpleNamespace(arrays=_arrays(shapes), about=form, free=lambda: None)

    def finish(self) -> None:
        """Do nothing: every message is delivered at once."""
        self._kept.clear()
