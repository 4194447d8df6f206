"""Recording of the calls of a mesh's communicators. Each communicator has a unique name.

`record` attaches a Recorder, such as faults' flight recorder, to the present and later communicators of a
root mesh and its slices. The mesh itself does not know the recorder.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from shardrt.comm.interceptors import Call, Interceptor
from shardrt.comm.mesh import DeviceMesh

__all__ = ["MESSAGES", "part", "record"]

MESSAGES = ("send", "recv", "exchange")  # calls of two ranks, not of all


class Recorder(Protocol):
    """Records calls; faults' flight recorder is one."""

    meshes: int  # number of root meshes that it records

    def facts(self, communicator: str, number: int, operation: str, unit: str, array: Any) -> tuple:
        """The record of a collective: the `number`-th call of a communicator, for `unit`."""

    def around(self, facts: tuple, function: Callable[..., Any], args: tuple) -> Any:
        """Record that a collective begins, run it, record that it is done.

        Returns:
            Its result.
        """

    def part(self, phase: str, action: str = "") -> None:
        """Note that a part of a step begins; action: the action of a pipeline."""


class Recorded(Interceptor):
    """Passes every call to a recorder.

    Args:
        name: the name of the communicator, unique in this run.
    """

    def __init__(self, communicator: Any, recorder: Recorder, name: str) -> None:
        super().__init__(communicator)
        self.name = name
        self._recorder = recorder
        self._number = 0  # of the latest collective; messages do not count, so it is equal on all ranks

    def intercept(self, call: Call, run: Callable[..., Any]) -> Callable[..., Any]:
        return self._recorded(call.name, call.tag, call.array, run)

    def intercept_bytes(self, run: Callable[[bytes], list[bytes]]) -> Callable[[bytes], list[bytes]]:
        return self._recorded("all_gather_bytes", "", None, run)

    def _recorded(self, name: str, tag: str, array: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        self._number += name not in MESSAGES
        facts = self._recorder.facts(self.name, self._number, name, tag, array)
        return lambda *args: self._recorder.around(facts, run, args)


def group_name(role: str, ranks: Sequence[int], world: int) -> str:
    """The name of a communicator: its role, and its ranks unless it has all: gather[0:8:2].

    So the two groups of an axis have different names.
    """
    if list(ranks) == list(range(world)):
        return role
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    run = range(ranks[0], ranks[-1] + 1, step) if step > 0 else range(0)
    if list(run) != list(ranks):
        return f"{role}[{','.join(map(str, ranks))}]"
    every = f":{step}" if step > 1 else ""
    return f"{role}[{run.start}:{run.stop}{every}]"


def record(mesh: DeviceMesh, recorder: Recorder | None) -> None:
    """Record the calls of all communicators of `mesh.root` and its slices, and the parts of steps.

    Args:
        recorder: None ends the recording.
    """
    recording = _recordings.get(mesh.root)
    if recording is None:
        recording = _recordings[mesh.root] = _Recording(mesh.root.size)
        mesh.attach(recording.take)
    recording.recorder = recorder
    if recorder is not None:
        recorder.meshes += 1
        recording.number = recorder.meshes
    for communicator, role, ranks in mesh.communicators():
        recording.take(communicator, role, ranks)


def part(mesh: DeviceMesh, phase: str, action: str = "") -> None:
    """Note that a part of a step begins: "forward" or "backward"; action: the action of a pipeline."""
    recording = _recordings.get(mesh.root)
    if recording is not None and recording.recorder is not None:
        recording.recorder.part(phase, action)


def recorder_of(mesh: DeviceMesh, role: str, *ranks: int) -> tuple[Recorder | None, str]:
    """(recorder or None, name) of the communicator for `role` over these ranks of `mesh`."""
    recording, world = _recordings.get(mesh.root) or _Recording(mesh.root.size), mesh.ranks.ravel()
    return recording.recorder, recording.name(role, tuple(int(world[rank]) for rank in ranks))


class _Recording:
    """The recorder of one root mesh of `size` ranks and its slices."""

    def __init__(self, size: int) -> None:
        self.recorder: Recorder | None = None
        self.number = 1  # number of this root mesh in the recorder
        self._size = size

    def take(self, communicator: Any, role: str, ranks: tuple[int, ...]) -> None:
        """Let the present recorder, and no other, record a communicator."""
        others = (each for each in communicator.interceptors if not isinstance(each, Recorded))
        communicator.interceptors = tuple(others)
        if self.recorder is not None:
            Recorded(communicator, self.recorder, self.name(role, ranks))

    def name(self, role: str, ranks: tuple[int, ...]) -> str:
        """The name of a communicator; no other communicator of this run has it."""
        name = group_name(role, ranks, self._size)
        return name if self.number == 1 else f"{name}~{self.number}"


_recordings: WeakKeyDictionary[DeviceMesh, _Recording] = WeakKeyDictionary()  # by root mesh
