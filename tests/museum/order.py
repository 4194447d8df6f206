"""Bugs in which calls of ranks don't match, or ranks wait for each other."""

from functools import partial

from shardrt.comm.links import _End
from shardrt.fsdp.forward import ForwardPass
from tests.museum.bug import Bug, Change
from tests.museum.programs import Skipping, train, train_stages

__all__ = ["ORDER"]

ORDER = [
    Bug(
        reference="deepspeedai/DeepSpeed#7998",
        title="[REQUEST]Will zero 3 support diffrent module usage?",
        did="One rank called a module that the other left out: it gathered alone, and hung.",
        check="order",
        first=r"(the recorded programs deadlock: rank 0|rank 1), .*all_gather.* blocks\.[02]",
        operation="`all_gather`",
        changes=(Change(ForwardPass._gather_skipped, "self._gathers.ensure(unit)", "pass"),),
        program=partial(train, make=Skipping, prefetch=0),
        each=True,
    ),
    Bug(
        reference="pytorch/pytorch#172668",
        title="Pipeline communication blocks the execution of pipeline stages",
        did="Both directions shared one queue: each of two ranks waited for its send before it received.",
        check="order",
        first=r"rank 0, send .*F1 of stage 0",
        operation="`send`",
        changes=(
            Change(
                _End.__init__,
                '_stream(mesh.device, communicator, f"{kind} {source} to {to}")',
                'mesh.stream("links")',
            ),
        ),
        program=train_stages,
        each=True,
    ),
]
