"""Runs a script or module as it stands in a simulated world, up to some optimizer step, and records it.

    (program,) = record(["train.py", "--lr", "1e-3"], ranks=4096)

`init_device_mesh` gives the simulated mesh there. What the script prints goes to stderr: its numbers are made
up. What it writes, it writes; the training command makes no run directory.
"""

import gc
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from shardrt import autograd, device
from shardrt.comm.mesh_layout import MeshLayout
from shardrt.comm.simulated import run
from shardrt.device import timeline
from shardrt.device.cuda import CUDADevice
from shardrt.device.program import Program
from shardrt.device.protocol import Device
from shardrt.device.simulated import SimulatedDevice
from shardrt.device.timeline import Span
from shardrt.simulate.roles import Roles, recorded
from shardrt.simulate.values import Values
from shardrt.train.command import module_name

__all__ = ["NoScript", "expanded", "record", "record_of"]

_MOST = 1 << 40  # items of a program


class NoScript(ValueError):
    """There is no such script or module."""


class _Ended(BaseException):
    """Enough steps: unwinds the script, which may catch errors."""


def record(
    command: Sequence[str],
    ranks: int = 1,
    *,
    steps: int = 2,
    like: Device | type[Device] = CUDADevice,
    stands_for: Roles | None = None,
    local_size: int = 8,
    shared: bool = False,
    values: Values | None = None,
    shape: tuple[int, ...] | None = None,
    follow: Callable[[SimulatedDevice], None] | None = None,
    exact: bool = False,
) -> list[Program]:
    """What the recorded ranks issue in `steps` optimizer steps, or until the script ends.

    Args:
        command: a script and its arguments; or a module and its own, with "-m" before it or without;
            or "train" and the arguments of the training command.
        ranks: how many there are, `local_size` a node.
        stands_for: the recorded ones, each with the ranks that it stands for; if not given, one of each role
            (roles.py), for which a pipeline begins twice.
        shared: see comm.simulated.world_of.
        like, values: see SimulatedDevice.
        shape: of a mesh that the script gives none.
        follow: called with the device of each recorded rank, before the script runs.
        exact: see Program. Experts then get the rows that the recorded ranks send, not the planned ones.

    Raises:
        NoScript: where there is none.
        SystemExit: where it ends with a code that is not 0, and whatever it raises.
    """
    with _command(command) as start:
        return record_of(
            start,
            ranks,
            steps=steps,
            like=like,
            stands_for=stands_for,
            local_size=local_size,
            shared=shared,
            values=values,
            shape=shape,
            follow=follow,
            exact=exact,
        )


def record_of(
    function: Any,
    ranks: int = 1,
    *,
    steps: int = 0,
    like: Device | type[Device] = CUDADevice,
    stands_for: Roles | None = None,
    local_size: int = 8,
    shared: bool = False,
    values: Values | None = None,
    shape: tuple[int, ...] | None = None,
    follow: Callable[[SimulatedDevice], None] | None = None,
    exact: bool = False,
) -> list[Program]:
    """As `record`, of what `function()` does.

    Args:
        steps: 0 for all.
    """
    world = {"local_size": local_size, "shared": shared, "shape": shape, "follow": follow, "exact": exact}

    def of(roles: Roles, on_divergence: Callable[[MeshLayout], None] | None) -> list[Program]:
        return _recorded(function, ranks, roles, on_divergence, steps, like, values or Values(), **world)

    return of(stands_for, None) if stands_for is not None else recorded(of, ranks)


