"""What features of tests/fsdp/test_pairs.py issue in three steps, recorded: nothing runs.

On one rank that speaks for all, or one of each stage of a pipeline; or on ranks of a node that share memory.
In five units or in one; with attempts that raise before the second step and before the third.
"""

import threading
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import partial

import pytest

from shardrt.autograd import Function
from shardrt.comm import init_device_mesh
from shardrt.comm.mesh_layout import without
from shardrt.comm.protocol import Communicator
from shardrt.device.cpu import CPUDevice
from shardrt.device.cuda import CUDADevice
from shardrt.simulate.roles import roles_of
from shardrt.simulate.script import record_of
from tests.fsdp import paired
from tests.fsdp.test_pairs import CUT, STRATEGIES, options_of, ranks_for

# Values are made up, so no checkpoint can be read back.
LEFT_OUT = {"save and load"}
IN_TREES = {"world-invariant", "tensor-invariant"}  # sums over NCCL have to be made by the fixed tree
FAILS = ("gather", "reduce", "forward", "backward")  # the first two: in a collective in that stream
_backward = paired.backward
_calls = {"gather": Communicator.all_gather, "reduce": Communicator.reduce_scatter}


@dataclass(frozen=True)
class Case:
    """names: the features. like: what the device stands for.

    shared: how many ranks along the data's axis share memory, with all others on their node; 0: none do.
    one_unit: the model is one. fails: of FAILS, where attempts raise: the first before the second step, the
    next before the third, and so on by turns; turn: at which of the places there.
    """

    names: tuple[str, ...]
    like: type = CUDADevice
    shared: int = 0
    one_unit: bool = False
    fails: tuple[str, ...] = ()
    turn: int = 0

    def __str__(self):
        words = [" + ".join(self.names)]
        words += [f"{self.shared} sharing"] if self.shared else []
        words += ["one unit"] if self.one_unit else []
        words += [f"fails in {' and '.join(self.fails)} {self.turn}"] if self.fails else []
        return ", ".join(words)

    @property
    def ranks(self):
        return int(ranks_for(self.names, self.shared or 2))

    @property
    def roles(self):
        """The recorded ranks, each with those that it speaks for, which share no memory with it.

        Where memory is shared, they are those beside it along axes that cut modules or have copies.
        """
        names, ranks = set(self.names), self.ranks
        if not self.shared:
            stages = ranks // (4 if "DiLoCo" in names else 2)  # ranks of a stage, on a host
            return roles_of(((stages, 2 * stages),) if "pipeline" in names else (), ranks)
        cut = 2 if CUT & names else 1
        alike = ((1, 2),) * (cut > 1)
        hybrid = [name.startswith("HYBRID") for name in names.intersection(STRATEGIES)]
        if "expert parallel" not in names and hybrid and all(hybrid):
            each = 2 * cut * (2 if "context parallel" in names else 1)
            alike = ((each, 2 * each), *alike)
        return roles_of(without(((1, ranks),), alike), ranks)


def recorded(case, directory, follow=None, exact=False):
    """The programs of the ranks that are recorded of a case."""
    names = tuple(name for name in case.names if name not in LEFT_OUT)
    mesh = partial(init_device_mesh, reduction="tree" if IN_TREES & set(names) else "nccl")
    options = options_of(names) | ({"one_unit": [True]} if case.one_unit else {})
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fully_shard: expected")  # unused units do
        patch.setattr(paired, "init_device_mesh", mesh)
        if case.fails:
            failing = _Failing(case.fails, case.turn)
            patch.setattr(paired, "backward", failing.backward)
            for stream, call in _calls.items():
                patch.setattr(Communicator, call.__name__, failing.call(stream, call))
        return record_of(
            partial(paired.train, options, directory),
            case.ranks,
            stands_for=case.roles,
            like=CPUDevice if case.shared else case.like,
            local_size=case.ranks if case.shared else 8,
            shared=case.shared > 0,
            follow=follow,
            exact=exact,
        )


class Fault(Exception):
    """What an attempt raises."""


class _Raises(Function):
    """Its input; backward raises."""

    def forward(self, x):
        return x.copy()

    def backward(self, dy):
        raise Fault


class _Failing(threading.local):
    """In place of paired.backward: attempts raise before it, and what they have summed is forgotten."""

    def __init__(self, fails, turn):
        self._before = {2: fails[::2], 3: fails[1::2]}  # by step
        self._turn = turn
        self._steps, self._calls = 0, Counter()  # collectives of the first step that might raise
        self._where, self._left = "", 0  # collectives before the one that raises

    def backward(self, model, *args):
        self._steps += 1
        for where in self._before.get(self._steps, ()):
            if where in _calls and not self._calls[where]:
                continue
            self._where, self._left = where, self._turn % (self._calls[where] or 1)
            hook = self._hook(where, model.blocks[-1 if self._turn % 2 else 0])
            with pytest.raises(Fault):
                _backward(model, *args)
            hook()
            self._where = ""
            model.zero_grad()
        return _backward(model, *args)

    def _hook(self, where, block):
        """Have the block raise, where it is a block that does; gives what ends that."""
        if where == "forward":
            return block.register_forward_pre_hook(_raise).remove
        if where == "backward":
            return block.register_forward_hook(lambda block, x, y: _Raises.apply(y)).remove
        return lambda: None

    def call(self, name, call):
        """A method of communicators that raises when its turn has come."""

        def called(communicator, *arrays, stream, **options):
            if stream.name == name:
                self._calls[name] += self._steps == 1
                self._left -= name == self._where
                if name == self._where and self._left == -1:
                    raise Fault
            call(communicator, *arrays, stream=stream, **options)

        return called


def _raise(*args):
    raise Fault