def _recorded(
    function: Any,
    ranks: int,
    stands_for: Roles,
    on_divergence: Callable[[MeshLayout], None] | None,
    steps: int,
    like: Device | type[Device],
    values: Values,
    follow: Callable[[SimulatedDevice], None] | None,
    exact: bool,
    **world: Any,
) -> list[Program]:
    own = threading.local()  # each recorded rank is a thread

    def device_of(rank: int) -> SimulatedDevice:
        own.device = SimulatedDevice(like, values)
        own.device.on_divergence, own.device.whose = on_divergence, _module_now
        own.device.program.alike, own.device.program.exact = stands_for[rank], exact
        if follow is not None:
            follow(own.device)
        return own.device

    def one() -> Program:
        here, kept = own.device, []
        program = here.program

        def stepped(number: int) -> None:
            if number + 1 == steps:
                here.program = Program()  # of what the script does while it is left
                raise _Ended

        here.on_step = stepped
        try:
            kept.append(function())  # the result stays alive: no step frees it
        except _Ended:
            pass
        except SystemExit as end:
            if end.code:
                raise
        here.program = Program()
        return program

    with _fewer_collections():
        return run(ranks, stands_for, device_of, one, **world)


@contextmanager
def _fewer_collections() -> Iterator[None]:
    """Inside, Python looks for garbage more rarely: a recording makes many objects, and they stay."""
    before = gc.get_threshold()
    gc.set_threshold(20_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _module_now() -> str:
    """The innermost layer whose forward runs in this thread, or whose backward does."""
    if running := autograd.modules():
        return running[-1].name
    run = autograd.running()
    node = run.nodes[run.position] if run is not None and run.position < len(run.nodes) else None
    return node.module.name if node is not None and node.module is not None else ""


@contextmanager
def spans_kept() -> Iterator[Callable[[Program], list[Span]]]:
    """Inside, spans are kept whose times are places among a program's items; it gives those of a program.

    Raises:
        RuntimeError: where a timeline is recorded already.
    """
    numbers: dict[int, tuple[int, Program]] = {}  # kept, so that no other one has the same id

    def place() -> float:
        program = device.current().program
        number, _ = numbers.setdefault(id(program), (len(numbers), program))
        return float(number * _MOST + len(program.items))

    def of(program: Program) -> list[Span]:
        first = numbers[id(program)][0] * _MOST if id(program) in numbers else -1.0
        return [
            replace(span, start=span.start - first, stop=span.stop - first)
            for span in kept.spans
            if first <= span.start < first + _MOST
        ]

    with timeline.record_all(place) as kept:
        yield of


@contextmanager
def _command(command: Sequence[str]) -> Iterator[Any]:
    """What starts it, once for each rank that calls. Inside, sys.argv and sys.path are as Python has them."""
    name, arguments, is_module = _target(list(command))
    before = sys.argv, sys.path[:]
    sys.path.insert(0, str(Path.cwd() if is_module else Path(name).resolve().parent))
    try:
        code, module = _module(name) if is_module else (_script(name), {"__file__": name})
        sys.argv = [module["__file__"], *arguments]

        def start() -> dict[str, Any]:
            names = ModuleType("__main__").__dict__
            names.update(module)
            exec(code, names)
            return names

        with redirect_stdout(sys.stderr):
            yield start
    finally:
        sys.argv, sys.path[:] = before


def expanded(command: Sequence[str]) -> list[str]:
    """The command with "train", if it begins so, replaced by the module that `shardrt train` runs."""
    return ["-m", module_name(), *command[1:]] if command[:1] == ["train"] else list(command)


def _target(command: list[str]) -> tuple[str, list[str], bool]:
    """(script or module, its arguments, whether it is a module)."""
    command = expanded(command)
    is_module = command[0] == "-m" if command else False
    if len(command) <= is_module:
        raise NoScript("no script: name it after --")
    name, *arguments = command[is_module:]
    return name, arguments, is_module or not (name.endswith(".py") or Path(name).is_file())


def _script(name: str) -> CodeType:
    try:
        return compile(Path(name).read_bytes(), name, "exec")
    except OSError as error:
        raise NoScript(f"{name}: {error.strerror}") from None


def _module(name: str) -> tuple[CodeType, dict[str, Any]]:
    """Its code, and what it knows about itself."""
    try:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError):
        found = None
    code = found.loader.get_code(found.name) if found is not None and found.loader is not None else None
    if code is None:
        raise NoScript(f"{name}: no such script or module")
    return code, {"__file__": found.origin, "__package__": found.parent, "__spec__": found}
